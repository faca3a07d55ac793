"""Scaling by load in a simulated fleet: hours of traces, beside the best fixed size.

    python -m benchmarks.scaling [--seeds 5] [--start-s 60] [--wake-s 8] [--result FILE]

`skyctl.core.scaling.decide` sees what the supervisor would see, and simulated servers do what they
are told. A server takes `SLOTS` requests at a time, each for `SERVICE_S`; the others wait in its
queue. The router gives a request to the server with the fewest. A server that is added starts, or
wakes if it sleeps; a removed one takes no more requests, and sleeps once it has none, for the
policy's `sleep_s`.

`lag` is how long requests waited for a slot. `replica_s` are the seconds of servers that are not
asleep, including those that start and drain; `asleep_s` those of sleepers. `changes` counts changes
of the number, `turns` how often a rise follows a fall or the other way round. The best fixed size
is the smallest with which 95 of 100 requests wait for `GOAL_S` at most.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyctl.core.scaling import Sample, decide, kept
from skyctl.fleetfile.scaling import ScaleSection

SLOTS, SERVICE_S = 40, 10
HOUR_S = 3600
GOAL_S = 5.0
POLICY = ScaleSection(min=2, max=8, target="queue", value=32)
Rate = Callable[[int], float]
"""Requests per second at a second of the trace. A server takes 4."""

TRACES: dict[str, Rate] = {
    "steady": lambda second: 5.0,
    "step x4 and back": lambda second: 16.0 if 600 <= second < 2400 else 4.0,
    "day": lambda second: 10.0 - 9.0 * math.cos(2 * math.pi * second / HOUR_S),
    "sawtooth of 20 minutes": lambda second: 1.0 + 19.0 * (second % 1200) / 1200,
    "bursts of 30 s": lambda second: 20.0 if second % 600 < 30 else 3.0,
    "flapping each minute": lambda second: 14.0 if second // 60 % 2 else 3.0,
    "rollouts: 5 minutes on, 5 off": lambda second: 20.0 if second // 300 % 2 else 0.0,
}


@dataclass
class Server:
    """One simulated server. `state`: starting, serving, draining, asleep."""

    state: str
    ready_at: int = 0
    ends: deque[int] = field(default_factory=deque)
    queue: deque[int] = field(default_factory=deque)
    asleep_since: int = 0

    @property
    def in_flight(self) -> int:
        return len(self.ends) + len(self.queue)


@dataclass
class Outcome:
    """What a trace came to."""

    lags: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    replica_s: int = 0
    asleep_s: int = 0
    unserved: int = 0
    """Requests that no server would take: they would have failed."""

    @property
    def steps(self) -> list[int]:
        return [b - a for a, b in pairwise(self.counts) if b != a]

    @property
    def turns(self) -> int:
        return sum((a > 0) != (b > 0) for a, b in pairwise(self.steps))

    def lag(self, share: float) -> float:
        ordered = sorted(self.lags)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "lag_p50_s": self.lag(0.5),
            "lag_p95_s": self.lag(0.95),
            "lag_max_s": max(self.lags, default=0.0),
            "replica_s": self.replica_s,
            "asleep_s": self.asleep_s,
            "most": max(self.counts),
            "changes": len(self.steps),
            "turns": self.turns,
        }


class Fleet:
    """Servers under one policy; without one, a fixed number."""

    def __init__(
        self,
        count: int,
        policy: ScaleSection | None = None,
        *,
        start_s: int = 60,
        wake_s: int = 8,
        blind: Callable[[int], bool] = lambda second: False,
    ) -> None:
        self.servers = [Server("serving") for _ in range(count)]
        self._policy, self._start_s, self._wake_s = policy, start_s, wake_s
        self._blind = blind
        self._samples: list[Sample] = []
        self._last_down = -math.inf
        self.outcome = Outcome()

    def run(self, rate: Rate, seconds: int = HOUR_S, seed: int = 0) -> Outcome:
        dice = random.Random(seed)
        interval_s = max(1, round(self._policy.interval_s)) if self._policy else 0
        for second in range(seconds):
            for _ in range(_poisson(dice, rate(second))):
                self._route(second)
            for server in self.servers:
                self._serve(server, second)
            if self._policy and second % interval_s == 0:
                self._scale(self._policy, second)
            self._count()
        return self.outcome

    def _in(self, *states: str) -> list[Server]:
        return [server for server in self.servers if server.state in states]

    def _route(self, second: int) -> None:
        serving = self._in("serving")
        if not serving:
            self.outcome.unserved += 1
            return
        min(serving, key=lambda server: server.in_flight).queue.append(second)

    def _serve(self, server: Server, second: int) -> None:
        if server.state == "starting" and second >= server.ready_at:
            server.state = "serving"
        while server.ends and server.ends[0] <= second:
            server.ends.popleft()
        while server.queue and len(server.ends) < SLOTS:
            self.outcome.lags.append(float(second - server.queue.popleft()))
            server.ends.append(second + SERVICE_S)

    def _scale(self, policy: ScaleSection, second: int) -> None:
        for server in self._in("draining"):
            if not server.in_flight:
                server.state, server.asleep_since = "asleep", second
        for server in self._in("asleep"):
            if second - server.asleep_since >= policy.sleep_s:
                self.servers.remove(server)
        serving, starting = self._in("serving"), self._in("starting")
        load = float(sum(server.in_flight for server in serving))
        missing = "it does not say" if self._blind(second) else ""
        answered = 0 if missing else len(serving)
        missing = missing or ("one starts" if starting else "")
        self._samples.append(Sample(second, load, answered, missing, len(starting)))
        self._samples = kept(policy, self._samples)
        count = len(serving) + len(starting)
        decision = decide(policy, self._samples, count, last_step_down=self._last_down)
        for _ in range(decision.count - count):
            self._add(second)
        if decision.count < count:
            serving[-1].state = "draining"
            self._last_down = second

    def _add(self, second: int) -> None:
        for state, ready_in_s in (("draining", 0), ("asleep", self._wake_s)):
            if servers := self._in(state):
                servers[0].state, servers[0].ready_at = "starting", second + ready_in_s
                return
        self.servers.append(Server("starting", second + self._start_s))

    def _count(self) -> None:
        self.outcome.counts.append(len(self._in("serving", "starting")))
        self.outcome.replica_s += len(self._in("serving", "starting", "draining"))
        self.outcome.asleep_s += len(self._in("asleep"))


def _poisson(dice: random.Random, mean: float) -> int:
    limit, product, count = math.exp(-mean), dice.random(), 0
    while product > limit:
        product *= dice.random()
        count += 1
    return count


def best_fixed(rate: Rate, seed: int = 0, most: int = 16) -> tuple[int, Outcome]:
    """The smallest fixed size whose lag is within the goal, and what it came to."""
    for count in range(1, most + 1):
        outcome = Fleet(count).run(rate, seed=seed)
        if outcome.lag(0.95) <= GOAL_S:
            return count, outcome
    raise ValueError(f"{most} servers are too few")


def measure(seeds: Sequence[int], start_s: int, wake_s: int) -> dict[str, Any]:
    traces: dict[str, Any] = {}
    for name, rate in TRACES.items():
        scaled = [
            Fleet(POLICY.min, POLICY, start_s=start_s, wake_s=wake_s).run(rate, seed=seed)
            for seed in seeds
        ]
        fixed = [best_fixed(rate, seed) for seed in seeds]
        traces[name] = {
            "scaled": _median([outcome.to_json() for outcome in scaled]),
            "fixed": {
                "size": statistics.median(size for size, _ in fixed),
                **_median([outcome.to_json() for _, outcome in fixed]),
            },
            "unserved": sum(outcome.unserved for outcome in scaled),
        }
        share = traces[name]["scaled"]["replica_s"] / traces[name]["fixed"]["replica_s"]
        traces[name]["share_of_fixed"] = round(share, 2)
    return traces


def _median(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--start-s", type=int, default=60)
    parser.add_argument("--wake-s", type=int, default=8)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    result = {
        "benchmark": "scaling",
        "policy": POLICY.model_dump(),
        "slots": SLOTS,
        "service_s": SERVICE_S,
        "start_s": options.start_s,
        "wake_s": options.wake_s,
        "seeds": options.seeds,
        "traces": measure(range(options.seeds), options.start_s, options.wake_s),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.result:
        options.result.write_text(text + "\n")


if __name__ == "__main__":
    main()

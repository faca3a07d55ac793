"""Freezes by each mode with many requests in flight, through the real router: how many of them are
refused, and how long servers have no traffic after the thaw.

    python -m benchmarks.thaw [--real] [--in-flight 200] [--rounds 5] [--write]
    python -m benchmarks.thaw --jobs 7 --seconds 200 --write    each mode on a fleet of its own
    python -m benchmarks.thaw --only "no freeze" "pause --mode wait" --write     these cases anew

Clients send one completion after the other. Each mode is that of pushes, and of pauses of five
seconds. `refused` counts answers other than 200, and broken connections. A server has traffic when
its counters of tokens, prompts' and generated, have grown; a thread for each server reads them
every 20 ms, and `unread_s` is the longest time between two readings after a thaw. `idle_s` is
the longest time without traffic of any server in the 10 s from its thaw on: a router whose circuit
breaker is open sends it nothing for a minute. `no freeze` is the same without one: what the
machine's load adds; `load` is that of all its processes, by the kernel, as the case ended.
`--real`: two vLLM CPU servers. Needs vllm-router.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.side_by_side import side_by_side
from tests.faults.stub_fleet import routed_fleet
from tests.integration.conftest import SERVER_ENVIRONMENT
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, bearer, greedy_body
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

RESULT = Path(__file__).parent / "results" / "thaw.json"
CASES = [*itertools.product(("abort", "wait", "keep"), ("push", "pause"))]
TOKENS = 8
PAUSE_S = 5.0
WATCHED_S = 10.0
READ_INTERVAL_S = 0.02
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total{.*} (\S+)$", re.M)


@dataclass
class Watch:
    """What one server did, by `time.monotonic`."""

    url: str
    """The server's."""
    thawed: float = 0.0
    """When it was last seen to run again after it was paused; 0.0 before."""
    traffic: list[float] = field(default_factory=list)
    """When its counters of tokens were seen to have grown."""
    readings: list[float] = field(default_factory=list)
    """When they were read."""

    def longest_s(self, moments: Sequence[float]) -> float:
        """The longest time between two of these moments since its thaw."""
        end = self.thawed + WATCHED_S
        watched = [moment for moment in moments if self.thawed < moment < end]
        pairs = itertools.pairwise([self.thawed, *watched, end])
        return max(later - earlier for earlier, later in pairs)

    def read_until(self, over: threading.Event, headers: dict[str, str]) -> None:
        """Read the server's counters, and whether it is paused, until it is over."""
        before, was_paused = 0.0, False
        with httpx.Client(
            base_url=self.url, trust_env=False, timeout=30, headers=headers
        ) as client:
            while not over.wait(READ_INTERVAL_S):
                with suppress(httpx.TransportError):  # what was not seen counts as idle
                    page = client.get("/metrics").text
                    total = sum(float(number) for number in _TOKENS.findall(page))
                    self.readings.append(time.monotonic())
                    if total > before:
                        self.traffic.append(self.readings[-1])
                    before = total
                    paused = client.get("/is_paused").json()["is_paused"]
                    if was_paused and not paused:
                        self.thawed = time.monotonic()
                    was_paused = paused


class Load:
    """Clients of a fleet, and a watch over each of its servers."""

    def __init__(self, urls: dict[str, Any], token: str, in_flight: int) -> None:
        self._router, self._model = urls["router"], urls["model"]
        self._headers = bearer(token) if token else {}
        self._in_flight = in_flight
        self._trust = httpx.create_ssl_context()  # each client would read all certificates
        self._over = threading.Event()
        self.watches = [Watch(url) for url in urls["servers"].values()]
        self.statuses: Counter[str] = Counter()
        self.under_way = 0

    @contextmanager
    def begun(self, tasks: asyncio.TaskGroup) -> Iterator[None]:
        for number in range(self._in_flight):
            tasks.create_task(self._client(number))
        readers = [
            threading.Thread(target=watch.read_until, args=(self._over, self._headers))
            for watch in self.watches
        ]
        for reader in readers:
            reader.start()
        try:
            yield
        finally:
            self._over.set()
            for reader in readers:
                reader.join()

    async def _client(self, number: int) -> None:
        await asyncio.sleep(number * 0.01)
        async with httpx.AsyncClient(trust_env=False, timeout=120, verify=self._trust) as client:
            while not self._over.is_set():
                body = greedy_body(self._model, f"{number} {time.monotonic()}", TOKENS)
                self.under_way += 1
                status = "broken"
                with suppress(httpx.TransportError):
                    url = f"{self._router}/v1/completions"
                    answer = await client.post(url, json=body, headers=self._headers)
                    status = str(answer.status_code)
                    if (
                        answer.is_success
                        and answer.json()["choices"][0]["finish_reason"] == "abort"
                    ):
                        status = "200, aborted"
                self.under_way -= 1
                self.statuses[status] += 1


class Freezes:
    """What is done to the fleet, and what came of it."""

    def __init__(self, fleet: Any, load: Load, checkpoints: list[str]) -> None:
        self._fleet, self._load = fleet, load
        self._checkpoints = itertools.cycle(checkpoints)

    async def measured(self, how: str, mode: str) -> dict[str, Any]:
        load = self._load
        while load.under_way < load._in_flight:  # noqa: ASYNC110 - of other tasks
            await asyncio.sleep(0.01)
        load.statuses.clear()
        began = time.monotonic()
        if how == "push":
            checkpoint = next(self._checkpoints)
            await self._run("sync-weights", checkpoint, "--mode", mode)
        elif how == "pause":
            await self._run("pause", "--mode", mode)
            await asyncio.sleep(PAUSE_S)
            await self._run("resume")
        for watch in load.watches:
            if watch.thawed < began:  # shorter than the interval between two looks, or none
                watch.thawed = time.monotonic()
        await asyncio.sleep(WATCHED_S + 0.5)
        statuses = dict(load.statuses)
        refused = sum(n for status, n in statuses.items() if not status.startswith("200"))
        idle_s = max(watch.longest_s(watch.traffic) for watch in load.watches)
        unread_s = max(watch.longest_s(watch.readings) for watch in load.watches)
        seconds = {"idle_s": round(idle_s, 3), "unread_s": round(unread_s, 3)}
        return {"refused": refused, **seconds, "answers": statuses}

    async def _run(self, *arguments: str) -> None:
        await asyncio.to_thread(self._fleet.run, *arguments)


@contextmanager
def stubs(root: Path) -> Iterator[tuple[Any, str, list[str]]]:
    """Two stubs behind the real router: a fleet, its secret and its checkpoints."""
    extra = "auth: none\ncheck_args: false\nargs: {token-delay-s: 0.2}\n"
    fleet = routed_fleet(root, extra, replicas=2)
    for name, seed in (("model", 1), ("b", 2)):
        write_checkpoint(root / name, tiny_tensors(seed))
    fleet.run("up")
    try:
        yield fleet, "", ["b", "model"]
    finally:
        fleet.run("down", "--drain-timeout", "0")


@contextmanager
def real(root: Path) -> Iterator[tuple[Any, str, list[str]]]:
    """The same of two vLLM CPU servers."""
    os.environ |= SERVER_ENVIRONMENT
    fleet = FleetCli(root / "tiny", root / "home")
    fleet.directory.mkdir()
    fleet.run("init", "--tiny", ".", "--name", "tiny")
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet, fleet.control_token, ["checkpoints/b", "checkpoints/a"]
    finally:
        fleet.run("down", expect=None)


async def measured(
    fleet: Any, token: str, checkpoints: list[str], case: tuple[str, str], options: Any
) -> dict[str, Any]:
    """What came of all rounds of one case."""
    mode, how = case
    load = Load(fleet.json("urls")["data"], token, options.in_flight)
    freezes = Freezes(fleet, load, checkpoints)
    async with asyncio.TaskGroup() as tasks:
        with load.begun(tasks):
            rounds = [await freezes.measured(how, mode) for _ in range(options.rounds)]
    answers: Counter[str] = Counter()
    for each in rounds:
        answers.update(each["answers"])
    router = fleet.json("top")["data"]["router"]
    return {
        "case": name_of(mode, how),
        "refused": sum(each["refused"] for each in rounds),
        "idle_s": [each["idle_s"] for each in rounds],
        "unread_s": [each["unread_s"] for each in rounds],
        "answers": dict(answers),
        "router": {key: router[key] for key in ("requests", "errors", "retries")},
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "jobs": options.jobs,
    }


def name_of(mode: str, how: str) -> str:
    """A case's name."""
    return f"{how} --mode {mode}" if mode else how


def measure(
    options: argparse.Namespace, cases: list[tuple[str, str]], deadline: float
) -> Iterator[dict[str, Any]]:
    """These cases, on a fleet of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="thaw-") as root,
        (real if options.real else stubs)(Path(root)) as (fleet, token, checkpoints),
    ):
        for case in cases:
            if time.monotonic() > deadline:
                return
            line = asyncio.run(measured(fleet, token, checkpoints, case, options))
            print(line, flush=True)
            yield line


def main() -> int:
    """Exit status 1 when a request was refused, or a server had no traffic for over a second."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.thaw")
    parser.add_argument("--real", action="store_true", help="vLLM CPU servers instead of stubs")
    parser.add_argument("--in-flight", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    every = {name_of(*case): case for case in [("", "no freeze"), *CASES]}
    parser.add_argument("--only", choices=every, nargs="+", default=[*every])
    parser.add_argument("--jobs", type=int, default=1, help="fleets side by side")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no mode after this")
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    options = parser.parse_args()
    cases = [every[name] for name in options.only]
    lines = side_by_side(partial(measure, options), cases, options.jobs, options.seconds)
    errors = [line["error"] for line in lines if "error" in line]
    results = {line.pop("case"): line for line in lines if "case" in line}
    for name, case in results.items():
        idle_s, unread_s = max(case["idle_s"]), max(case["unread_s"])
        print(
            f"{name:<20}{case['refused']:>6} refused {idle_s:>8.3f} s idle at most, "
            f"{unread_s:.3f} between readings, load {case['load']}"
        )
    print(f"{len(results)} of {len(cases)} cases;", *errors)
    if options.write:
        recorded = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        servers = recorded.setdefault("real servers" if options.real else "stubs", {})
        servers |= {n: {"in_flight": options.in_flight, **case} for n, case in results.items()}
        RESULT.write_text(json.dumps(recorded, indent=1) + "\n")
    failed = any(case["refused"] or max(case["idle_s"]) > 1.0 for case in results.values())
    return int(failed or bool(errors) or len(results) < len(cases))


if __name__ == "__main__":
    sys.exit(main())

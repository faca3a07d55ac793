"""Deaths during an update through the fleet URL: of the trainer or of a server, at each call.

    python -m benchmarks.trainer_deaths [--rounds 20] [--only trainer server] [--write]
    python -m benchmarks.trainer_deaths --jobs 16 --seconds 240 --write    160 deaths, 16 fleets

Two stub servers with their supervisor and guards, and four clients that generate on them past the
router. The trainer dies once a call is answered, or while it is under way (two rounds of
four); a server dies while it is under way. After each death comes `skyctl recover --yes`, and
another update. A violation is an answer that no committed weights give, a server that served such
weights, servers that are not ready with the same weights in the end, and an update that fails
although nothing dies. After the first round, the weights that servers start with count as
uncommitted. In every other round the served weights are in no file: a server takes them from the
other, and where the update has overwritten both, they serve nobody until the next one, which is
counted as `waited`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

import skyctl
from benchmarks.side_by_side import side_by_side
from skyctl.launch.local.host import free_port
from tests.faults.trainer_fleet import Fleet, trainer_fleet
from tests.stub.generation import expected
from tests.stub.url_trainer import CALLS
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

RESULT = Path(__file__).parent / "results" / "trainer-deaths.json"
CLIENTS = 4
TOKENS = 4
_MORE = "check_args: false\nargs: {token-delay-s: 0.01}\n"  # some are frozen amid an answer
BOUND_S = 600.0
"""Of whatever ends at once on an idle machine."""


class Asked(Fleet):
    """Asked for its status here: a process for each question would take most of the time."""

    def replicas(self) -> dict[str, dict[str, Any]]:
        status = asyncio.run(skyctl.Fleet.load(self.directory / "fleet.yaml").status())
        return {row["name"]: row for row in status.to_json()["replicas"]}


def given_by(digests: set[str], prompt: str, tokens: list[int], aborted: bool) -> bool:
    """Whether these are the tokens of one of the weights: the first of them, if it was aborted."""
    count = len(tokens) if aborted else TOKENS
    return any(tokens == expected(digest, prompt, TOKENS)[:count] for digest in digests)


class Clients:
    """Requests to both servers, and what each got: compared in the end, when it is known which
    weights were committed."""

    def __init__(self, urls: Sequence[str], model: str, key: str) -> None:
        self._urls, self._model = urls, model
        self._headers = {"Authorization": f"Bearer {key}"}
        self._answers: list[tuple[str, list[int], bool]] = []  # whether it was aborted
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def wrong(self, digests: set[str]) -> tuple[int, int]:
        """How many were answered, and how many of those by no committed weights."""
        answers, self._answers = self._answers, []
        return len(answers), sum(not given_by(digests, *answer) for answer in answers)

    def _ask(self, number: int) -> None:
        url = self._urls[number % len(self._urls)]
        with httpx.Client(headers=self._headers, trust_env=False, timeout=BOUND_S) as client:
            for count in range(10**9):
                if self._over.wait(0.1):
                    return
                prompt = f"{number} {count}"
                body = {"model": self._model, "prompt": prompt, "max_tokens": TOKENS}
                try:
                    answer = client.post(f"{url}/v1/completions", json=body)
                except httpx.TransportError:
                    continue
                if answer.status_code != 200:
                    continue
                begin, end = (answer.headers.get(f"x-weight-version-{x}") for x in ("begin", "end"))
                if begin == end:  # others have tokens of two versions
                    choice = answer.json()["choices"][0]
                    aborted = choice["finish_reason"] == "abort"
                    self._answers.append((prompt, choice["token_ids"], aborted))


class Rounds:
    """Deaths on one fleet, and what they came to."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._model: str = fleet.json("urls")["data"]["model"]
        self._key: str = fleet.json("urls", "--show-key")["data"]["api_key"]
        self._base = {state["digest"] for state in fleet.states()}
        self._committed = set(self._base)
        self._label = 0
        self._checkpoints = [
            write_checkpoint(fleet.directory / name, tiny_tensors(seed))
            for name, seed in (("a", 50_000), ("b", 60_000))
        ]

    def round(self, number: int, victim: str, call: str, dice: random.Random) -> dict[str, Any]:
        """One death: what was counted, and the violations."""
        self._label += 1
        counts = Counter(rounds=1)
        urls = [row["url"] for row in self.fleet.replicas().values()]
        with Clients(urls, self._model, self._key) as clients:
            violations = list(self._death(number, victim, call, dice, counts))
        answered, wrong = clients.wrong(self._committed)
        counts["answers"] = answered
        if wrong or not answered:
            violations.append(f"{wrong} of {answered} answers are of no committed weights")
        self._committed -= self._base  # a server that dies has them again, and must not serve them
        counts["violations"] = len(violations)
        death = f"{victim} at {call}"
        texts = [f"{death}, round {number}: {violation}" for violation in violations]
        return {"death": death, "counts": counts, "violations": texts}

    def _death(
        self, number: int, victim: str, call: str, dice: random.Random, counts: Counter[str]
    ) -> Iterator[str]:
        version = f"step-{self._label}"
        if victim == "trainer" and number // 2 % 2:
            with self.fleet.delayed(call, 1.0):
                self._dies_within(call, version)
        elif victim == "trainer":
            code, errors = self.fleet.trainer("--dies-at", call, seed=self._label, version=version)
            if code != -signal.SIGKILL:
                yield f"the trainer ended with {code}: {errors}"
        else:
            name = dice.choice(sorted(self.fleet.replicas()))
            with self.fleet.delayed(call, 5.0, name):
                self._dies_within(call, version, name, dice.choice((0.0, dice.random() / 2)))
        self.fleet.run("recover", "--yes", expect=None)
        overwritten = call == "update_weights"
        yield from self._whole("after recover", counts, may_wait=overwritten)
        code, errors = self.fleet.trainer(seed=10_000 + self._label, version=f"{version}-next")
        if code:
            yield f"the next update failed: {errors}"
        yield from self._whole("after the next update", counts)
        if number % 2 == 0:  # the next death is over weights that a file has
            self._checkpoints.reverse()
            self.fleet.run("sync-weights", str(self._checkpoints[0]))
            yield from self._whole("after the push", counts)

    def _dies_within(self, call: str, version: str, server: str = "", after_s: float = 0.0) -> None:
        """Kill the trainer, or this server, once servers carry the call out."""
        rows = self.fleet.replicas()
        row = rows[server or next(iter(rows))]
        before = self.fleet.calls(row["url"], call)
        process = self.fleet.train_begun(seed=self._label, version=version)
        self.fleet.until_called(row["url"], call, before)
        time.sleep(after_s)
        os.kill(row["pid"] if server else process.pid, signal.SIGKILL)
        process.communicate(timeout=BOUND_S)

    def _whole(self, when: str, counts: Counter[str], *, may_wait: bool = False) -> Iterator[str]:
        """Why the fleet is not whole; with `may_wait`, none of its servers need serve."""
        deadline = time.monotonic() + BOUND_S
        while not self._settled(rows := self.fleet.replicas()):
            if time.monotonic() > deadline:
                yield f"{when}: {[(row['state'], row['reason']) for row in rows.values()]}"
                return
            time.sleep(0.1)
        states = self.fleet.states()
        ready = [
            state
            for state, row in zip(states, rows.values(), strict=True)
            if row["state"] == "ready"
        ]
        if len(ready) < len(states):
            counts["waited"] += 1
        self._committed |= {state["digest"] for state in ready if state["weight_version"]}
        if not ready and not may_wait:
            yield f"{when}: no server serves: {[row['reason'] for row in rows.values()]}"
        if len({state["digest"] for state in ready}) > 1:
            yield f"{when}: servers hold different weights"
        for state in states:
            if not set(state["served"]) <= self._committed:
                yield f"{when}: served {state['served'][-1]}"
            if state in ready and (state["paused"] or state["update_open"] or state["half_loaded"]):
                yield f"{when}: left paused, open or half loaded"

    def _settled(self, rows: dict[str, dict[str, Any]]) -> bool:
        """Whether each is ready, or waits for weights that no file has."""
        waits = [row for row in rows.values() if "no file has" in (row["reason"] or "")]
        ready = [row for row in rows.values() if row["state"] == "ready"]
        return len(ready) + len(waits) == len(rows)


def deaths(order: list[tuple[int, str, str]], deadline: float) -> Iterator[dict[str, Any]]:
    """These rounds on a fleet of their own."""
    dice = random.Random(str(order))
    with (
        tempfile.TemporaryDirectory(prefix="trainer-deaths-") as directory,
        mock.patch.dict(os.environ, SKYCTL_HOME=f"{directory}/home"),
        trainer_fleet(Path(directory), free_port("127.0.0.1"), "all", Asked, _MORE) as fleet,
    ):
        fleet.bound_s = BOUND_S
        rounds = Rounds(fleet)
        for number, victim, call in order:
            if time.monotonic() > deadline:
                return
            line = rounds.round(number, victim, call, dice)
            for violation in line["violations"]:
                print(violation, flush=True)
            yield line


def main() -> int:
    """Exit status 1 when there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer_deaths")
    parser.add_argument("--rounds", type=int, default=20, help="of each death")
    parser.add_argument("--only", choices=("trainer", "server"), nargs="+")
    parser.add_argument("--calls", choices=CALLS, nargs="+", default=CALLS)
    parser.add_argument("--jobs", type=int, default=1, help="fleets side by side")
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no round after this")
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    options = parser.parse_args()
    victims = options.only or ("trainer", "server")
    began = time.monotonic()
    order = list(itertools.product(range(options.rounds), victims, options.calls))
    random.Random(1).shuffle(order)  # each fleet has all kinds of deaths after each other
    lines = side_by_side(deaths, order, options.jobs, options.seconds)
    violations = [line["error"] for line in lines if "error" in line]
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        if "error" not in line:
            counts.setdefault(line["death"], Counter()).update(line["counts"])
            violations += line["violations"]
    for name in sorted(counts):
        row = counts[name]
        print(f"{name:<45}", *(f"{row[key]:>6} {key}" for key in sorted(row)))
    total = sum(row["rounds"] for row in counts.values())
    print(f"{total} of {len(order)} deaths, {len(violations)} violations")
    if options.write:
        recorded = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        recorded[" and ".join(victims)] = {
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)),
            "jobs": options.jobs,
            "seconds": round(time.monotonic() - began),
            "deaths": {name: dict(counts[name]) for name in sorted(counts)},
            "violations": violations,
        }
        RESULT.write_text(json.dumps(recorded, indent=1) + "\n")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())

"""Deaths in live pushes into real servers: of a rank, rank 0, a worker, a server, the supervisor.

    python -m benchmarks.live_deaths [--rounds 20] [--only worker] [--minutes 60] [--write]

Two vLLM CPU servers with a tiny Qwen3, their supervisor and guards; three ranks, each with its rows
of every tensor, push it by a file in memory, by gloo, or as if each were on a machine of its own.
Ranks die at a step of the push, the supervisor at one of the push's, a server or its worker at a
random moment of a job. Each version has the values of one of four checkpoints. A client of each
server generates all the time, past the router. After each death the fleet has to come to one
version, verified, by itself, and the next push has to succeed.

A violation: the fleet does not come to one of the versions that the death allows; ranks are told
different things; an answer has other tokens than transformers generates from the checkpoint of the
version that it names; shared memory or a process stays behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil

from benchmarks.cpu_transports import taken_on
from tests import forking
from tests.faults.killing.checks import of_home
from tests.faults.live_deaths import RANK_DEATHS, SUPERVISOR_DEATHS, WAYS, Deaths
from tests.faults.live_ranks import forking_ranks, model_of
from tests.faults.stub_fleet import StubFleet
from tests.integration.endpoints import PROMPT, TOKENS
from tests.integration.fleet_cli import UP_TIMEOUT_S, bearer, greedy_body
from tests.integration.reference import answered
from tests.pids import abandoned, abandoned_since, gone
from tests.tiny import make_tiny_checkpoint

RESULT = Path(__file__).parent / "results" / "live-deaths.json"
VICTIMS = ("rank", "rank 0", "worker", "server", "supervisor")
SETTLE_S = 240.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # as the tests have them


class Clients:
    """Requests to each server, one after the other, compared with what each version generates."""

    def __init__(self, urls: Mapping[str, str], model: str, key: str) -> None:
        self._urls, self._model, self._key = urls, model, key
        self._over = threading.Event()
        self.answers: list[tuple[str, list[int]]] = []
        """The version that each began and ended with, and its tokens."""

    @contextmanager
    def asking(self) -> Iterator[None]:
        with ThreadPoolExecutor(len(self._urls)) as pool:
            ended = [pool.submit(self._ask, url) for url in self._urls.values()]
            try:
                yield
            finally:
                self._over.set()
            for future in ended:
                future.result()

    def wrong(self, expected: Sequence[list[int]]) -> list[str]:
        """Answers that the checkpoint of their version does not give; all are forgotten."""
        answers, self.answers = self.answers, []
        names = [str(number) for number in range(len(expected))]
        return [
            f"an answer of {version} has the tokens {tokens}"
            for version, tokens in answers
            if tokens != expected[int(model_of(version, names))]
        ]

    def _ask(self, url: str) -> None:
        body = greedy_body(self._model, PROMPT, TOKENS)
        with httpx.Client(headers=bearer(self._key), trust_env=False, timeout=SETTLE_S) as client:
            while not self._over.wait(0.05):
                try:
                    answer = client.post(f"{url}/v1/completions", json=body)
                except httpx.TransportError:
                    continue
                names = {answer.headers.get(f"x-weight-version-{end}") for end in ("begin", "end")}
                if answer.status_code != 200 or len(names) > 1:  # those have tokens of two
                    continue
                choice = answer.json()["choices"][0]
                if choice["finish_reason"] == "length":
                    self.answers.append((str(names.pop()), choice["token_ids"]))


class RealDeaths(Deaths):
    """Those of stubs, and of real servers and their workers."""

    def server_dies(self, way: str, dice: random.Random, *, worker: bool) -> None:
        """At a random moment of a job; its ranks learn the same of it."""
        name = dice.choice(sorted(self.fleet.replicas()))
        victim = psutil.Process(self.fleet.replicas()[name]["pid"])
        if worker:
            [victim] = [p for p in victim.children(recursive=True) if _is_engine_core(p)]
        began = time.monotonic()
        self.goes_on(way)  # type: ignore[arg-type]
        lasts_s = time.monotonic() - began
        before = self.version
        cut = self.next_version()
        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(self.run, cut, way=way)  # type: ignore[arg-type]
            time.sleep(dice.random() * lasts_s)
            victim.send_signal(signal.SIGKILL)
            ended = pushing.result()
        assert gone(victim.pid, within_s=10.0), "it has not died"
        answers = {row.error for row in ended}
        assert len(answers) == 1, f"ranks are told different things: {answers}"
        now = self.settled({before, cut})
        assert answers.pop() or now == cut
        self.goes_on(way)  # type: ignore[arg-type]


def _is_engine_core(process: psutil.Process) -> bool:
    try:
        return "EngineCore" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def dies(fleet: RealDeaths, victim: str, dice: random.Random) -> str:
    """One death; where it was."""
    if victim == "supervisor":
        point = dice.choice(SUPERVISOR_DEATHS)
        fleet.supervisor_dies(point)
        return point
    if victim in ("server", "worker"):
        way = dice.choice(WAYS)
        fleet.server_dies(way, dice, worker=victim == "worker")
        return way
    deaths = [death for death in RANK_DEATHS if bool(death[2]) == (victim == "rank")]
    way, point, rank = dice.choice(deaths)
    fleet.rank_dies(way, point, rank)
    return f"{way}, {point}"


@contextmanager
def real_fleet(directory: Path, models: Sequence[str]) -> Iterator[RealDeaths]:
    """Two servers that are up, and a process that forks ranks."""
    stubs = StubFleet(directory, environ=_ENVIRONMENT, bound_s=UP_TIMEOUT_S)
    stubs.run("init", "--tiny", ".", "--name", "stubs")
    with (directory / "fleet.yaml").open("a") as file:
        file.write("restart: {max_restarts: 1000, backoff_max_s: 2}\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
    env |= {"SKYCTL_HOME": str(directory / "home"), "OMP_NUM_THREADS": "1"}
    try:
        stubs.run("up")
        with forking_ranks(directory / "fleet.yaml", env) as ranks:
            yield RealDeaths(stubs, ranks, SETTLE_S, tuple(models))
    finally:
        stubs.run("down", "--drain-timeout", "0")


def play(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All deaths on one fleet: what was counted, and the violations."""
    models = [make_tiny_checkpoint(directory / f"model-{n}", seed=10 + n) for n in range(4)]
    expected = [answered(model, PROMPT, TOKENS) for model in models]
    assert len({tuple(tokens) for tokens in expected}) == len(models), "some answer alike"
    dice, counts = random.Random(options.seed), dict[str, Counter[str]]()
    order = [victim for victim in options.only for _ in range(options.rounds)]
    dice.shuffle(order)
    violations, until = [], time.monotonic() + options.minutes * 60
    with real_fleet(directory, [str(model) for model in models]) as fleet:
        fleet.goes_on()
        urls = fleet.fleet.json("urls")["data"]
        key = fleet.fleet.json("urls", "--show-key")["data"]["api_key"]
        clients = Clients(urls["servers"], urls["model"], key)
        with clients.asking():
            for victim in order:
                if time.monotonic() > until:
                    break
                began, where = time.monotonic(), ""
                try:
                    where = dies(fleet, victim, dice)
                except AssertionError as error:
                    violations.append(f"{victim}: {str(error)[:2000]}")
                    print(violations[-1], flush=True)
                took = time.monotonic() - began
                count = counts.setdefault(victim, Counter())
                count.update(deaths=1, answers=len(clients.answers))
                count["seconds"] += round(took)
                violations += [f"{victim}: {wrong}" for wrong in clients.wrong(expected)]
                print(f"{victim}, {where}: {took:.1f} s, {len(violations)} violations", flush=True)
    return {"deaths": {name: dict(counts[name]) for name in counts}, "violations": violations}


def main() -> int:
    """Exit status 1 when there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_deaths")
    parser.add_argument("--rounds", type=int, default=20, help="of each victim")
    parser.add_argument("--only", choices=VICTIMS, nargs="+", default=VICTIMS)
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no death after this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    options = parser.parse_args()
    forking.use(servers=forking.VLLM)
    before = abandoned()
    with (
        tempfile.TemporaryDirectory(prefix="live-deaths-") as directory,
        mock.patch.dict(os.environ, SKYCTL_HOME=f"{directory}/home"),
    ):
        found = play(options, Path(directory))
        found["violations"] += [
            f"{p.pid} still runs" for p in of_home(Path(directory, "home")) if not _forks(p)
        ]
    found["violations"] += [f"{path} stays" for path in sorted(abandoned_since(before))]
    for name, count in found["deaths"].items():
        print(f"{name:<12}", *(f"{count[key]:>6} {key}" for key in sorted(count)))
    total = sum(count["deaths"] for count in found["deaths"].values())
    print(f"{total} deaths, {len(found['violations'])} violations", *found["violations"], sep="\n")
    if options.write:
        RESULT.write_text(
            json.dumps({**taken_on(), "seed": options.seed, **found}, indent=1) + "\n"
        )
    return int(bool(found["violations"]))


def _forks(process: psutil.Process) -> bool:
    """Whether it is not the fleet's: this one, or one that forks commands for it."""
    try:
        return "tests.forking" in process.cmdline() or process.pid == os.getpid()
    except psutil.Error:
        return True


if __name__ == "__main__":
    sys.exit(main())

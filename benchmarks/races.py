"""Two commands at once on one fleet of stubs, again and again: one wins, the other is told of it.

    python -m benchmarks.races [--rounds 100] [--result FILE]

Both are real processes, started together, the second after a delay that a seed decides. A push
takes a second, so that they overlap. Pairs take turns:

| pair | fleet | who holds it |
|---|---|---|
| sync-weights, sync-weights | with a supervisor | the push's job |
| sync-weights, sync-weights | attached: the push runs in the command | the lock of the state file |
| sync-weights, restart | with a supervisor | the push's job, or the restart |

After each round: one winner, a loser that named the holder, every server ready at one version, one
job more per push that won, and a free lock.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_wall import stub_servers
from skyctl.store.locks import Holder
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from tests.faults.stub_fleet import StubFleet
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

RESULT = Path(__file__).parent / "results" / "races.json"
PUSH_S = 1.2
FAULTS = json.dumps({"/collective_rpc": {"kind": "delay", "seconds": PUSH_S / 2}})
COMMAND_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Pair:
    """Two commands and the words by which the loser names the holder."""

    name: str
    commands: tuple[tuple[str, ...], tuple[str, ...]]
    holders: tuple[str, ...]


PUSH = ("sync-weights", "next")
PAIRS = {
    "supervised": (
        Pair("push, push", (PUSH, PUSH), ("push-",)),
        Pair("push, restart", (PUSH, ("restart",)), ("push-", "is busy: restart")),
    ),
    "attached": (Pair("push, push, attached", (PUSH, PUSH), ("push-", "a push that is just")),),
}


@contextmanager
def fleet(kind: str, directory: Path) -> Iterator[StubFleet]:
    """A fleet of two stubs that take pushes from disk; it is gone at the end."""
    made = StubFleet(directory)
    extra = "weight_transfer: {transport: disk}"
    made.write(faults=FAULTS, extra=extra)
    write_checkpoint(directory / "model")
    write_checkpoint(directory / "next", tiny_tensors(2))
    if kind == "supervised":
        made.run("up", "--no-router")
        try:
            yield made
        finally:
            made.run("down", "--drain-timeout", "0")
        return
    with stub_servers(2, "--model", str(directory / "model"), "--faults", FAULTS) as urls:
        text = f"name: stubs\nservers: {json.dumps(urls)}\n{extra}\n"
        (directory / "fleet.yaml").write_text(text)
        while made.json("status")["data"]["health"] != "healthy":
            time.sleep(0.1)
        yield made


def race(raced: StubFleet, pair: Pair, dice: random.Random) -> dict[str, Any]:
    """One round; `problems` is empty when one won and the other was told of it."""
    jobs_before = jobs(raced)[0]
    commands = list(pair.commands)
    dice.shuffle(commands)
    first = raced.start(*commands[0], "--json")
    time.sleep(dice.choice((0.0, 0.0, 0.05, 0.2)))
    racers = [first, raced.start(*commands[1], "--json")]
    ends = [(racer.communicate(timeout=COMMAND_TIMEOUT_S)[0], racer.returncode) for racer in racers]
    envelopes = [json.loads(stdout) for stdout, _ in ends]
    winners = [n for n, (_, code) in enumerate(ends) if code == 0]
    problems = []
    if len(winners) != 1:
        problems.append(f"{len(winners)} winners: {[e['error'] for e in envelopes]}")
    for number, envelope in enumerate(envelopes):
        if number in winners:
            continue
        error = envelope["error"]
        if error["kind"] != "ConflictError" or not any(h in error["message"] for h in pair.holders):
            problems.append(f"the loser was not told who holds it: {error}")
    after = state(raced)
    pushes = sum(commands[n][0] == "sync-weights" for n in winners)
    if after["jobs"] - jobs_before != pushes:
        problems.append(f"{after['jobs'] - jobs_before} new jobs for {pushes} pushes")
    if after["lock"]:
        problems.append(f"the lock is still held: {after['lock']}")
    if after["states"] != ["ready", "ready"] or len(after["versions"]) != 1:
        problems.append(f"servers: {after}")
    return {"pair": pair.name, "problems": problems}


def state(raced: StubFleet) -> dict[str, Any]:
    rows = raced.json("status")["data"]["replicas"]
    count, lock = jobs(raced)
    return {
        "jobs": count,
        "lock": lock,
        "states": [row["state"] for row in rows],
        "versions": sorted({str(row["weight_version"]) for row in rows}),
    }


def jobs(raced: StubFleet) -> tuple[int, Holder | None]:
    """How many jobs the state file has, and who holds the lock of pushes."""
    paths = FleetPaths(raced.directory / "home", "stubs")
    if not paths.database.exists():
        return 0, None
    with FleetState(paths.database) as found:
        return len(found.journal.jobs(100_000)), next(iter(found.locks.holders("turn")), None)


def run(rounds: int, seed: int = 0, kinds: Sequence[str] = tuple(PAIRS)) -> dict[str, Any]:
    """All rounds: how many of each pair, how many had one winner, and what went wrong."""
    dice, began = random.Random(seed), time.monotonic()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="races-") as temporary, ExitStack() as stack:
        fleets = {}
        for kind in kinds:
            (Path(temporary) / kind).mkdir()
            fleets[kind] = stack.enter_context(fleet(kind, Path(temporary) / kind))
        contests = [(fleets[kind], pair) for kind in kinds for pair in PAIRS[kind]]
        for number in range(rounds):
            raced, pair = contests[number % len(contests)]
            found.append(race(raced, pair, dice))
            for problem in found[-1]["problems"]:
                print(f"round {number} ({pair.name}): {problem}", file=sys.stderr)
    return {
        "rounds": rounds,
        "seed": seed,
        "pairs": dict(Counter(round_["pair"] for round_ in found)),
        "one_winner": sum(not round_["problems"] for round_ in found),
        "problems": [problem for round_ in found for problem in round_["problems"]],
        "seconds": round(time.monotonic() - began, 1),
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.races")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    result = run(options.rounds, options.seed)
    options.result.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return int(result["one_winner"] != result["rounds"])


if __name__ == "__main__":
    sys.exit(main())

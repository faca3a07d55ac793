"""Play schedules of the simulated control plane, and look for what must never happen.

    python -m benchmarks.simulation --schedules 100000 --processes 16 --write   # 200,000 in all
    python -m benchmarks.simulation --replay 4711                 # one schedule, every step of it
    python -m benchmarks.simulation --reinserted                  # are defects of the past found?

A schedule is decided by its seed: servers, pushes, verbs, deaths, a disk that fills, a network that
loses answers (tests/simulation). It needs nothing but skyctl's base dependencies, no network and
no GPU. A seed that fails is shrunk (faults it fails without are left out)
and played again to see that it fails in the same way. Processes that play are bounded by
`benchmarks.simulation_workers`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.simulation_workers import Order, play_all, scratch
from tests.simulation import reinserted, seams
from tests.simulation.world import KINDS, Ended, Schedule, play

RESULTS = Path(__file__).parent / "results" / "simulation.json"
MOST = 10_000
"""Within so many schedules a defect that is put back must be found."""
_BATCH = 50
_WITHOUT_IT = "without it as well: "


@dataclass
class Count:
    """Of the schedules of one kind of fleet."""

    schedules: int = 0
    """How many ended."""
    pushes: int = 0
    """How many pushes began."""
    succeeded: int = 0
    """How many of them succeeded."""
    steps: int = 0
    """Callbacks of the event loop."""
    violating: int = 0
    """Schedules with a violation."""
    frozen: int = 0
    """Schedules in which a server was frozen."""
    excused: int = 0
    """Of these, those in which a server was left out of a check."""

    def add(self, ended: Ended) -> None:
        self.schedules += 1
        self.pushes += ended.pushes
        self.succeeded += ended.succeeded
        self.steps += ended.steps
        self.violating += bool(ended.violations)
        self.frozen += ended.frozen > 0
        self.excused += ended.excused > 0


@dataclass
class Violation:
    """One that several schedules may have first."""

    count: int = 0
    seeds: list[int] = field(default_factory=list)


def play_like(schedule: Schedule, seed: int, home: Path) -> Ended:
    return play(replace(schedule, seed=seed), home)


def play_defect(name: str, seed: int, home: Path) -> Ended:
    """A schedule that violates something without the defect as well does not count."""
    defect = reinserted.DEFECTS[name]
    schedule = defect.schedule(seed)
    with seams.replaced(defect.patches):
        ended = play(schedule, home)
    if ended.violations and (others := play(schedule, home).violations):
        ended.violations[:] = [_WITHOUT_IT + others[0]]
    return ended


def shrink(schedule: Schedule, home: Path) -> Schedule:
    """The same seed with as few faults as its first violation needs."""
    first = play(schedule, home)
    if not first.violations:
        return schedule
    for fault in first.faults:
        smaller = replace(schedule, without=schedule.without | {fault})
        if play(smaller, home).violations[:1] == first.violations[:1]:
            schedule = smaller
    return schedule


def replay(schedule: Schedule) -> int:
    """Print every step of one schedule, play it again, and say whether it went alike."""
    with scratch() as home, seams.installed():
        ended = play(schedule, home, tracing=True)
        again = play(schedule, home)
        small = shrink(schedule, home)
    print("\n".join(ended.trace))
    print(f"faults: {', '.join(ended.faults)}")
    if small.without != schedule.without:
        print(f"as well without: {','.join(sorted(small.without))}")
    if again.digest != ended.digest:
        print("NOT the same when played again")
        return 2
    return 1 if ended.violations else 0


def soak(likes: list[Schedule], schedules: int, processes: int, minutes: float) -> dict[str, Any]:
    """Play so many schedules like each of these, from its seed on, or as many as can be played in
    so many minutes or until Ctrl-C."""
    began = time.monotonic()
    counts = {like.kind: Count() for like in likes}
    violations: dict[str, Violation] = {}

    def orders() -> Iterator[Order]:
        for begin in range(0, schedules, _BATCH):
            for like in likes:
                end = like.seed + min(begin + _BATCH, schedules)
                yield Order(like.kind, partial(play_like, like), range(like.seed + begin, end))

    with contextlib.suppress(KeyboardInterrupt):  # what has been played counts
        for kind, ended in play_all(orders(), processes, began + minutes * 60):
            counts[kind].add(ended)
            if ended.violations:
                _note(violations, kind, ended)
            if sum(count.schedules for count in counts.values()) % _BATCH == 0:
                _report(counts, began)
    return {
        "schedules": sum(count.schedules for count in counts.values()),
        "violations": sum(count.violating for count in counts.values()),
        "judged": round(_judged(counts), 4),
        "kinds": {kind: asdict(count) for kind, count in counts.items()},
        "found": {message: asdict(violation) for message, violation in violations.items()},
        "seconds": round(time.monotonic() - began, 1),
        "processes": processes,
        "first_seed": likes[0].seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
    }


def _note(violations: dict[str, Violation], kind: str, ended: Ended) -> None:
    first = f"{kind}: {ended.violations[0]}"
    violation = violations.setdefault(first, Violation())
    violation.count += 1
    if len(violation.seeds) < 5:
        violation.seeds.append(ended.seed)
    print(f"seed {ended.seed}  {first}", flush=True)


def _report(counts: dict[str, Count], began: float) -> None:
    done = sum(count.schedules for count in counts.values())
    rate = done / max(0.1, time.monotonic() - began) * 60
    violating = sum(count.violating for count in counts.values())
    print(
        f"{done} schedules, {rate:.0f} a minute, {violating} with violations; "
        f"judged {_judged(counts):.1%}",
        file=sys.stderr,
    )


def _judged(counts: dict[str, Count]) -> float:
    """In which share of schedules with a frozen server nothing excused what it answered, or did
    not."""
    frozen = sum(count.frozen for count in counts.values())
    return 1 - sum(count.excused for count in counts.values()) / max(1, frozen)


def reinsert(prefixes: list[str], processes: int, seed: int) -> dict[str, int | None]:
    """Defect → schedules until it was found; None: not within `MOST`. Prints a row for each."""
    chosen = [
        name for name in sorted(reinserted.DEFECTS) if name.startswith(tuple(prefixes or [""]))
    ]
    until: dict[str, int | None] = {}
    width = max(map(len, chosen), default=0)
    print(f"{'DEFECT':{width}}  SCHEDULES  VIOLATION", flush=True)
    for name in chosen:
        first, violation = _until_found(name, processes, seed)
        until[name] = None if first is None else first - seed + 1
        shown = "not found" if first is None else f"{violation} (seed {first})"
        print(f"{name:{width}}  {until[name] or MOST:9}  {shown}", flush=True)
    return until


def _until_found(name: str, processes: int, seed: int) -> tuple[int | None, str]:
    """The first seed that finds a defect, and what it violates."""
    finds: dict[int, str] = {}
    others: list[int] = []

    def orders() -> Iterator[Order]:
        for begin in range(seed, seed + MOST, _BATCH):
            if finds:  # batches that were given out are played to their ends
                return
            yield Order(name, partial(play_defect, name), range(begin, begin + _BATCH))

    for _, ended in play_all(orders(), processes):
        if ended.violations and ended.violations[0].startswith(_WITHOUT_IT):
            others.append(ended.seed)
        elif ended.violations:
            finds[ended.seed] = ended.violations[0]
    if others:
        print(f"seeds that violate something without it as well: {others[:5]}")
    return (min(finds), finds[min(finds)]) if finds else (None, "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=2000, help="of each kind of fleet")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--without", default="", help="faults to leave out, separated by commas")
    parser.add_argument("--reinserted", nargs="*", metavar="DEFECT", help="these, or all")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    return parser.parse_args()


def main() -> int:
    chosen = _arguments()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings are iterated alike in every run
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its directories go with it
    first = chosen.seed if chosen.replay is None else chosen.replay
    without = frozenset(chosen.without.split(",")) - {""}
    kinds = chosen.kind or list(KINDS)
    likes = [Schedule(first, kind, without) for kind in kinds]
    if chosen.replay is not None:
        return replay(likes[0])
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if chosen.reinserted is not None:
        until = reinsert(chosen.reinserted, chosen.processes, chosen.seed)
        results = {**before, "reinserted": {**before.get("reinserted", {}), **until}}
        failed = None in until.values()
    else:
        results = soak(likes, chosen.schedules, chosen.processes, chosen.minutes)
        results["reinserted"] = before.get("reinserted", {})
        failed = bool(results["violations"])
        by_count = sorted(results["found"].items(), key=lambda item: -item[1]["count"])
        for message, violation in by_count:
            print(f"{violation['count']:6} {message}   seeds {violation['seeds']}")
        summary = {key: results[key] for key in ("schedules", "violations", "judged")}
        print(json.dumps(summary))
    if chosen.write:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

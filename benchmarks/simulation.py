"""Play schedules of the simulated control plane, and look for what must never happen.

    python -m benchmarks.simulation --schedules 200000 --processes 2
    python -m benchmarks.simulation --replay 4711                 # one schedule, every step of it
    python -m benchmarks.simulation --reinserted                  # are defects of the past found?

A schedule is decided by its seed: servers, pushes, verbs, deaths, a disk that fills, a network that
loses answers (tests/simulation). A seed that fails is shrunk (faults it fails without are left out)
and played again to see that it fails in the same way.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.simulation import reinserted, seams
from tests.simulation.world import KINDS, Ended, Schedule, play

RESULTS = Path(__file__).parent / "results" / "simulation.json"
_BATCH = 50
Found = dict[str, dict[str, Any]]


def _home() -> Path:
    memory = Path("/dev/shm")
    return Path(
        tempfile.mkdtemp(prefix="skyctl-simulation-", dir=memory if memory.is_dir() else None)
    )


def _remove(home: Path) -> None:
    import shutil

    shutil.rmtree(home, ignore_errors=True)


def _played(kind: str, seeds: range) -> list[Ended]:
    """A batch, in a worker."""
    home = _home()
    try:
        with seams.installed():
            return [play(Schedule(seed, kind), home) for seed in seeds]
    finally:
        _remove(home)


def _unpacked(order: tuple[str, range]) -> tuple[str, list[Ended]]:
    return order[0], _played(*order)


def shrink(schedule: Schedule, home: Path) -> Schedule:
    """The same seed with as few faults as its first violation needs."""
    first = play(schedule, home)
    if not first.violations:
        return schedule
    for fault in first.faults:
        smaller = Schedule(schedule.seed, schedule.kind, schedule.without | {fault})
        if play(smaller, home).violations[:1] == first.violations[:1]:
            schedule = smaller
    return schedule


def replay(schedule: Schedule) -> int:
    """Print every step of one schedule, play it again, and say whether it went alike."""
    home = _home()
    try:
        with seams.installed():
            ended = play(schedule, home, tracing=True)
            again = play(schedule, home)
            small = shrink(schedule, home)
    finally:
        _remove(home)
    print("\n".join(ended.trace))
    print(f"faults: {', '.join(ended.faults)}")
    if small.without != schedule.without:
        print(f"as well without: {','.join(sorted(small.without))}")
    if again.digest != ended.digest:
        print("NOT the same when played again")
        return 2
    return 1 if ended.violations else 0


def _orders(kinds: list[str], first: int, schedules: int) -> Iterator[tuple[str, range]]:
    for begin in range(first, first + schedules, _BATCH):
        for kind in kinds:
            yield kind, range(begin, min(begin + _BATCH, first + schedules))


def soak(
    kinds: list[str], first: int, schedules: int, processes: int, minutes: float
) -> dict[str, Any]:
    """Play `schedules` of each kind, or as many as can be played in so many minutes."""
    began = time.monotonic()
    counts = {
        kind: {"schedules": 0, "pushes": 0, "succeeded": 0, "steps": 0, "violating": 0}
        for kind in kinds
    }
    found: Found = {}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for kind, batch in pool.imap_unordered(_unpacked, _orders(kinds, first, schedules)):
            count = counts[kind]
            for ended in batch:
                count["schedules"] += 1
                count["pushes"] += ended.pushes
                count["succeeded"] += ended.succeeded
                count["steps"] += ended.steps
                if ended.violations:
                    count["violating"] += 1
                    _note(found, kind, ended)
            _report(counts, began)
            if time.monotonic() - began > minutes * 60:
                break
    return {
        "schedules": sum(count["schedules"] for count in counts.values()),
        "violations": sum(count["violating"] for count in counts.values()),
        "kinds": counts,
        "found": found,
        "seconds": round(time.monotonic() - began, 1),
        "processes": processes,
        "first_seed": first,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
    }


def _note(found: Found, kind: str, ended: Ended) -> None:
    first = f"{kind}: {ended.violations[0]}"
    one = found.setdefault(first, {"count": 0, "seeds": []})
    one["count"] += 1
    if len(one["seeds"]) < 5:
        one["seeds"].append(ended.seed)
    print(f"seed {ended.seed}  {first}", flush=True)


def _report(counts: dict[str, dict[str, int]], began: float) -> None:
    done = sum(count["schedules"] for count in counts.values())
    rate = done / max(0.1, time.monotonic() - began) * 60
    bad = sum(count["violating"] for count in counts.values())
    print(f"{done} schedules, {rate:.0f} a minute, {bad} with violations", file=sys.stderr)


def reinsert(
    names: list[str], most: int, tell: Callable[[dict[str, int | None]], None]
) -> dict[str, int | None]:
    """Defect → schedules until it was found; None: not within `most`. `tell` hears each."""
    home = _home()
    came: dict[str, int | None] = {}
    try:
        for name in sorted(reinserted.DEFECTS):
            if names and not name.startswith(tuple(names)):
                continue
            came[name] = _until_found(name, most, home)
            print(f"{name}: {came[name]}", flush=True)
            tell(came)
    finally:
        _remove(home)
    return came


def _until_found(name: str, most: int, home: Path) -> int | None:
    """A schedule that violates something without the defect as well does not count."""
    defect = reinserted.DEFECTS[name]
    with seams.installed():
        for seed in range(most):
            with seams.replaced(defect.patches):
                ended = play(Schedule(seed, defect.kind), home)
            if ended.violations and not play(Schedule(seed, defect.kind), home).violations:
                print(f"  seed {seed}: {ended.violations[0]}")
                return seed + 1
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=2000, help="of each kind of fleet")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--without", default="", help="faults to leave out, separated by commas")
    parser.add_argument("--reinserted", nargs="*", metavar="DEFECT")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    chosen = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings are iterated alike in every run
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    if chosen.replay is not None:
        kind = (chosen.kind or [KINDS[0]])[0]
        without = frozenset(chosen.without.split(",")) - {""}
        return replay(Schedule(chosen.replay, kind, without))
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if chosen.reinserted is not None:

        def write(came: dict[str, int | None]) -> None:
            results = {**before, "reinserted": {**before.get("reinserted", {}), **came}}
            if chosen.write:
                RESULTS.write_text(json.dumps(results, indent=2) + "\n")

        came = reinsert(chosen.reinserted, 10_000, write)
        results = {**before, "reinserted": {**before.get("reinserted", {}), **came}}
        bad = any(found is None for found in came.values())
    else:
        kinds = chosen.kind or list(KINDS)
        results = soak(kinds, chosen.seed, chosen.schedules, chosen.processes, chosen.minutes)
        results["reinserted"] = before.get("reinserted", {})
        bad = bool(results["violations"])
        for what, one in sorted(results["found"].items(), key=lambda item: -item[1]["count"]):
            print(f"{one['count']:6} {what}   seeds {one['seeds']}")
    if chosen.write:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({key: results[key] for key in ("schedules", "violations") if key in results}))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

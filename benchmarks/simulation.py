"""Play schedules of the simulated control plane, and look for what must never happen.

    python -m benchmarks.simulation --schedules 100000 --processes 16 --write   # 200,000 in all
    python -m benchmarks.simulation --replay 4711                 # one schedule, every step of it
    python -m benchmarks.simulation --reinserted                  # are defects of the past found?

A schedule is decided by its seed: servers, pushes, verbs, deaths, a disk that fills, a network that
loses answers (tests/simulation). It needs nothing but skyctl's base dependencies, no network and
no GPU. A seed that fails is shrunk (faults it fails without are left out)
and played again to see that it fails in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.simulation import reinserted, seams
from tests.simulation.people import UNMENDED
from tests.simulation.world import KINDS, Ended, Schedule, play

RESULTS = Path(__file__).parent / "results" / "simulation.json"
WALL_LIMIT_S = 120.0
"""A schedule takes 0.1 s; one that takes so long hangs where its virtual clock does not see it."""
_BATCH = 50
_RENEW = 5000
Found = dict[str, dict[str, Any]]


def _home() -> Path:
    memory = Path("/dev/shm")
    return Path(
        tempfile.mkdtemp(prefix="skyctl-simulation-", dir=memory if memory.is_dir() else None)
    )


def _remove(home: Path) -> None:
    import shutil

    shutil.rmtree(home, ignore_errors=True)


class _Worker:
    """A process that plays batches. `since`: when it was last heard of, None while it has nothing
    to do; `left`: the seeds that it has not played yet."""

    def __init__(self, unmended: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.home = _home()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, self.home, unmended), daemon=True
        )
        self.process.start()
        theirs.close()
        self.kind = ""
        self.left: list[int] = []
        self.since: float | None = None
        self.played = 0

    def give(self, kind: str, seeds: Sequence[int]) -> None:
        self.kind, self.left, self.since = kind, list(seeds), time.monotonic()
        self.connection.send((kind, self.left))

    def heard(self) -> Ended | None:
        """What it says next; None: it has died."""
        try:
            ended: Ended = self.connection.recv()
        except EOFError:
            return None
        self.left.remove(ended.seed)
        self.played += 1
        self.since = time.monotonic() if self.left else None
        return ended

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        _remove(self.home)


def _work(connection: Any, home: Path, unmended: bool) -> None:
    """In a worker: orders come in, schedules that have ended go out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the first one acts
    with seams.installed(), contextlib.suppress(EOFError):
        while True:
            kind, seeds = connection.recv()
            for seed in seeds:
                connection.send(play(Schedule(seed, kind, unmended=unmended), home))


def _play_all(
    orders: Iterator[tuple[str, range]], processes: int, until: float, unmended: bool
) -> Iterator[tuple[str, Ended]]:
    """Every schedule as it ends. One that takes longer than `WALL_LIMIT_S`, or takes its process
    with it, is a violation; the rest of its batch is played by another process."""
    workers = [_Worker(unmended) for _ in range(processes)]
    again: list[tuple[str, Sequence[int]]] = []
    try:
        while True:
            for place, worker in enumerate(workers):
                if worker.since is not None:
                    continue
                if worker.played >= _RENEW:  # whatever it has gathered goes with it
                    worker.end()
                    worker = workers[place] = _Worker(unmended)
                over = time.monotonic() > until
                order = None if over else again.pop() if again else next(orders, None)
                if order is not None:
                    worker.give(*order)
            busy = {one.connection: one for one in workers if one.since is not None}
            if not busy:
                return
            ready = multiprocessing.connection.wait(list(busy), timeout=1.0)
            for connection, worker in busy.items():
                ended, why = None, ""
                if connection in ready:
                    ended = worker.heard()
                    why = "" if ended else "dies: the process that played it ended"
                elif time.monotonic() - (worker.since or 0.0) > WALL_LIMIT_S:
                    why = f"hangs: it takes longer than {WALL_LIMIT_S:g} s"
                if why:
                    seed, *rest = worker.left
                    ended = Ended(seed, [why], 0, 0, ())
                    again += [(worker.kind, rest)] if rest else []
                    worker.end()
                    workers[workers.index(worker)] = _Worker(unmended)
                if ended is not None:
                    yield worker.kind, ended
    finally:
        for worker in workers:
            worker.end()


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
    kinds: list[str],
    first: int,
    schedules: int,
    processes: int,
    minutes: float,
    *,
    unmended: bool = False,
) -> dict[str, Any]:
    """Play `schedules` of each kind, or as many as can be played in so many minutes or until
    Ctrl-C."""
    began = time.monotonic()
    counts = {
        kind: dict.fromkeys(
            ("schedules", "pushes", "succeeded", "steps", "violating", "frozen", "excused"), 0
        )
        for kind in kinds
    }
    found: Found = {}
    orders = _orders(kinds, first, schedules)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # what has been played counts
        for kind, ended in _play_all(orders, processes, began + minutes * 60, unmended):
            count = counts[kind]
            count["schedules"] += 1
            count["pushes"] += ended.pushes
            count["succeeded"] += ended.succeeded
            count["steps"] += ended.steps
            count["frozen"] += ended.frozen > 0
            count["excused"] += ended.excused > 0
            if ended.violations:
                count["violating"] += 1
                _note(found, kind, ended)
            if sum(one["schedules"] for one in counts.values()) % _BATCH == 0:
                _report(counts, began)
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
    print(
        f"{done} schedules, {rate:.0f} a minute, {bad} with violations; {_judged(counts)}",
        file=sys.stderr,
    )


def _judged(counts: dict[str, dict[str, int]]) -> str:
    """In how many schedules with a frozen server nothing excused what it answered, or did not."""
    frozen = sum(count["frozen"] for count in counts.values())
    excused = sum(count["excused"] for count in counts.values())
    return f"{frozen} froze a server, and {1 - excused / max(1, frozen):.1%} of these were judged"


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
                ended = play(defect.schedule(seed), home)
            if ended.violations and not play(defect.schedule(seed), home).violations:
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
    parser.add_argument(
        "--unmended", action="store_true", help=f"also with {', '.join(sorted(UNMENDED))}"
    )
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
        return replay(Schedule(chosen.replay, kind, without, unmended=chosen.unmended))
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
        results = soak(
            kinds,
            chosen.seed,
            chosen.schedules,
            chosen.processes,
            chosen.minutes,
            unmended=chosen.unmended,
        )
        results["reinserted"] = before.get("reinserted", {})
        bad = bool(results["violations"])
        for what, one in sorted(results["found"].items(), key=lambda item: -item[1]["count"]):
            print(f"{one['count']:6} {what}   seeds {one['seeds']}")
    if chosen.write:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    if "kinds" in results:
        print(_judged(results["kinds"]))
    print(json.dumps({key: results[key] for key in ("schedules", "violations") if key in results}))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Kill skyctl at every named point, many times, and look at the six invariants after each recovery.

    python -m benchmarks.kill_points --seeds 100                 # stubs, in tens of minutes
    python -m benchmarks.kill_points --seeds 100 --only attached --minutes 10
    python -m benchmarks.kill_points --overwrite    # each push from one directory, as RL loops do
    python -m benchmarks.kill_points --processes 24 --log cycles.jsonl  # goes on where it left off
    python -m benchmarks.kill_points --real                      # every point once, vLLM on CPU

Every killed process is a real one and dies by SIGKILL; commands and supervisors are forked from a
warm process, so that a cycle takes a second and not four. Seeds decide how often a point is passed
before the kill, a delay after it, the size of chunks, what is typed next, and whether the push's
own guardian recovers (every tenth) or a `skyctl recover` by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import side_by_side
from skyctl import kill_points
from tests import forking
from tests.faults.killing.cycle import Came, Dice

RESULTS = Path(__file__).parent / "results"
ADOPTION = ("adopt.begin", "adopt.done", "recover.begin")
KINDS: dict[str, tuple[str, ...]] = {
    "attached": (*kill_points.PUSH, *kill_points.SENDER),
    "supervised": (
        *kill_points.PUSH,
        *kill_points.OUT_OF_ROUTER,
        *kill_points.COLOCATED,
        *kill_points.SENDER,
        *ADOPTION,
        "sync.asked",
        "sync.begun",
    ),
    "lives": tuple(
        point
        for point in (*kill_points.SUPERVISOR, *kill_points.COMMAND)
        if not point.startswith(("adopt", "canary", "recover", "sync"))
    ),
}
PUSHED = ("attached", "supervised")  # on stubs, from files
Order = Sequence[tuple[str, str, int]]  # kinds, points and seeds


def _points(kind: str) -> tuple[str, ...]:
    return KINDS["supervised" if kind == "real" else kind]


def main() -> int:
    """Exit status 1 when an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill_points")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="one kind of fleet")
    parser.add_argument("--points", nargs="*", help="these points only")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--processes", type=int, default=1, help="as many fleets side by side")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="one directory, written over before each push, and in half of the cycles once more "
        "before anybody recovers",
    )
    parser.add_argument("--real", action="store_true", help="once per point, on real servers")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument(
        "--log", type=Path, help="a line per cycle, KIND put before; what it has is not run again"
    )
    options = parser.parse_args()
    kinds = ["real"] if options.real else [options.only] if options.only else list(KINDS)
    names = {k: f"{k}-overwritten" if options.overwrite and k in PUSHED else k for k in kinds}
    violations = 0
    with tempfile.TemporaryDirectory(prefix="kill-points-") as directory:
        log = options.log or Path(directory) / "log"
        logs = {kind: log.with_name(f"{name}-{log.name}") for kind, name in names.items()}
        order = [cycle for kind in kinds for cycle in _order(kind, options, logs[kind])]
        sweep = partial(_sweep, logs=logs, overwrites=options.overwrite)
        errors = side_by_side(sweep, order, options.processes, options.minutes * 60)
        for kind, name in names.items():
            if not (cames := _logged(logs[kind])):
                continue
            out = options.out or RESULTS / f"kill-points-{name}.json"
            shown = _summary(kind, cames)
            out.write_text(json.dumps(shown, indent=1) + "\n")
            _print(shown)
            violations += len(shown["violations"])
    return 1 if violations or errors else 0


def _order(kind: str, options: argparse.Namespace, log: Path) -> Order:
    """Every cycle that `log` does not have."""
    points = [p for p in _points(kind) if not options.points or p in options.points]
    seeds = range(options.first_seed, options.first_seed + (1 if kind == "real" else options.seeds))
    done = {(came.point, came.seed) for came in _logged(log)}
    # seed by seed: when time runs out, every point had about as many
    cycles = ((point, seed) for seed in seeds for point in points)
    return [(kind, *cycle) for cycle in cycles if cycle not in done]


def _sweep(
    order: Order, deadline: float, *, logs: Mapping[str, Path], overwrites: bool
) -> Iterable[dict[str, Any]]:
    """These cycles, those of a kind on one fleet, until `deadline` (monotonic)."""
    forking.use()
    # a command may be writing still when this is interrupted
    temporary = partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
    for kind, cycles in itertools.groupby(order, itemgetter(0)):
        if time.monotonic() < deadline:
            with temporary(prefix="kill-points-") as directory:
                _sweep_kind(kind, list(cycles), Path(directory), deadline, logs[kind], overwrites)
    return ()


def _sweep_kind(
    kind: str, order: Order, directory: Path, deadline: float, log: Path, overwrites: bool
) -> None:
    if kind == "attached":
        asyncio.run(_attached(directory, order, deadline, log, overwrites))
    elif kind == "supervised":
        from tests.faults.killing.supervised import supervised_fleet

        with supervised_fleet(directory, overwrites=overwrites) as fleet:
            _each(order, fleet.cycle, deadline, log)
    elif kind == "lives":
        from tests.faults.killing.lives import lives

        with lives(directory) as fleet_of_lives:
            _each(order, fleet_of_lives.cycle, deadline, log)
    else:
        from tests.faults.killing.real import real_fleet

        with real_fleet(directory) as real:
            _each(order, real.cycle, deadline, log, guardian_every=1)


async def _attached(
    directory: Path, order: Order, deadline: float, log: Path, overwrites: bool
) -> None:
    from tests.faults.killing.attached import attached_fleet

    async with attached_fleet(directory, overwrites=overwrites) as fleet:
        for _, point, seed in order:
            if time.monotonic() > deadline:
                break
            began = time.monotonic()
            came = await fleet.cycle(Dice.thrown(point, seed))
            _note(came, time.monotonic() - began, log)


def _each(
    order: Order,
    cycle: Callable[[Dice], Came],
    deadline: float,
    log: Path,
    guardian_every: int = 10,
) -> None:
    for _, point, seed in order:
        if time.monotonic() > deadline:
            break
        began = time.monotonic()
        came = cycle(Dice.thrown(point, seed, guardian_every=guardian_every))
        _note(came, time.monotonic() - began, log)


def _note(came: Came, seconds: float, log: Path) -> None:
    came.seconds = round(seconds, 3)
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(came.to_json()) + "\n")
    if came.violations:
        sys.stderr.write(f"{came.point} seed {came.seed}: {'; '.join(came.violations)}\n")


def _logged(log: Path) -> list[Came]:
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines()
    return [Came(**json.loads(line)) for line in lines]


def _summary(kind: str, cames: list[Came]) -> dict[str, Any]:
    points = [point for point in _points(kind) if any(c.point == point for c in cames)]
    return {
        "kind": kind,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "load": round(os.getloadavg()[2], 1),
        },
        "cycles": len(cames),
        "killed": sum(came.killed for came in cames),
        "successors_killed": sum(came.successor_killed for came in cames),
        "violations": [came.to_json() for came in cames if came.violations],
        "seconds_a_cycle": _spread(came.seconds for came in cames),
        "detected_s": {
            "by the guardian": _spread(c.detected_s for c in cames if c.guardian),
            "by hand, from the command": _spread(c.detected_s for c in cames if not c.guardian),
        },
        "healed_beyond_push_s": _spread(
            c.healed_s - c.pushed_s
            for c in cames
            if c.guardian and c.healed_s is not None and c.pushed_s is not None
        ),
        "points": {
            point: {
                "cycles": sum(c.point == point for c in cames),
                "killed": sum(c.point == point and c.killed for c in cames),
                "violations": sum(c.point == point and bool(c.violations) for c in cames),
            }
            for point in points
        },
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Count, median and worst, in seconds."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return {
        "count": len(known),
        "median": round(statistics.median(known), 3),
        "p95": round(known[int(len(known) * 0.95)], 3),
        "worst": round(known[-1], 3),
    }


def _print(shown: dict[str, Any]) -> None:
    print(f"\n{shown['kind']}: {shown['cycles']} cycles, seconds each {shown['seconds_a_cycle']}")
    print(f"{'point':<20}{'cycles':>8}{'killed':>8}{'violations':>12}")
    for point, row in shown["points"].items():
        print(f"{point:<20}{row['cycles']:>8}{row['killed']:>8}{row['violations']:>12}")
    bad = len(shown["violations"])
    print(f"{'all':<20}{shown['cycles']:>8}{shown['killed']:>8}{bad:>12}")
    if successors := shown["successors_killed"]:
        print(f"supervisors that `recover` started and that were killed, too: {successors}")
    print(
        "detected:", shown["detected_s"], "healed beyond the push:", shown["healed_beyond_push_s"]
    )


if __name__ == "__main__":
    sys.exit(main())

"""Continuous generation through a fleet whose weights change and whose processes die.

    python -m benchmarks.soak [--requests 10000] [--pushes 50] [--kills 30] [--minutes 35]
    python -m benchmarks.soak --stub --requests 500 --pushes 6 --kills 4

Two vLLM servers on the CPU, one of them with two data-parallel ranks, and the real router; with
`--stub`, stubs of all. Clients ask short greedy questions, most of them through the router, and
write down every request. A conductor pushes one of two checkpoints after the other, from one
directory that it writes over each time; freezes, puts to sleep, fills the state disk, and kills
servers, engine cores, the router, the supervisor, senders and commands in the middle of pushes. A
second terminal types verbs at random meanwhile. Afterwards each answer is held against the versions
that were committed while it was under way (checker.py), by what servers answer that were started on
them. It ends when all three counts are reached, or after `--minutes`. The first Ctrl-C ends it
early and judges what there is, the second abandons it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak.checker import VIOLATIONS, Expected, Record, committed_spans, judge
from benchmarks.soak.client import Clients, learn
from benchmarks.soak.conductor import DEAR_EVERY_S, Conductor, Happened
from benchmarks.soak.fleet import SoakFleet
from benchmarks.soak.terminal import SecondTerminal
from skyctl.errors import SkyctlError
from skyctl.http.connections import KEEP_IDLE_S

RESULTS = Path(__file__).parents[1] / "results"
_EXAMPLES = 10


@dataclass(frozen=True)
class Asked:
    """How much is enough; `pushes` that succeed. `dear_every_s`: a server is killed no more often
    than that."""

    requests: int = 10_000
    pushes: int = 50
    kills: int = 30
    minutes: float = 35.0
    seed: int = 0
    stub: bool = False
    clients: int = 6
    bound_s: float = 60.0
    dear_every_s: float = DEAR_EVERY_S


async def soak(
    asked: Asked, directory: Path, cut: asyncio.Event, keep: Path | None = None
) -> dict[str, Any]:
    """One soak in an empty directory, ended early by `cut`; everything of it is down afterwards.

    What it recorded, and the fleet's state and logs as they were at the end, are copied to `keep`.
    """
    fleet = SoakFleet(directory, stub=asked.stub, bound_s=asked.bound_s)
    result: dict[str, Any] = {}
    try:
        await fleet.prepare()
        kept = httpx.Limits(keepalive_expiry=KEEP_IDLE_S)
        async with httpx.AsyncClient(trust_env=False, limits=kept) as http:
            prompts, expected, at = await learn(fleet, http, seed=asked.seed)
        _say(f"up; {len(prompts)} prompts tell a from b")
        conditions = (prompts, expected, at)
        result = await _run(asked, fleet, directory, cut, *conditions)
    finally:
        if keep is not None:
            _copy(fleet, directory, keep)
        result["left_behind"] = await fleet.close()
    return result


def _copy(fleet: SoakFleet, directory: Path, keep: Path) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    for name in ("requests.jsonl", "conductor.jsonl", "terminal.jsonl"):
        with suppress(FileNotFoundError):
            shutil.copy(directory / name, keep)
    with suppress(OSError):  # of a fleet that never came up
        fleet.copy_state(keep / "home")


async def _run(
    asked: Asked,
    fleet: SoakFleet,
    directory: Path,
    cut: asyncio.Event,
    prompts: list[str],
    expected: Expected,
    at: str,
) -> dict[str, Any]:
    clients = Clients(fleet, prompts, directory / "requests.jsonl", seed=asked.seed)
    logs = directory / "conductor.jsonl"
    conductor = Conductor(fleet, logs, seed=asked.seed, at=at, dear_every_s=asked.dear_every_s)
    terminal = SecondTerminal(fleet, directory / "terminal.jsonl", seed=asked.seed)
    first_job, began = len(fleet.journal()), time.monotonic()
    shown = began

    def enough(happened: Happened) -> bool:
        nonlocal shown
        kills, requests = sum(happened.kills.values()), len(clients.records)
        pushes = happened.pushes_by_state["succeeded"]
        minutes = (time.monotonic() - began) / 60
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            _say(f"{minutes:.1f} min: {requests} requests, {pushes} pushes, {kills} kills")
        reached = requests >= asked.requests and pushes >= asked.pushes and kills >= asked.kills
        return reached or minutes >= asked.minutes or cut.is_set()

    clients.start(asked.clients)
    terminal.start()
    try:
        await conductor.run(enough)
        await terminal.stop()
        await conductor.end()
    finally:
        await terminal.stop()
        await clients.stop()
        conductor.close()
    journal = fleet.journal()[first_job:]
    spans = committed_spans(at, journal)
    judged = [
        (record, judge(record, spans, expected))
        for record in clients.records
        if record.outcome == "answered"
    ]
    return {
        "servers": "stubs"
        if asked.stub
        else "2 real vLLM CPU servers (one of 2 data-parallel ranks), the real vllm-router",
        "seconds": round(time.monotonic() - began, 1),
        "cut_short": cut.is_set(),
        **_counted(clients.records, Counter(verdict for _, verdict in judged)),
        **_conducted(conductor.happened),
        "second_terminal": {verb: dict(codes) for verb, codes in sorted(terminal.typed.items())},
        "bugs": conductor.happened.bugs + terminal.bugs,
        "pushes_in_the_journal": dict(Counter(job.state for job, _ in journal)),
        "examples": [
            {**record.to_json(), "verdict": verdict}
            for record, verdict in judged
            if verdict in VIOLATIONS
        ][:_EXAMPLES],
        "request_bound_s": asked.bound_s,
        "seed": asked.seed,
        "clients": asked.clients,
        "python": platform.python_version(),
    }


def _counted(records: list[Record], verdicts: Mapping[str, int]) -> dict[str, Any]:
    outcomes = Counter(record.outcome for record in records)
    failures = Counter(
        f"{'router' if record.via == 'router' else 'direct'} {record.status or 'no answer'}"
        for record in records
        if record.outcome == "failed"
    )
    times = sorted(r.ended_at - r.began_at for r in records if r.outcome == "answered")
    return {
        "requests": len(records),
        "through_the_router": sum(record.via == "router" for record in records),
        "answered": outcomes["answered"],
        "answered_in_part": sum(
            record.outcome == "answered" and len(record.tokens) < record.wanted
            for record in records
        ),
        "failed": outcomes["failed"],
        "failed_share": round(outcomes["failed"] / max(len(records), 1), 5),
        "failures": dict(failures),
        "hung": outcomes["hung"],
        "violations": sum(verdicts.get(name, 0) for name in VIOLATIONS),
        "verdicts": dict(verdicts),
        "longest_answer_s": round(times[-1], 2) if times else None,
        "median_answer_s": round(statistics.median(times), 4) if times else None,
    }


def _conducted(happened: Happened) -> dict[str, Any]:
    return {
        "pushes": happened.pushes,
        "pushes_by_state": dict(happened.pushes_by_state),
        "freezes": dict(happened.others),
        "kills": sum(happened.kills.values()),
        "kills_by_kind": dict(happened.kills),
        "kills_that_came_too_late": dict(happened.missed),
        "recovery_s": {
            kind: {
                "median": round(statistics.median(times), 2),
                "max": round(max(times), 2),
                "count": len(times),
            }
            for kind, times in sorted(happened.recovered_s.items())
        },
        "unsettled": happened.unsettled,
        "failed_commands": happened.failed_commands,
    }


def _table(result: Mapping[str, Any]) -> str:
    rows = [
        (name, result[name])
        for name in (
            "seconds", "requests", "answered_in_part", "pushes", "kills", "violations", "hung",
            "failed_share", "verdicts", "kills_by_kind", "freezes", "second_terminal", "bugs",
            "unsettled", "left_behind",
        )
    ]  # fmt: skip
    lines = [f"{name:<14} {value}" for name, value in rows]
    for kind, times in result["recovery_s"].items():
        lines.append(
            f"  recovery after killing the {kind}: median {times['median']} s, "
            f"max {times['max']} s ({times['count']})"
        )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> tuple[Asked, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("--requests", type=int, default=Asked.requests)
    parser.add_argument("--pushes", type=int, default=Asked.pushes, help="that succeed")
    parser.add_argument("--kills", type=int, default=Asked.kills)
    parser.add_argument("--minutes", type=float, default=Asked.minutes, help="end after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=Asked.clients)
    parser.add_argument("--bound", type=float, help="seconds one request may take")
    parser.add_argument("--server-kills-every", type=float, metavar="SECONDS")
    parser.add_argument("--stub", action="store_true", help="stubs in place of vLLM and its router")
    parser.add_argument("--result", type=Path, help="where to write JSON")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIRECTORY",
        help="where to copy every request, the fleet's state and its logs",
    )
    options = parser.parse_args()
    asked = Asked(
        requests=options.requests,
        pushes=options.pushes,
        kills=options.kills,
        minutes=options.minutes,
        seed=options.seed,
        stub=options.stub,
        clients=options.clients,
        bound_s=options.bound or (20.0 if options.stub else Asked.bound_s),
        dear_every_s=options.server_kills_every or (10.0 if options.stub else DEAR_EVERY_S),
    )
    return asked, options


async def _with_signals(asked: Asked, directory: Path, keep: Path | None) -> dict[str, Any]:
    """Ctrl-C and TERM end the soak early; the second one abandons it and takes the fleet down."""
    cut = asyncio.Event()
    task = asyncio.ensure_future(soak(asked, directory, cut, keep))

    def stop() -> None:
        if cut.is_set():
            task.cancel()
        else:
            cut.set()
            _say("ending; once more to abandon it")

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await task


def main() -> int:
    asked, options = _arguments()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as temporary:
        try:
            result = asyncio.run(_with_signals(asked, Path(temporary), options.keep))
        except asyncio.CancelledError:
            _say("abandoned; the fleet is down")
            return 130
        except SkyctlError as error:
            _say(f"the soak failed: {error.message}")
            return 1
    file = options.result or RESULTS / ("soak-stub.json" if asked.stub else "soak.json")
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(_table(result))
    wrong = ("violations", "hung", "left_behind", "unsettled", "bugs")
    return int(any(result[name] for name in wrong))


if __name__ == "__main__":
    sys.exit(main())

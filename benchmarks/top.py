"""What `skyctl top` costs a fleet: CPU time of its processes and tokens per second, compared.

    python benchmarks/top.py --fleet tiny [--seconds 20] [--rounds 3] [--concurrency 8] [--json]

The fleet must be up. Rounds alternate between without and with `top` (the full-screen one, on a
terminal of its own, at a 1 s interval), first on the idle fleet, then under constant load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pty
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from skyctl.core.registry import select
from skyctl.core.urls import api_key
from skyctl.generate.prompts import GenerationRequest
from skyctl.generate.requests import Endpoint, GenerationClient, GenerationResult
from skyctl.service import connect

INTERVAL_S = 1.0
TOKENS = 64


@dataclass(frozen=True)
class Fleet:
    """What is measured: where to send requests, and the fleet's processes by what they are."""

    entry: str
    model: str
    pids: dict[str, int]
    key: str | None


async def look(name: str) -> Fleet:
    async with connect(select(None, name)) as fleet:
        status, urls = await fleet.status(), await fleet.urls()
        key = api_key(urls.access)
    pids = {r.name: r.pid for r in status.replicas if r.pid}
    if status.router is not None and status.router.pid:
        pids["router"] = status.router.pid
    if status.supervisor_pid:
        pids["supervisor"] = status.supervisor_pid
    assert urls.entry and urls.model, "the fleet is not up"
    return Fleet(urls.entry, urls.model, pids, key)


def cpu_seconds(pid: int, *, tree: bool) -> float:
    """CPU time of a process so far, with its descendants where it is a server's."""
    root = psutil.Process(pid)
    members = [root, *(root.children(recursive=True) if tree else [])]
    total = 0.0
    for process in members:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def spent(fleet: Fleet) -> dict[str, float]:
    # every process of a started fleet is a child of the supervisor: count it alone
    return {n: cpu_seconds(p, tree=n != "supervisor") for n, p in fleet.pids.items()}


@contextlib.contextmanager
def top(name: str, running: bool) -> Iterator[psutil.Process | None]:
    """`skyctl top` on a terminal of 120 by 40, or nothing."""
    if not running:
        yield None
        return
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "skyctl", "top", "--fleet", name, "--interval", str(INTERVAL_S)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(theirs)
    reader = threading.Thread(target=drain, args=(ours,), daemon=True)
    reader.start()
    time.sleep(3)  # imports and the first look are not what is measured
    try:
        yield psutil.Process(process.pid)
    finally:
        os.write(ours, b"q")
        process.wait(timeout=20)
        reader.join(timeout=5)
        os.close(ours)


def drain(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 65536):
            pass


async def load(fleet: Fleet, seconds: float, concurrency: int) -> float:
    """Tokens per second of `concurrency` clients that ask without a break."""
    ends = time.monotonic() + seconds
    done: list[GenerationResult] = []

    async def ask(client: GenerationClient) -> None:
        body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        while time.monotonic() < ends:
            request = GenerationRequest("top", body, prompt="The fleet is up and")
            done.append(await client.generate_one(request))

    began = time.monotonic()
    async with GenerationClient(Endpoint(fleet.entry, fleet.model, fleet.key)) as client:
        await asyncio.gather(*(ask(client) for _ in range(concurrency)))
    return sum(len(result.token_ids) for result in done) / (time.monotonic() - began)


def measure(
    name: str, fleet: Fleet, watched: bool, seconds: float, concurrency: int
) -> dict[str, Any]:
    """One round: CPU milliseconds per second by process, and tokens per second under load."""
    with top(name, watched) as process:
        before, began = spent(fleet), time.monotonic()
        own = cpu_seconds(process.pid, tree=False) if process else 0.0
        rate = None
        if concurrency:
            rate = asyncio.run(load(fleet, seconds, concurrency))
        else:
            time.sleep(seconds)
        wall = time.monotonic() - began
        after = spent(fleet)
        found = {key: 1000 * (after[key] - before[key]) / wall for key in before}
        if process:
            found["top"] = 1000 * (cpu_seconds(process.pid, tree=False) - own) / wall
    return {"watched": watched, "cpu_ms_per_s": found, "tokens_per_s": rate}


def compare(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians without and with, and their difference."""

    def median(watched: bool, key: str) -> float:
        values = [r["cpu_ms_per_s"].get(key, 0.0) for r in rounds if r["watched"] is watched]
        return float(statistics.median(values))

    names = dict.fromkeys(name for r in rounds for name in r["cpu_ms_per_s"])
    cpu = {
        name: {
            "without": round(median(False, name), 2),
            "with": round(median(True, name), 2),
            "more": round(median(True, name) - median(False, name), 2),
        }
        for name in names
    }
    rates = {
        watched: [r["tokens_per_s"] for r in rounds if r["watched"] is watched]
        for watched in (False, True)
    }
    result: dict[str, Any] = {"cpu_ms_per_s": cpu}
    if rates[False][0] is not None:
        without, watched = statistics.median(rates[False]), statistics.median(rates[True])
        result["tokens_per_s"] = {
            "without": round(without, 1),
            "with": round(watched, 1),
            "spread": [round(min(rates[False]), 1), round(max(rates[False]), 1)],
            "lost_percent": round(100 * (1 - watched / without), 2),
        }
    fleet_more = sum(row["more"] for name, row in cpu.items() if name != "top")
    result["fleet_more_ms_per_s"] = round(fleet_more, 2)
    result["percent_of_machine"] = round(fleet_more / 10 / (os.cpu_count() or 1), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    fleet = asyncio.run(look(options.fleet))
    report: dict[str, Any] = {"cores": os.cpu_count(), "interval_s": INTERVAL_S}
    for what, concurrency in (("idle", 0), ("loaded", options.concurrency)):
        rounds = []
        for _ in range(options.rounds):
            for watched in (False, True):
                rounds.append(measure(options.fleet, fleet, watched, options.seconds, concurrency))
        report[what] = compare(rounds)
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for what in ("idle", "loaded"):
        print(f"{what}: CPU milliseconds per second (1000 is one core)")
        for name, row in report[what]["cpu_ms_per_s"].items():
            print(f"  {name:<12} {row['without']:8.2f} → {row['with']:8.2f}  ({row['more']:+.2f})")
        print(
            f"  the fleet spends {report[what]['fleet_more_ms_per_s']:+.2f} ms/s more, "
            f"{report[what]['percent_of_machine']:.2f} % of {report['cores']} cores"
        )
        if rate := report[what].get("tokens_per_s"):
            print(
                f"  tokens/s {rate['without']} → {rate['with']} ({-rate['lost_percent']:+.2f} %; "
                f"rounds without: {rate['spread'][0]} to {rate['spread'][1]})"
            )


if __name__ == "__main__":
    main()

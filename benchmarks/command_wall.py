"""What `skyctl sync-weights` takes from Enter to prompt beyond the push that it makes.

    python -m benchmarks.command_wall [--runs 15] [--result FILE]

Two stub servers take a checkpoint of a few kilobytes by `shm`: once as a fleet with a supervisor,
which makes the push, and once attached, where the command itself does. `command_wall_s` is the wall
time of the whole command less the `seconds` that its push reports, the median of `--runs`;
`cpu_s` is the command's own CPU time, and `bare_s` the wall time of `python -c pass` beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.push import AS_INSTALLED
from tests.faults.attached_fleet import free_port
from tests.faults.stub_fleet import ROOT, StubFleet
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

GOAL_S = 0.2
_READY_S = 60.0


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(fleet: StubFleet, runs: int) -> dict[str, float]:
    """Medians of `runs` pushes, of two checkpoints in turn, after one that is not counted."""
    checkpoints = [
        write_checkpoint(fleet.directory / f"step-{seed}", tiny_tensors(seed)) for seed in (1, 2)
    ]
    beyond, cpu, bare = [], [], []
    for number in range(runs + 1):
        before, began = children_cpu_s(), time.perf_counter()
        command = ("sync-weights", str(checkpoints[number % 2]), "--transport", "shm")
        job = fleet.json(*command)["data"]["job"]
        wall_s = time.perf_counter() - began
        cpu.append(children_cpu_s() - before)
        beyond.append(wall_s - job["result"]["seconds"])
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare.append(time.perf_counter() - began)
    rows = {"command_wall_s": beyond, "cpu_s": cpu, "bare_s": bare}
    return {name: round(statistics.median(values[1:]), 3) for name, values in rows.items()}


@contextlib.contextmanager
def supervised(directory: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(directory, environ=AS_INSTALLED)
    fleet.write(replicas=2)
    fleet.run("up")
    try:
        yield fleet
    finally:
        fleet.run("down")


@contextlib.contextmanager
def stub_servers(count: int, *arguments: str) -> Iterator[list[str]]:
    """URLs of stubs, each a process of its own."""
    ports = [free_port() for _ in range(count)]
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.stub.server", "--port", str(port), *arguments],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for port in ports
    ]
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for server in servers:
            server.terminate()
            server.wait(timeout=20)


@contextlib.contextmanager
def attached(directory: Path) -> Iterator[StubFleet]:
    config = json.dumps({"backend": "skyctl"})
    with stub_servers(2, "--weight-transfer-config", config) as urls:
        fleet = StubFleet(directory, environ=AS_INSTALLED)
        (directory / "fleet.yaml").write_text(f"name: far\nservers: {json.dumps(urls)}\n")
        fleet.run("wait", "--timeout", f"{_READY_S:g}")
        yield fleet


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--result", type=Path, help="write the medians there as JSON")
    options = parser.parse_args()
    report: dict[str, Any] = {"cores": os.cpu_count(), "runs": options.runs, "goal_s": GOAL_S}
    for name, kind in (("supervised", supervised), ("attached", attached)):
        with tempfile.TemporaryDirectory() as work, kind(Path(work)) as fleet:
            report[name] = measure(fleet, options.runs)
        print(name, *(f"{key} {value:.3f}" for key, value in report[name].items()), flush=True)
    report["load_average"] = [round(value, 1) for value in os.getloadavg()]
    if options.result:
        options.result.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

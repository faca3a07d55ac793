"""Versions as a contract: requests that demand one, on two real vLLM CPU servers and the router.

    python -m benchmarks.versions [--requests 1000] [--pushes 20] [--write]

Pushes by `keep` and rolling alternate between two tiny checkpoints. Every answer is compared, token
for token, with what the checkpoints that its spans name generate after the tokens before
(`tests/integration/demands.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from tests.integration.conftest import SERVER_ENVIRONMENT
from tests.integration.demands import CHECKPOINTS, Demands, Offline, judged
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli

RESULT = Path(__file__).parent / "results" / "versions-real.json"


def main() -> int:
    """Exit status 1 when an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    options = parser.parse_args()
    os.environ |= SERVER_ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="versions-") as root:
        fleet = FleetCli(Path(root) / "tiny", Path(root) / "home")
        fleet.directory.mkdir()
        fleet.run("init", "--tiny", ".", "--name", "tiny")
        try:
            fleet.run("up", timeout_s=UP_TIMEOUT_S)
            began = time.monotonic()
            demands = Demands(fleet, options.requests)
            demands.run(options.pushes)
            seconds = time.monotonic() - began
        finally:
            fleet.run("down", expect=None)
        checkpoints = [fleet.directory / "checkpoints" / name for name in CHECKPOINTS]
        wrong, counts = judged(demands, Offline(checkpoints))
    for line in (*wrong, f"{len(demands.answers)} answers: {dict(counts)}"):
        print(line)
    if options.write:
        result = {
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)),
            "seconds": round(seconds),
            "pushes": options.pushes,
            "answers": dict(sorted(counts.items())),
            "wrong": wrong,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

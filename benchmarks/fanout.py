"""Fan-out at scale: one call to each of many servers, beside other clients on the same stubs.

    python -m benchmarks.fanout [--sizes 8 64 512 2048] [--rounds 5] [--result FILE]
    python -m benchmarks.fanout --skyrl-python VENV/bin/python   SkyRL's RemoteInferenceClient too

The stubs answer after 5 to 50 ms and live in a process of their own. Each client runs in a fresh
process, once (`first_ms`) and then `--rounds` times, whose medians count. Rows:

    skyctl fan_out   POST /pause through skyctl.control.fanout, one call per server
    skyctl pause     skyctl.control.verbs.pause: reads each server's state, then pauses it
    bare httpx       asyncio.gather over one httpx.AsyncClient
    skyrl            RemoteInferenceClient.pause of the skyrl package (aiohttp)

`over_slowest` is the total time over what the slowest server took by itself: its delay once, or
twice where it is called twice. `over_slowest_call` is over the slowest call as the client saw it.
Skew is from the first to the last pause as the stubs saw them arrive. RemoteInferenceClient keeps
its connections from one round to the next; the others connect anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CLIENTS = {"skyctl fan_out": 1, "skyctl pause": 2, "bare httpx": 1, "skyrl": 1}
GOAL, GOAL_UP_TO = 1.3, 512


class Stubs:
    """The process that answers. Use as a context manager."""

    def __init__(self, count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stub_endpoints", "--count", str(count)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout and self._process.stdin
        said = json.loads(self._process.stdout.readline())
        self.urls = [f"http://127.0.0.1:{port}" for port in said["ports"]]
        self.slowest_s = max(said["delays_ms"]) / 1000

    def pauses(self) -> list[float]:
        """When each pause arrived since this was last asked."""
        assert self._process.stdout and self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._process.stdout.readline())["pauses"]
        return found

    def __enter__(self) -> Stubs:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=20)


def measure(name: str, python: str, stubs: Stubs, rounds: int) -> dict[str, Any]:
    """One client's row on the stubs that are up."""
    process = subprocess.Popen(
        [python, str(ROOT / "benchmarks" / "fanout_client.py"), name],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps({"urls": stubs.urls}) + "\n")
    answers, skews = [], []
    for number in range(rounds + 1):
        process.stdin.write("again\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        arrived = stubs.pauses()
        assert len(arrived) == len(stubs.urls), f"{name}: {len(arrived)} pauses arrived"
        if number == 0:  # no connection is open yet, nothing is warm
            first_s = answer["total_s"]
        else:
            answers.append(answer)
            skews.append(max(arrived) - min(arrived))
    process.stdin.close()
    process.wait(timeout=20)
    total = statistics.median(a["total_s"] for a in answers)
    slowest_calls = [a["total_s"] / a["slowest_call_s"] for a in answers if a["slowest_call_s"]]
    alone = stubs.slowest_s * CLIENTS[name]
    return {
        "client": name,
        "servers": len(stubs.urls),
        "first_ms": round(first_s * 1000, 1),
        "total_ms": round(total * 1000, 1),
        "fastest_ms": round(min(a["total_s"] for a in answers) * 1000, 1),
        "slowest_server_ms": round(alone * 1000, 1),
        "over_slowest": round(total / alone, 2),
        "over_slowest_call": round(statistics.median(slowest_calls), 2) if slowest_calls else None,
        "cpu_ms": round(statistics.median(a["cpu_s"] for a in answers) * 1000, 1),
        "skew_ms": round(statistics.median(skews) * 1000, 1),
        "peak_mib": round(answers[-1]["peak_bytes"] / 2**20, 1),
        "grown_mib": round((answers[-1]["peak_bytes"] - answers[-1]["before_bytes"]) / 2**20, 1),
    }


def report(rounds: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "rounds": rounds,
        "goal": {"over_slowest": GOAL, "up_to_servers": GOAL_UP_TO},
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skyrl-python", default="", help="interpreter that has the skyrl package")
    parser.add_argument("--result", type=Path, help="write the rows there as JSON")
    options = parser.parse_args()
    pythons = {n: sys.executable for n in CLIENTS if n != "skyrl"}
    if options.skyrl_python:
        pythons["skyrl"] = options.skyrl_python
    rows = []
    columns = (
        "first_ms",
        "total_ms",
        "over_slowest",
        "over_slowest_call",
        "cpu_ms",
        "skew_ms",
        "peak_mib",
    )
    print(f"{'client':16} {'servers':>8}", *(f"{column:>17}" for column in columns))
    for size in options.sizes:
        with Stubs(size) as stubs:
            for name, python in pythons.items():
                row = measure(name, python, stubs, options.rounds)
                rows.append(row)
                cells = ("–" if row[c] is None else row[c] for c in columns)
                print(f"{name:16} {size:8}", *(f"{cell:>17}" for cell in cells), flush=True)
                if options.result:  # after each row: the last ones take minutes
                    text = json.dumps(report(options.rounds, rows), indent=2)
                    options.result.write_text(text + "\n")


if __name__ == "__main__":
    main()

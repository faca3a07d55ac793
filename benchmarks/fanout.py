"""Fan-out at scale: one call to each of many servers, beside other clients on the same stubs.

    python -m benchmarks.fanout [--sizes 8 64 512 2048] [--starts 3] [--rounds 7] [--result FILE]
    python -m benchmarks.fanout --skyrl-python VENV/bin/python   SkyRL's RemoteInferenceClient too

The stubs answer after 5 to 50 ms and live in processes of their own: as many as there are
processors beside the client's. Each client runs in `--starts` fresh processes; in each, it calls
all servers once with no connection open (cold), then `--rounds` times with those it kept. Medians
count. Clients:

    skyctl fan_out   POST /pause through skyctl.http.fanout, one call per server
    skyctl pause     skyctl.core.actions.pause: reads each server's state, then pauses it
    bare httpx       asyncio.gather over one httpx.AsyncClient without limits, up to 64 servers
    skyrl            RemoteInferenceClient.pause of the skyrl package (aiohttp)
    bare sockets     one epoll loop, no HTTP: what this machine and the stubs allow at best

`over_slowest` is the total time over what the slowest server took by itself: its delay once, or
twice where it is called twice. The slowest is asked last. `skew_ms` is from the first to the last
pause as the stubs saw them arrive, `cpu_us` the client's own CPU time per server, `stub_late_ms`
how late the stubs' latest answer left: what of the total is theirs.
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
# how often a client calls each server in one round
CLIENTS = {"skyctl fan_out": 1, "skyctl pause": 2, "skyrl": 1, "bare httpx": 1, "bare sockets": 1}
GOAL, GOAL_UP_TO = 1.3, 512
LARGEST = {"bare httpx": 64}  # a round of 512 takes it 20 s: its pool is searched for every call


class Stubs:
    """The processes that answer. Use as a context manager."""

    def __init__(self, count: int, shards: int = 1) -> None:
        sizes = [count // shards + (n < count % shards) for n in range(shards)]
        self._processes = [self._start(size, seed) for seed, size in enumerate(sizes) if size]
        said = [self._line(process) for process in self._processes]
        ports = [port for one in said for port in one["ports"]]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.slowest_s = max(delay for one in said for delay in one["delays_ms"]) / 1000

    @staticmethod
    def _start(count: int, seed: int) -> subprocess.Popen[str]:
        arguments = ["--count", str(count), "--seed", str(seed)]
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stub_endpoints", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout
        found: dict[str, Any] = json.loads(process.stdout.readline())
        return found

    def since(self) -> tuple[list[float], float]:
        """When each pause arrived since this was last asked, and how late an answer was, in ms."""
        told = []
        for process in self._processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
            told.append(self._line(process))
        pauses = [at for one in told for at in one["pauses"]]
        return pauses, max(float(one["late_ms"]) for one in told)

    def __enter__(self) -> Stubs:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
            process.wait(timeout=20)


def one_start(name: str, python: str, stubs: Stubs, rounds: int) -> list[dict[str, float]]:
    """A client's rounds in one process, the cold one first."""
    process = subprocess.Popen(
        [python, str(ROOT / "benchmarks" / "fanout_client.py"), name],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps({"urls": stubs.urls}) + "\n")
    found = []
    for _ in range(rounds + 1):
        process.stdin.write("again\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        pauses, late_ms = stubs.since()
        assert len(pauses) == len(stubs.urls), f"{name}: {len(pauses)} pauses arrived"
        found.append({**answer, "skew_s": max(pauses) - min(pauses), "late_ms": late_ms})
    process.stdin.close()
    process.wait(timeout=20)
    return found


def measure(name: str, python: str, stubs: Stubs, starts: int, rounds: int) -> dict[str, Any]:
    """One client's row on the stubs that are up."""
    runs = [one_start(name, python, stubs, rounds) for _ in range(starts)]
    last, alone_s = [run[-1] for run in runs], stubs.slowest_s * CLIENTS[name]
    return {
        "client": name,
        "servers": len(stubs.urls),
        "slowest_server_ms": round(alone_s * 1000, 1),
        "cold": summary([run[0] for run in runs], alone_s, len(stubs.urls)),
        "kept": summary([one for run in runs for one in run[1:]], alone_s, len(stubs.urls)),
        "peak_mib": round(max(one["peak_bytes"] for one in last) / 2**20, 1),
        "grown_mib": round(max(one["peak_bytes"] - one["before_bytes"] for one in last) / 2**20, 1),
    }


def summary(rounds: list[dict[str, float]], alone_s: float, servers: int) -> dict[str, float]:
    """Medians of some rounds, and their range of totals."""
    totals = sorted(one["total_s"] for one in rounds)
    total = statistics.median(totals)
    return {
        "total_ms": round(total * 1000, 1),
        "fastest_ms": round(totals[0] * 1000, 1),
        "longest_ms": round(totals[-1] * 1000, 1),
        "over_slowest": round(total / alone_s, 2),
        "cpu_us": round(statistics.median(one["cpu_s"] for one in rounds) / servers * 1e6),
        "skew_ms": round(statistics.median(one["skew_s"] for one in rounds) * 1000, 1),
        "stub_late_ms": round(statistics.median(one["late_ms"] for one in rounds), 1),
    }


def report(options: argparse.Namespace, shards: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "starts": options.starts,
        "rounds": options.rounds,
        "stub_processes": shards,
        "goal": {"over_slowest": GOAL, "up_to_servers": GOAL_UP_TO},
        "rows": rows,
    }


COLUMNS = ("total_ms", "over_slowest", "cpu_us", "skew_ms", "stub_late_ms")


def print_row(row: dict[str, Any]) -> None:
    for state in ("cold", "kept"):
        cells = (row[state][column] for column in COLUMNS)
        memory = f"{row['peak_mib']:>10}" if state == "kept" else ""
        name = f"{row['client']:16} {row['servers']:8} {state}"
        print(name, *(f"{cell:>13}" for cell in cells), memory, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 512, 2048])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shards", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--clients", nargs="+", default=list(CLIENTS), choices=list(CLIENTS))
    parser.add_argument("--skyrl-python", default="", help="interpreter that has the skyrl package")
    parser.add_argument("--result", type=Path, help="write the rows there as JSON")
    options = parser.parse_args()
    rows = []
    print(f"{'client':16} {'servers':>8}     ", *(f"{c:>13}" for c in COLUMNS), "  peak_mib")
    for size in options.sizes:
        with Stubs(size, options.shards) as stubs:
            for name in options.clients:
                python = options.skyrl_python if name == "skyrl" else sys.executable
                if not python or size > LARGEST.get(name, size):
                    continue
                rows.append(measure(name, python, stubs, options.starts, options.rounds))
                print_row(rows[-1])
                if options.result:  # after each row: the last ones take minutes
                    text = json.dumps(report(options, options.shards, rows), indent=2)
                    options.result.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""What one command costs: --help, status and pause, against bare Python and a curl loop.

    python -m benchmarks.latency [--runs 15] [--result FILE]
    python -m benchmarks.latency --fleet demo     on a fleet that is up, too

Without more it asks an attached fleet of two stubs that answer after 5 and 50 ms. Runs of all
cases take turns, on a real fleet with a rest between; medians count. `/ bare` is over
`python -c pass`. The curl loop asks the same servers one after the other.

Then `skyctl pause` of 2, 64, 512 and 2,048 such stubs: the command's own CPU time, its wall time,
and that over the slowest stub's answer, medians of five. The stubs share the processors with it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fanout import Stubs

HELP_GOAL_RATIO, PAUSE_GOAL_S = 5.0, 0.35
TIMEOUT_S = 120.0
ROOT = Path(__file__).parents[1]
REST_S = 2.0
"""vLLM's workers spin for a second after each call, which on few processors slows the next."""
SKYCTL = [sys.executable, "-m", "skyctl"]


def wall_s(command: Sequence[str], environ: dict[str, str], directory: Path) -> float:
    """Wall seconds of one process that must succeed."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environ,
        cwd=directory,
    )
    # not wait(timeout): that one sleeps up to 50 ms between two looks
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    code = process.wait()
    elapsed_s = time.perf_counter() - began
    watchdog.cancel()
    if code != 0:
        raise SystemExit(f"{' '.join(command)} exited with {code}")
    return elapsed_s


def curl_loop(urls: Sequence[str], path: str, token_file: str | None) -> list[str]:
    # read by curl itself: a token does not belong on a command line
    header = ""
    if token_file is not None:
        header = f"printf 'Authorization: Bearer %s' \"$(cat '{token_file}')\" | "
    calls = "; ".join(
        f"{header}curl -fsS {'-H @- ' if header else ''}-X POST '{url}{path}'" for url in urls
    )
    return ["sh", "-ec", calls]


def medians(
    cases: dict[str, list[str]], runs: int, environ: dict[str, str], directory: Path, rest_s: float
) -> dict[str, float]:
    """Median seconds of each case; the cases take turns, with a rest before each."""
    walls: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs + 1):
        for name, command in cases.items():
            time.sleep(rest_s)
            walls[name].append(wall_s(command, environ, directory))
    return {name: statistics.median(values[1:]) for name, values in walls.items()}


def measure(
    arguments: list[str],
    urls: list[str],
    runs: int,
    environ: dict[str, str],
    directory: Path,
    token_file: str | None = None,
    rest_s: float = 0.0,
) -> dict[str, Any]:
    """All cases on one fleet, which `arguments` name and whose servers are at `urls`."""
    cases = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import typer": [sys.executable, "-c", "import typer"],
        "skyctl --help": [*SKYCTL, "--help"],
        "skyctl status": [*SKYCTL, "status", *arguments],
        "skyctl pause": [*SKYCTL, "pause", *arguments],
        "curl loop, pause": curl_loop(urls, "/pause?mode=abort", token_file),
        "skyctl resume": [*SKYCTL, "resume", *arguments],
        "curl loop, resume": curl_loop(urls, "/resume", token_file),
    }
    found = medians(cases, runs, environ, directory, rest_s)
    bare, curl = found["python -c pass"], found["curl loop, pause"]
    print(f"{'case':18} {'ms':>7} {'/ bare':>7}")
    for name, value in found.items():
        print(f"{name:18} {value * 1000:7.0f} {value / bare:7.1f}")
    help_ratio, over_curl = found["skyctl --help"] / bare, found["skyctl pause"] - curl
    print(f"--help: {help_ratio:.1f} × bare Python (goal ≤ {HELP_GOAL_RATIO:g})")
    print(f"pause: curl {over_curl:+.2f} s (goal ≤ +{PAUSE_GOAL_S} s)")
    return {
        "servers": len(urls),
        "median_ms": {name: round(value * 1000, 1) for name, value in found.items()},
        "help_over_bare": round(help_ratio, 2),
        "pause_minus_curl_s": round(over_curl, 3),
        "goals_met": help_ratio <= HELP_GOAL_RATIO and over_curl <= PAUSE_GOAL_S,
    }


@contextmanager
def attached(count: int) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """A fleet of stubs: its fleet file, their URLs, and the environment of its commands."""
    with tempfile.TemporaryDirectory() as work, Stubs(count) as stubs:
        file = Path(work) / "fleet.yaml"
        file.write_text(f"name: stubs\nservers: {json.dumps(stubs.urls)}\n")
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
        modules = f"{ROOT}:{environ.get('PYTHONPATH', '')}"
        yield str(file), stubs.urls, environ | {"SKYCTL_HOME": work, "PYTHONPATH": modules}


def on_stubs(runs: int) -> dict[str, Any]:
    with attached(2) as (file, urls, environ):
        return measure(["-f", file], urls, runs, environ, Path(file).parent)


def cpu_s() -> float:
    """CPU seconds of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def on_many(count: int, runs: int) -> dict[str, float]:
    """What `skyctl pause` of `count` stubs takes, medians."""
    cpu, wall = [], []
    with attached(count) as (file, _, environ):
        for _ in range(runs + 1):
            before = cpu_s()
            wall.append(wall_s([*SKYCTL, "pause", "-f", file], environ, Path(file).parent))
            cpu.append(cpu_s() - before)
    found = {"cpu_s": statistics.median(cpu[1:]), "wall_s": statistics.median(wall[1:])}
    return {name: round(value, 3) for name, value in found.items()}


def on_fleet(name: str, runs: int) -> dict[str, Any]:
    asked = subprocess.run(
        [*SKYCTL, "urls", "--fleet", name, "--json"], capture_output=True, text=True, check=True
    )
    data = json.loads(asked.stdout)["data"]
    urls, token_file = list(data["servers"].values()), data["access"]["control_token_file"]
    environ = dict(os.environ)
    return measure(["--fleet", name], urls, runs, environ, Path.cwd(), token_file, REST_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--fleet", default="", help="a fleet that is up, by name")
    parser.add_argument("--result", type=Path, help="write the medians there as JSON")
    options = parser.parse_args()
    report: dict[str, Any] = {"cores": os.cpu_count(), "runs": options.runs}
    print("two stubs, attached")
    report["stubs"] = on_stubs(options.runs)
    print(f"{'pause of':>9} {'CPU s':>7} {'wall s':>7}")
    report["many"] = {}
    for count in (2, 64, 512, 2048):
        report["many"][count] = row = on_many(count, 5)
        print(f"{count:9} {row['cpu_s']:7.2f} {row['wall_s']:7.2f}")
    if options.fleet:
        print(f"fleet {options.fleet}")
        report["fleet"] = on_fleet(options.fleet, options.runs)
    report["load_average"] = [round(value, 1) for value in os.getloadavg()]
    if options.result:
        options.result.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

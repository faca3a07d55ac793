"""What starting skyctl costs, against bare Python and `import typer`, in one run.

    python -m benchmarks.startup                 in a directory with a fleet.yaml
    python -m benchmarks.startup --fleet demo

Wall time is the median of interleaved runs, as a ratio to bare Python; import time is the sum that
`python -X importtime` reports.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time

_IMPORT = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)$", re.MULTILINE)
HEAVY = ("torch", "vllm", "transformers")


def run(arguments: list[str]) -> tuple[float, str]:
    """Wall seconds and stderr of one process."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    return time.perf_counter() - began, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--fleet", default="", help="fleet that status and pause ask")
    options = parser.parse_args()
    fleet = ["--fleet", options.fleet] if options.fleet else []
    cases = {
        "python -c pass": ["-c", "pass"],
        "import typer": ["-c", "import typer"],
        "skyctl --version": ["-m", "skyctl", "--version"],
        "skyctl --help": ["-m", "skyctl", "--help"],
        "skyctl status": ["-m", "skyctl", "status", *fleet],
        "skyctl resume": ["-m", "skyctl", "resume", *fleet],
    }
    walls: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.runs):
        for name, arguments in cases.items():
            walls[name].append(run(arguments)[0])
    bare = statistics.median(walls["python -c pass"])
    print(f"{'command':20} {'wall':>8} {'/ bare':>7} {'imports':>9} {'modules':>8}  heavy")
    for name, arguments in cases.items():
        found = _IMPORT.findall(run(["-X", "importtime", *arguments])[1])
        milliseconds = sum(int(microseconds) for microseconds, _ in found) / 1000
        heavy = sorted({m.split(".")[0] for _, m in found} & set(HEAVY))
        wall = statistics.median(walls[name])
        print(
            f"{name:20} {wall * 1000:5.0f} ms {wall / bare:7.1f} {milliseconds:6.0f} ms"
            f" {len(found):8}  {', '.join(heavy) or 'none'}"
        )


if __name__ == "__main__":
    main()

"""Inputs that nobody meant, by the thousand: how many were accepted, refused, or did us harm.

    python -m benchmarks.fuzz [--cases 10000] [--only "fleet file"] [--first-seed 0] [--result FILE]

Every case has a seed and a deadline. Harm is anything but a refusal in one line: a traceback, a
case that does not end, an offset accepted outside of its file.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.inputs import CASES, run_case

RESULTS = Path(__file__).parent / "results"
_EXAMPLES = 5


def fuzz(kind: str, cases: int, *, first_seed: int = 0) -> dict[str, Any]:
    """So many cases of one kind of input."""
    counts: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}
    began, slowest_s = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        for seed in range(first_seed, first_seed + cases):
            directory = Path(temporary) / "case"
            directory.mkdir()
            case_began = time.monotonic()
            try:
                counts["accepted" if run_case(kind, seed, directory) else "refused"] += 1
            except Exception as error:
                counts["harm"] += 1
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__} in {Path(last.filename).name}:{last.name}"
                examples.setdefault(where, []).append(f"seed {seed}: {str(error)[:160]}")
            slowest_s = max(slowest_s, time.monotonic() - case_began)
            shutil.rmtree(directory, ignore_errors=True)
    return {
        "cases": cases,
        "accepted": counts["accepted"],
        "refused": counts["refused"],
        "harm": counts["harm"],
        "by_place": {where: len(found) for where, found in examples.items()},
        "examples": {where: found[:_EXAMPLES] for where, found in examples.items()},
        "slowest_case_s": round(slowest_s, 3),
        "seconds": round(time.monotonic() - began, 1),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz")
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind")
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    results = {}
    for kind in options.only or CASES:
        results[kind] = fuzz(kind, options.cases, first_seed=options.first_seed)
        row = results[kind]
        print(
            f"{kind:<20} {row['cases']:>6} cases  {row['accepted']:>6} accepted  "
            f"{row['refused']:>6} refused  {row['harm']:>5} harm  "
            f"slowest {row['slowest_case_s']} s  {row['seconds']} s",
            flush=True,
        )
    data = {"python": platform.python_version(), "inputs": results}
    (options.result or RESULTS / "fuzz.json").write_text(json.dumps(data, indent=2) + "\n")
    return int(any(row["harm"] for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())

"""shm and gloo against disk: one checkpoint into real vLLM CPU servers, in turns.

    python -m benchmarks.cpu_transports [--servers 2] [--runs 5] [--shape qwen3-0.5b]
    python -m benchmarks.cpu_transports --first-push      a fleet's first push over its later ones

Makes two checkpoints in --scratch (default /dev/shm), starts a fleet with `skyctl up`, pushes one
after the other by every transport in turn, checks the answers after each push, and takes the fleet
down. Writes benchmarks/results/cpu-transports.json and prints a table. `--first-push` starts a
fleet by which the first push was rehearsed and one by which it was not, side by side, and writes
benchmarks/results/first-push-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, write_checkpoint
from benchmarks.push import RESULTS, Fleet, answer, control_token, on_cpu, wait_until_warm

TRANSPORTS = ("disk", "shm", "gloo")


def settings(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The fleet file of this run."""
    args = {"max-model-len": 1024, "enforce-eager": True, "dtype": "bfloat16"}
    return on_cpu(model, options.servers, args=args, env={"VLLM_CPU_KVCACHE_SPACE": "1"})


def pushes(
    fleet: Fleet, checkpoints: list[Path], options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Results of every counted push, by transport. Raises SystemExit on a wrong answer."""
    urls, token = list(fleet.data("urls")["servers"].values()), control_token(fleet)
    answers: dict[Path, list[int]] = {checkpoints[0]: answer(urls[0], token)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in TRANSPORTS}
    number = 0
    for run in range(1 + options.runs):
        for name in TRANSPORTS:
            number += 1
            checkpoint = checkpoints[number % 2]
            asked = ("sync-weights", str(checkpoint), "--transport", name)
            result: dict[str, Any] = fleet.data(*asked)["job"]["result"]
            print(f"{name}: {result['seconds']:.2f} s, frozen {result['freeze_window_s']:.2f} s")
            for url in urls:
                tokens = answer(url, token)
                if answers.setdefault(checkpoint, tokens) != tokens:
                    raise SystemExit(f"{url} answers {tokens} after {name}, not {answers}")
            if run:
                found[name].append(result)
    if len({tuple(tokens) for tokens in answers.values()}) != len(answers):
        raise SystemExit(f"the checkpoints answer alike: {answers}")
    return found


def figures(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by transport, and over those of disk."""
    medians = {
        name: {
            key: statistics.median(result[key] for result in results)
            for key in ("seconds", "freeze_window_s")
        }
        for name, results in found.items()
    }
    return {
        name: {
            "runs_s": [round(result["seconds"], 3) for result in found[name]],
            "median_s": round(row["seconds"], 3),
            "freeze_window_s": round(row["freeze_window_s"], 3),
            "over_disk": round(row["seconds"] / medians["disk"]["seconds"], 2),
            "freeze_over_disk": round(
                row["freeze_window_s"] / medians["disk"]["freeze_window_s"], 2
            ),
        }
        for name, row in medians.items()
    }


def taken_on() -> dict[str, Any]:
    """The machine of a result, and the day."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[2],
        "versions": {"python": platform.python_version(), "vllm": version("vllm-cpu")},
        "date": time.strftime("%Y-%m-%d"),
    }


def first_pushes(checkpoints: list[Path], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the pushes of two fleets, in turns: one with `warm`, one without."""
    fleets: dict[bool, Fleet] = {}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    preflights: dict[bool, list[float]] = {False: [], True: []}
    beyond: dict[bool, list[float]] = {False: [], True: []}
    try:
        for warm in seconds:
            wanted = {**settings(options, checkpoints[0]), "name": f"bench-{warm}".lower()}
            wanted["weight_transfer"] = {"warm": warm}
            fleets[warm] = Fleet(options.scratch / wanted["name"], wanted)
            fleets[warm].run("up")
        wait_until_warm(fleets[True])
        for run in range(1 + options.runs):
            for warm, fleet in fleets.items():
                asked = ("sync-weights", str(checkpoints[(run + 1) % 2]), "--transport", "shm")
                began = time.perf_counter()
                result = fleet.data(*asked)["job"]["result"]
                beyond[warm].append(time.perf_counter() - began - result["seconds"])
                seconds[warm].append(result["seconds"])
                preflights[warm].append(result["stages"]["preflight"])
                print(f"warm {warm}, push {run}: {result['seconds']:.2f} s {result['stages']}")
    finally:
        for fleet in fleets.values():
            fleet.run("down", check=False)
    return {
        f"warm_{warm}".lower(): {
            "first_s": round(runs[0], 3),
            "later_s": [round(one, 3) for one in runs[1:]],
            "first_over_later": round(runs[0] / statistics.median(runs[1:]), 2),
            "preflights_s": [round(one, 3) for one in preflights[warm]],
            "commands_beyond_s": [round(one, 3) for one in beyond[warm]],
        }
        for warm, runs in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_transports")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.5b")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    parser.add_argument("--first-push", action="store_true")
    options = parser.parse_args()
    checkpoints = [options.scratch / f"{options.shape}-{seed}" for seed in (1, 2)]
    fleet = None
    try:
        for seed, checkpoint in enumerate(checkpoints, 1):
            write_checkpoint(checkpoint, options.shape, seed)
        if options.first_push:
            row = {"benchmark": "first-push-cpu", "servers": options.servers, **taken_on()}
            row |= first_pushes(checkpoints, options)
            (RESULTS / "first-push-cpu.json").write_text(json.dumps(row, indent=1) + "\n")
            return
        fleet = Fleet(options.scratch / "fleet", settings(options, checkpoints[0]))
        fleet.run("up")
        found = pushes(fleet, checkpoints, options)
    finally:
        if fleet is not None:
            fleet.run("down", check=False)
        shutil.rmtree(options.scratch, ignore_errors=True)
    result = {
        "benchmark": "cpu-transports",
        "servers": options.servers,
        **taken_on(),
        "bytes": found["disk"][0]["total_bytes"],
        "transports": figures(found),
    }
    (RESULTS / "cpu-transports.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'transport':<10}{'median s':>10}{'frozen s':>10}{'/ disk':>8}{'frozen / disk':>15}")
    for name, row in result["transports"].items():
        print(
            f"{name:<10}{row['median_s']:>10.2f}{row['freeze_window_s']:>10.2f}"
            f"{row['over_disk']:>8.2f}{row['freeze_over_disk']:>15.2f}"
        )


if __name__ == "__main__":
    main()

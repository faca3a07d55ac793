"""Push a Qwen3-8B-shaped checkpoint into real vLLM GPU servers, beside vLLM's own sender.

    python -m benchmarks.push --transport ipc --servers 1
    python -m benchmarks.push --transport nccl --servers 3 --runs 5 --shape qwen3-8b

Makes two checkpoints in --scratch (default /dev/shm), starts a fleet with `skyctl up`, pushes them
in turn, lets vLLM's own sender push them to the first server, and takes the fleet down. Writes one
JSON object to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, two_checkpoints

RESULTS = Path(__file__).parent / "results"
COMMAND_TIMEOUT_S = 400


class Fleet:
    """A fleet in a directory of its own, driven by the skyctl command."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # JSON is YAML
        (directory / "fleet.yaml").write_text(json.dumps(settings))
        self.env = {**os.environ, "SKYCTL_HOME": str(directory / "state")}

    def run(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "skyctl", *arguments],
            cwd=self.directory,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if check and done.returncode:
            raise SystemExit(f"skyctl {' '.join(arguments)}: {done.returncode}\n{done.stdout}")
        return done.stdout

    def data(self, *arguments: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.run(*arguments, "--json"))["data"]
        return data


def settings(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The fleet file of this run."""
    gpus = options.gpus or list(range(options.servers))
    return {
        "name": "bench",
        "model": str(model),
        "served_model_name": "bench",
        "replicas": options.servers,
        "device": "cuda",
        "gpus": gpus,
        "share_gpus": len(gpus) < options.servers,
        "tensor_parallel_size": options.tensor_parallel_size,
        "args": {
            "max-model-len": 2048,
            "enforce-eager": not options.cuda_graphs,
            "gpu-memory-utilization": options.memory,
        },
        "weight_transfer": {"transport": options.transport, "chunk_size": options.chunk_size},
        "router": {"enabled": False},
    }


def skyctl_pushes(
    fleet: Fleet, checkpoints: list[Path], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Results of every counted push."""
    results = []
    urls, token = list(fleet.data("urls")["servers"].values()), control_token(fleet)
    answers: dict[str, list[int]] = {str(checkpoints[0]): answer(urls[0], token)}
    print(f"  started with: {answers}", flush=True)
    counted = options.warmups + options.runs
    # what was copied must answer as what vLLM's loader brings
    by_loader = 0 if options.layout == "checkpoint" else len(checkpoints)
    for run in range(counted + by_loader):
        checkpoint = str(checkpoints[run % len(checkpoints)])
        layout = options.layout if run < counted else "checkpoint"
        arguments = ["--layout", layout, *options.push_options.split()]
        result = fleet.data("sync-weights", checkpoint, *arguments)["job"]["result"]
        stages = " ".join(f"{name} {value:.3f}" for name, value in result["stages"].items())
        print(
            f"skyctl push {run}: {result['seconds']:.3f} s, "
            f"frozen {result['freeze_window_s']:.3f} s, copied {result['layout_share']:.0%}; "
            f"{stages}",
            flush=True,
        )
        for note in result["notes"]:
            print(f"  {note}", flush=True)
        for url in urls:
            tokens = answer(url, token)
            print(f"  {checkpoint[-1]}: {tokens}", flush=True)
            if answers.setdefault(checkpoint, tokens) != tokens:
                raise SystemExit(f"{url} answers {tokens} with {checkpoint}, not {answers}")
        if options.warmups <= run < counted:
            results.append({**result, "gpu_memory_mib": gpu_memory()})
    if len({tuple(tokens) for tokens in answers.values()}) != len(answers):
        print(f"WARNING: the checkpoints answer alike: {answers}")
    return results


def control_token(fleet: Fleet) -> str:
    """What the servers ask for; only in our environment and in headers from here on."""
    return Path(fleet.data("urls")["access"]["control_token_file"]).read_text().strip()


def answer(url: str, token: str) -> list[int]:
    """Greedy token ids of a fixed prompt."""
    import httpx

    body = {
        "model": "bench",
        "prompt": [40, 41, 42, 43],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"Authorization": f"Bearer {token}"}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    reply.raise_for_status()
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def gpu_memory() -> list[int]:
    """MiB in use on every GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(query, text=True).split()]


def native_pushes(
    fleet: Fleet, checkpoints: list[Path], options: argparse.Namespace
) -> dict[str, Any]:
    """vLLM's own sender on the first server, from a GPU of its own for NCCL."""
    url = next(iter(fleet.data("urls")["servers"].values()))
    device = options.servers * options.tensor_parallel_size if options.transport == "nccl" else 0
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.native_sender"),
            *("--backend", options.transport, "--url", url, "--device", f"cuda:{device}"),
            *("--world-size", str(options.tensor_parallel_size)),
            *("--runs", str(options.runs), "--warmups", str(options.warmups)),
            *map(str, checkpoints),
        ],
        env={**os.environ, "BENCHMARK_TOKEN": control_token(fleet)},
        text=True,
        capture_output=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        print(done.stderr[-3000:])
        return {"runs_s": [], "vllm": ""}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def record(
    options: argparse.Namespace, pushes: list[dict[str, Any]], native: dict[str, Any]
) -> dict[str, Any]:
    """One object per figure, as benchmarks/results/ keeps them."""
    import torch
    import vllm

    seconds = [round(push["seconds"], 4) for push in pushes]
    return {
        "benchmark": f"{options.transport}-{options.servers}",
        "gpu": torch.cuda.get_device_name(0),
        "machine": f"{torch.cuda.device_count()} GPUs, {os.cpu_count()} processors",
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "bytes": pushes[0]["total_bytes"],
        "runs_s": seconds,
        "median_s": statistics.median(seconds),
        "native_runs_s": native["runs_s"],
        "native_median_s": statistics.median(native["runs_s"]) if native["runs_s"] else None,
        "freeze_window_s": round(statistics.median(p["freeze_window_s"] for p in pushes), 4),
        "stages_s": {
            name: round(statistics.median(p["stages"].get(name, 0.0) for p in pushes), 4)
            for name in pushes[0]["stages"]
        },
        "gpu_memory_mib": {
            "first": pushes[0]["gpu_memory_mib"],
            "last": pushes[-1]["gpu_memory_mib"],
        },
        "layout_share": statistics.median(push["layout_share"] for push in pushes),
        "options": (
            f"{options.shape} chunk {options.chunk_size}, layout {options.layout}, "
            f"{options.warmups} warm-ups {options.push_options}"
        ).strip(),
    }


def save(result: dict[str, Any], label: str = "") -> None:
    """Write a result where benchmarks/results/ keeps it, and print it."""
    text = json.dumps(result, indent=1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{result['benchmark']}{label}.json").write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=["ipc", "nccl"], required=True)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpus", type=int, nargs="*", help="GPUs of the servers")
    parser.add_argument("--memory", type=float, default=0.3, help="gpu-memory-utilization")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--chunk-size", default="1GiB")
    parser.add_argument("--layout", choices=["auto", "runtime", "checkpoint"], default="auto")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--push-options", default="", help="more options of sync-weights")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    parser.add_argument("--label", default="", help="more of the result's file name")
    parser.add_argument("--no-native", action="store_true")
    parser.add_argument("--keep-up", action="store_true", help="leave the fleet running")
    options = parser.parse_args()

    checkpoints = two_checkpoints(options.scratch, options.shape)
    fleet = Fleet(options.scratch / "fleet", settings(options, checkpoints[0]))
    try:
        fleet.run("up")
        pushes = skyctl_pushes(fleet, checkpoints, options)
        native: dict[str, Any] = {"runs_s": [], "vllm": ""}
        if not options.no_native:
            native = native_pushes(fleet, checkpoints, options)
    finally:
        if not options.keep_up:
            fleet.run("down", check=False)
    result = record(options, pushes, native)
    save(result, options.label)


if __name__ == "__main__":
    main()

"""checkpoint-engine (Moonshot) and skyctl push the same checkpoints into a vLLM server by CUDA IPC.

    pip install checkpoint-engine
    python -m benchmarks.checkpoint_engine [--runs 5]

One server on GPU 0, with both worker extensions in it. skyctl's pushes count from the command's
preflight to the last resume; checkpoint-engine's from `register_checkpoint` (which reads the files
and pins them) to the end of `update`, with vLLM's /pause and /resume around the update, and the
rendezvous of its processes left out. It is measured in its three ways of holding a checkpoint:

    new        pinned memory is allocated for each push
    pool       `use_shared_memory_pool`: allocated once, used again
    in place   pins files below /dev/shm where they are, and deletes them; it gets hard links

Answers after its last push are compared with those after skyctl's. Writes
benchmarks/results/checkpoint-engine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, two_checkpoints
from benchmarks.native_sender import free_port, post, send_token_with_every_request
from benchmarks.push import (
    COMMAND_TIMEOUT_S,
    ONE_SERVER,
    Fleet,
    answer,
    control_token,
    save,
    settings,
)

WAYS = ("new", "pool", "in place")
EXTENSION = "benchmarks.both_extensions.BothExtensions"


def linked(checkpoint: Path, number: int) -> list[str]:
    """Hard links to the shards, for a way that deletes what it is given."""
    directory = checkpoint.parent / f"links-{number}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for shard in checkpoint.glob("*.safetensors"):
        os.link(shard, directory / shard.name)
    return sorted(str(path) for path in directory.glob("*.safetensors"))


def send(options: argparse.Namespace) -> None:
    """The sender's process: pushes the checkpoints in turn and prints the seconds of each."""
    import torch
    from checkpoint_engine import (  # type: ignore[import-not-found,unused-ignore]
        ParameterServer,
        request_inference_to_update,
    )

    send_token_with_every_request()
    _let_its_client_send_the_token()
    torch.cuda.set_device(0)
    server = ParameterServer(auto_pg=True)
    seconds: list[dict[str, float]] = []
    for run in range(options.warmups + options.runs):
        checkpoint, name = options.checkpoints[run % len(options.checkpoints)], f"push-{run}"
        files = (
            linked(checkpoint, run)
            if options.way == "in place"
            else sorted(str(path) for path in checkpoint.glob("*.safetensors"))
        )
        began = time.perf_counter()
        server.register_checkpoint(
            name,
            files=files,
            use_shared_memory_pool=options.way == "pool",
            use_inplace_pin_memory=options.way == "in place",
        )
        server.gather_metas(name)
        registered = time.perf_counter()
        post(options.url, "/pause", mode="keep")
        server.update(
            name,
            lambda paths: request_inference_to_update(f"{options.url}/collective_rpc", dict(paths)),
        )
        post(options.url, "/resume")
        ended = time.perf_counter()
        server.unregister_checkpoint(name)
        if run >= options.warmups:
            seconds.append(
                {
                    "whole_s": round(ended - began, 4),
                    "register_s": round(registered - began, 4),
                    "freeze_s": round(ended - registered, 4),
                }
            )
    print(json.dumps(seconds))


def _let_its_client_send_the_token() -> None:
    """checkpoint-engine's client makes a bare `httpx.Client`."""
    import httpx

    bare, headers = httpx.Client, {"Authorization": f"Bearer {os.environ['BENCHMARK_TOKEN']}"}
    httpx.Client = lambda **options: bare(**{"headers": headers, **options})  # type: ignore[assignment,misc]


def checkpoint_engine_pushes(
    url: str, token: str, way: str, checkpoints: list[Path], options: argparse.Namespace
) -> list[dict[str, float]]:
    """Seconds of each push; [] when it did not run."""
    environment = {
        **os.environ,
        "BENCHMARK_TOKEN": token,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.checkpoint_engine", "--send", "--url", url),
            *("--way", way, "--runs", str(options.runs), "--warmups", str(options.warmups)),
            *("--checkpoints", *map(str, checkpoints)),
        ],
        env=environment,
        text=True,
        capture_output=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        print(f"checkpoint-engine, {way}:\n{done.stderr[-2500:]}", flush=True)
        return []
    seconds: list[dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds


def medians(pushes: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(p[name] for p in pushes), 4) for name in pushes[0]}


def measure(options: argparse.Namespace, checkpoints: list[Path]) -> dict[str, Any]:
    config = settings(options, checkpoints[0])
    config["args"]["worker-extension-cls"] = EXTENSION
    fleet = Fleet(options.scratch / "fleet", config)
    rows: dict[str, Any] = {}
    try:
        fleet.run("up")
        url, token = next(iter(fleet.data("urls")["servers"].values())), control_token(fleet)
        answers, pushes = {}, []
        for run in range(options.warmups + options.runs):
            checkpoint = checkpoints[run % len(checkpoints)]
            result = fleet.data("sync-weights", str(checkpoint))["job"]["result"]
            answers[checkpoint] = answer(url, token)
            if run >= options.warmups:
                whole, freeze = result["seconds"], result["freeze_window_s"]
                pushes.append({"whole_s": round(whole, 4), "freeze_s": round(freeze, 4)})
        rows["skyctl"] = {**medians(pushes), "runs": pushes}
        print("skyctl", medians(pushes), flush=True)
        last = checkpoints[(options.warmups + options.runs - 1) % len(checkpoints)]
        for way in WAYS:
            pushes = checkpoint_engine_pushes(url, token, way, checkpoints, options)
            if not pushes:
                continue
            same = answer(url, token) == answers[last]
            row = {**medians(pushes), "answers_as_after_skyctl": same, "runs": pushes}
            rows[f"checkpoint-engine, {way}"] = row
            print(f"checkpoint-engine, {way}", medians(pushes), "answers alike:", same, flush=True)
    finally:
        fleet.run("down", check=False)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--chunk-size", default="4GiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoints", type=Path, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        send(options)
        return

    import torch
    import vllm

    options = argparse.Namespace(**ONE_SERVER, **vars(options), transport="ipc")
    checkpoints = two_checkpoints(options.scratch, options.shape)
    result = {
        "benchmark": "checkpoint-engine",
        "gpu": torch.cuda.get_device_name(0),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "rows": measure(options, checkpoints),
    }
    save(result)


if __name__ == "__main__":
    main()

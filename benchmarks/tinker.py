"""What a Tinker client waits for, with the unmodified SDK and real vLLM servers.

    python -m benchmarks.tinker [--servers 2] [--rounds 20]                     on CPU
    python -m benchmarks.tinker --ranks 32 --label=-adapters                    without pushes
    python -m benchmarks.tinker --gpus 0 --device cuda:1 --label=-h200          Qwen3-8B's shape
    python -m benchmarks.tinker --gpus 0 --device cuda:0 --sleep --label=-shared    one GPU for both

Makes a model, starts a fleet with its Tinker API by `skyctl up`, and trains an adapter of rank 32
and, on CPU, a whole model (rank 0) in turns. Writes benchmarks/results/tinker.json, in
milliseconds: `step` from `forward_backward` and `optim_step`, sent together, to both answers;
`sampler` from `save_weights_and_get_sampling_client` to the client in hand; `first_sample` from
there to the first token of new weights, with the adapter's load, or the verified push, in it;
`next_sample` another. With `--sleep`, servers sleep during each step: `sleep` and `wake` are these
commands, and what the GPU holds meanwhile is told.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.adapters import spread
from benchmarks.checkpoints import write_checkpoint
from benchmarks.cpu_transports import taken_on
from benchmarks.push import RESULTS, Fleet, gpu_memory, taken_on_gpus
from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.launch.local.host import free_port

BASE = "org/base"
SHAPE = "qwen3-8b"


def settings(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The fleet file of this run."""
    tinker: dict[str, Any] = {"base_model": BASE, "port": free_port("127.0.0.1")}
    found: dict[str, Any] = {
        "name": "bench",
        "model": str(model),
        "replicas": options.servers,
        "device": "cpu",
        "args": {"max-model-len": 1024, "enforce-eager": True},
        "lora": {"max_rank": 32, "max_adapters": 4},
        "tinker": {**tinker, "full_parameters": True},
    }
    if not options.gpus:
        return found
    return {
        **found,
        "replicas": len(options.gpus),
        "device": "cuda",
        "gpus": options.gpus,
        "args": {
            "max-model-len": 2048,
            "enforce-eager": True,
            "gpu-memory-utilization": 0.3,
            "kv-cache-memory-bytes": 8 << 30,
        },
        "router": {"enabled": False},
        "weight_transfer": {"warm": False},
        "tinker": {
            **tinker,
            "device": options.device,
            "dtype": "bfloat16",
            "batch_tokens": options.rows * options.tokens,
        },
    }


def access(fleet: Fleet) -> tuple[str, str]:
    """URL and key of its Tinker API, as `skyctl urls` exports them."""
    lines = fleet.run("urls", "--format", "tinker").splitlines()
    exports = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    key_file = exports["TINKER_API_KEY"].removeprefix('"$(cat ').removesuffix(')"')
    return exports["TINKER_BASE_URL"], Path(key_file).read_text().strip()


def measure(fleet: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    """Times of each kind of model, a round of one after a round of the other."""
    import tinker
    from tinker import types

    prompt, one = types.ModelInput.from_ints([65, 66]), types.SamplingParams(max_tokens=1)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(
                [(7 * row + place) % 500 for place in range(options.tokens)]
            ),
            loss_fn_inputs={
                "target_tokens": types.TensorData(
                    data=[(7 * row + place + 1) % 500 for place in range(options.tokens)],
                    dtype="int64",
                    shape=[options.tokens],
                )
            },
        )
        for row in range(options.rows)
    ]
    ranks = {rank: f"rank_{rank}" for rank in options.ranks}
    times: dict[int, dict[str, list[float]]] = {rank: {} for rank in ranks}
    found: dict[str, Any] = {}
    with tinker.ServiceClient() as service:
        make = service.create_lora_training_client
        models = {rank: make(base_model=BASE, rank=rank, seed=1).result() for rank in times}
        for number in range(-2, options.rounds):  # two to warm up
            for rank, model in models.items():
                clock = [time.perf_counter()]
                names = ["step", "sampler", "first_sample", "next_sample"]
                if options.sleep:
                    found["gpu_memory_awake_mib"] = gpu_memory()
                    fleet.run("sleep")
                    clock.append(time.perf_counter())
                    found["gpu_memory_asleep_mib"] = gpu_memory()
                    names = ["sleep", "step", "wake", *names[1:]]
                forward = model.forward_backward(data, "cross_entropy")
                stepped = model.optim_step(types.AdamParams(learning_rate=1e-4)).result()
                forward.result()
                clock.append(time.perf_counter())
                if options.sleep:
                    fleet.run("wake")
                    clock.append(time.perf_counter())
                sampler = model.save_weights_and_get_sampling_client().result()
                clock.append(time.perf_counter())
                for _ in range(2):
                    sampler.sample(prompt, 1, one).result()
                    clock.append(time.perf_counter())
                if number < 0:
                    continue
                for name, (begin, end) in zip(names, pairwise(clock), strict=True):
                    times[rank].setdefault(name, []).append((end - begin) * 1000)
                times[rank].setdefault("tokens_per_s", []).append(
                    (stepped.metrics or {})["tokens_per_s"]
                )
    for rank, name in ranks.items():
        found[name] = {what: spread(seen) for what, seen in times[rank].items()}
    return found


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What a result was taken on."""
    if not options.gpus:
        return taken_on()
    gpus = {"servers": options.gpus, "trainer": options.device}
    return {**taken_on_gpus(), "gpus": gpus, "shape": SHAPE}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinker", description=__doc__)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--gpus", type=int, nargs="*", default=[], help="one server on each")
    parser.add_argument("--device", default="cuda:1", help="the trainer's, with --gpus")
    parser.add_argument("--sleep", action="store_true", help="servers sleep during each step")
    parser.add_argument("--ranks", type=int, nargs="*", help="32 and 0 (all), on a GPU 32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, help="of a step; 4, on a GPU 8")
    parser.add_argument("--tokens", type=int, help="of a row; 64, on a GPU 1024")
    parser.add_argument("--model", type=Path, help="a checkpoint that is there")
    parser.add_argument("--label", default="", help="more of the result's file name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench-tinker"))
    options = parser.parse_args()
    options.ranks = options.ranks or ([32] if options.gpus else [32, 0])
    options.rows = options.rows or (8 if options.gpus else 4)
    options.tokens = options.tokens or (1024 if options.gpus else 64)
    logging.disable(logging.WARNING)
    fleet = None
    try:
        model = options.model or options.scratch / "model"
        if not options.gpus:
            make_tiny_checkpoint(model, seed=1)
        elif not options.model:
            write_checkpoint(model, SHAPE, 1)
        fleet = Fleet(options.scratch / "fleet", settings(options, model))
        fleet.run("up")
        os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"] = access(fleet)
        os.environ["TINKER_TELEMETRY"] = "0"
        found = measure(fleet, options)
        pushes = [push["ok"] for push in fleet.data("weights")["pushes"]]
    finally:
        if fleet is not None:
            fleet.run("down", check=False)
        shutil.rmtree(options.scratch, ignore_errors=True)
    result = {
        "benchmark": "tinker",
        "servers": len(options.gpus) or options.servers,
        "tokens_a_step": options.rows * options.tokens,
        **machine(options),
        **found,
        "pushes": len(pushes),
        "pushes_failed": pushes.count(False),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"tinker{options.label}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

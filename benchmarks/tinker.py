"""What a Tinker client waits for, with the unmodified SDK and real vLLM CPU servers.

    python -m benchmarks.tinker [--servers 2] [--rounds 20]

Makes a tiny model, starts a fleet with its Tinker API by `skyctl up`, and trains an adapter of rank
32 and a whole model (rank 0) in turns. Writes benchmarks/results/tinker.json, in milliseconds:
`step` from `forward_backward` and `optim_step`, sent together, to both answers; `sampler` from
`save_weights_and_get_sampling_client` to the client in hand; `first_sample` from there to the first
token of new weights, with the adapter's load, or the verified push, in it; `next_sample` another.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.adapters import spread
from benchmarks.cpu_transports import taken_on
from benchmarks.push import RESULTS, Fleet
from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.launch.local.host import free_port

BASE = "org/tiny"
ROWS, TOKENS = 4, 64


def settings(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The fleet file of this run."""
    return {
        "name": "bench",
        "model": str(model),
        "replicas": options.servers,
        "device": "cpu",
        "args": {"max-model-len": 1024, "enforce-eager": True},
        "lora": {"max_rank": 32, "max_adapters": 4},
        "tinker": {
            "base_model": BASE,
            "port": free_port("127.0.0.1"),
            "full_parameters": True,
        },
    }


def measure(rounds: int) -> dict[str, Any]:
    """Times of each kind of model, a round of one after a round of the other."""
    import tinker
    from tinker import types

    prompt, one = types.ModelInput.from_ints([65, 66]), types.SamplingParams(max_tokens=1)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(
                [(7 * row + place) % 500 for place in range(TOKENS)]
            ),
            loss_fn_inputs={
                "target_tokens": [(7 * row + place + 1) % 500 for place in range(TOKENS)]
            },
        )
        for row in range(ROWS)
    ]
    times: dict[int, dict[str, list[float]]] = {32: {}, 0: {}}
    with tinker.ServiceClient() as service:
        make = service.create_lora_training_client
        models = {rank: make(base_model=BASE, rank=rank, seed=1).result() for rank in times}
        for number in range(-2, rounds):  # two to warm up
            for rank, model in models.items():
                clock = [time.perf_counter()]
                forward = model.forward_backward(data, "cross_entropy")
                model.optim_step(types.AdamParams(learning_rate=1e-4)).result()
                forward.result()
                clock.append(time.perf_counter())
                sampler = model.save_weights_and_get_sampling_client().result()
                clock.append(time.perf_counter())
                for _ in range(2):
                    sampler.sample(prompt, 1, one).result()
                    clock.append(time.perf_counter())
                if number < 0:
                    continue
                names = ("step", "sampler", "first_sample", "next_sample")
                for name, begin, end in zip(names, clock, clock[1:], strict=False):
                    times[rank].setdefault(name, []).append((end - begin) * 1000)
    return {
        name: {what: spread(seen) for what, seen in times[rank].items()}
        for name, rank in (("rank_32", 32), ("rank_0", 0))
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinker")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench-tinker"))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    fleet = None
    try:
        model = make_tiny_checkpoint(options.scratch / "model", seed=1)
        fleet = Fleet(options.scratch / "fleet", settings(options, model))
        fleet.run("up")
        exports = dict(
            line.removeprefix("export ").split("=", 1)
            for line in fleet.run("urls", "--format", "tinker").splitlines()
        )
        key_file = exports["TINKER_API_KEY"].removeprefix('"$(cat ').removesuffix(')"')
        os.environ["TINKER_BASE_URL"] = exports["TINKER_BASE_URL"]
        os.environ["TINKER_API_KEY"] = Path(key_file).read_text().strip()
        os.environ["TINKER_TELEMETRY"] = "0"
        found = measure(options.rounds)
        pushes = [push["ok"] for push in fleet.data("weights")["pushes"]]
    finally:
        if fleet is not None:
            fleet.run("down", check=False)
        shutil.rmtree(options.scratch, ignore_errors=True)
    result = {
        "benchmark": "tinker",
        "servers": options.servers,
        "tokens_a_step": ROWS * TOKENS,
        **taken_on(),
        **found,
        "pushes": len(pushes),
        "pushes_failed": pushes.count(False),
    }
    (RESULTS / "tinker.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

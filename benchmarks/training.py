"""Tokens per second of the Tinker API's trainer, beside a plain loop of torch and peft.

    python -m benchmarks.training                          Qwen3-8B's shape on a GPU, rank 32
    python -m benchmarks.training --shape qwen3-4-layers --device cpu --rows 4 --tokens 64

Both train the same adapter from the same values, on the same base in bfloat16 with activations
computed again for the gradient, by cross entropy and AdamW: `forward_backward` and `optim_step` of
the training process over its socket here, `loss.backward()` and `optimizer.step()` there. One has
the device after the other. Losses are compared, so that the two compute the same. Writes
benchmarks/results/training.json. Needs `skyctl-fleet[tinker]` and peft.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import INDEX, SHAPES, write_checkpoint
from benchmarks.push import RESULTS

LEARNING_RATE, BETAS, EPSILON = 1e-4, (0.9, 0.95), 1e-12
SAME_LOSS = 0.02
"""Relative; bfloat16 has three digits."""


def batch(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of each row, one more than are trained on."""
    vocabulary = int(SHAPES[options.shape]["vocab_size"])
    return [
        [(7919 * row + 31 * place * place + 1) % vocabulary for place in range(options.tokens + 1)]
        for row in range(options.rows)
    ]


def request(rows: list[list[int]]) -> bytes:
    """A ForwardBackwardRequest as the SDK sends it."""
    import numpy as np

    from skyctl.tinker import wire

    message = wire.message("ForwardBackwardRequest")(
        model_id="m", seq_id=1, loss_fn="cross_entropy"
    )
    for row in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(row[:-1], np.int32).tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = wire.INT64, np.array(row[1:], np.int64).tobytes()
        targets.shape.append(len(row) - 1)
    return bytes(message.SerializeToString())


async def ours(options: argparse.Namespace, model: Path, adapter: Path) -> dict[str, Any]:
    """Seconds and losses of each step by the training process; its adapter, before any."""
    from skyctl.tinker import wire
    from skyctl.tinker.training_process import Worker, WorkerSettings

    worker = Worker(
        WorkerSettings(
            name="base",
            path=str(model),
            devices=[options.device],
            dtype="bfloat16",
            batch_tokens=options.batch_tokens,
            checkpointing=True,
        )
    )
    await worker.ensure()
    try:
        config = {"rank": options.rank, "seed": 1}
        await worker.call({"do": "create", "model": "m", "config": config})
        await worker.call(
            {"do": "save", "model": "m", "directory": str(adapter), "optimizer": False}
        )
        body = request(batch(options))
        seconds, losses = [], []
        for _ in range(options.warmups + options.steps):
            began = time.perf_counter()
            _, answer = await worker.call({"do": "forward_backward", "model": "m"}, body)
            params = {
                "learning_rate": LEARNING_RATE,
                "beta1": BETAS[0],
                "beta2": BETAS[1],
                "eps": EPSILON,
            }
            await worker.call({"do": "optim_step", "model": "m", "params": params})
            seconds.append(time.perf_counter() - began)
            output = wire.message("ForwardBackwardOutput").FromString(answer)
            losses.append(output.metrics["loss:sum"])
    finally:
        await worker.stop()
    return {"seconds": seconds, "losses": losses}


def plain(options: argparse.Namespace, model: Path, adapter: Path) -> dict[str, Any]:
    """The same by torch and peft."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    base.to(options.device).gradient_checkpointing_enable({"use_reentrant": False})
    trained = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    parameters = [value for value in trained.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0
    )
    rows = torch.tensor(batch(options), device=options.device)
    seconds, losses = [], []
    for _ in range(options.warmups + options.steps):
        began, total = time.perf_counter(), 0.0
        for some in rows.split(max(1, options.batch_tokens // options.tokens)):
            logits = trained(input_ids=some[:, :-1], use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), some[:, 1:].flatten(), reduction="sum"
            )
            loss.backward()
            total += float(loss.detach())
            del logits, loss
        optimizer.step()
        optimizer.zero_grad()
        if options.device != "cpu":
            torch.cuda.synchronize(options.device)
        seconds.append(time.perf_counter() - began)
        losses.append(total)
    return {
        "seconds": seconds,
        "losses": losses,
        "parameters": sum(value.numel() for value in parameters),
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of each row")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="of one forward pass")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench-training"))
    parser.add_argument("--model", type=Path, help="a checkpoint of this shape that is there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    model = options.model or options.scratch / "model"
    options.scratch.mkdir(parents=True, exist_ok=True)
    try:
        if not (model / INDEX).exists():
            write_checkpoint(model, options.shape, 1)
        found = {"skyctl": asyncio.run(ours(options, model, options.scratch / "adapter"))}
        found["plain"] = plain(options, model, options.scratch / "adapter")
    finally:
        shutil.rmtree(options.scratch, ignore_errors=True)
    for one, other in zip(found["skyctl"]["losses"], found["plain"]["losses"], strict=True):
        if abs(one - other) > SAME_LOSS * abs(other):
            raise SystemExit(f"the two do not train the same: {found}")
    tokens = options.rows * options.tokens
    speed = {
        name: round(tokens / statistics.median(side["seconds"][options.warmups :]), 1)
        for name, side in found.items()
    }
    gpu = options.device != "cpu"
    result = {
        "benchmark": "training",
        "gpu": torch.cuda.get_device_name(options.device) if gpu else None,
        "cpus": os.cpu_count(),
        "versions": {"torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "shape": options.shape,
        "rank": options.rank,
        "tokens_a_step": tokens,
        "batch_tokens": options.batch_tokens,
        "trained_parameters": found["plain"].pop("parameters"),
        "tokens_per_s": speed,
        "ratio": round(speed["skyctl"] / speed["plain"], 3),
        **{
            name: {what: [round(value, 4) for value in seen] for what, seen in side.items()}
            for name, side in found.items()
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

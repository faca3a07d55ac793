#!/usr/bin/env python3
"""Reinforcement learning with a trainer that is sharded over several processes (FSDP 2).

    skyctl init --tiny demo && cd demo && skyctl up
    torchrun --nproc-per-node 2 ../examples/fsdp_rl.py
    skyctl down

Each step: rank 0 samples rollouts through the router, every rank computes its share of the policy
gradient, and the fleet gets the new weights from where they lie, a shard on each rank: nothing is
gathered, nothing is saved. The reward is the share of vowels in what the model writes.

Runs on CPUs, and with `--device cuda` on a GPU per rank. Needs the `cpu` (or `gpu`) extra of
skyctl: torch and transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

from skyctl import Fleet

PROMPTS = ("The fleet", "Every server", "Morning light", "Please describe")


def reward(text: str) -> float:
    """The share of vowels among the text's characters, 0..1."""
    return sum(character in "aeiou" for character in text) / max(1, len(text))


async def rollouts(fleet: Fleet, samples: int, seed: int) -> list[dict[str, Any]]:
    """Sampled answers, the prompt of each, and its advantage over the others of its prompt."""
    results = await fleet.generate(
        [
            {"prompt": prompt, "seed": seed + number}
            for prompt in PROMPTS
            for number in range(samples)
        ],
        max_tokens=16,
        temperature=1.0,
        ignore_eos=True,
    )
    rewards = torch.tensor([reward(result.text) for result in results]).view(-1, samples)
    spread = rewards.std(1, keepdim=True) + 1e-6
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten().tolist()
    return [
        {
            "prompt": result.prompt_token_ids,
            "answer": result.token_ids,
            "advantage": advantage,
            "reward": reward(result.text),
        }
        for result, advantage in zip(results, advantages, strict=True)
    ]


def policy_gradient(model: Any, optimizer: torch.optim.Optimizer, batch: list[Any]) -> None:
    """One REINFORCE step over this rank's share; FSDP averages the gradients of all ranks."""
    device = next(model.parameters()).device
    optimizer.zero_grad()
    loss = torch.zeros((), device=device)
    for sample in batch:
        prompt, answer = sample["prompt"], sample["answer"]
        inputs = torch.tensor([prompt + answer], device=device)
        logits = model(inputs).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(answer, device=device)[:, None]
        logprobs = logits.log_softmax(-1).gather(-1, chosen)
        loss = loss - sample["advantage"] * logprobs.mean() / len(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def shared(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


async def train(fleet: Fleet, options: argparse.Namespace) -> list[dict[str, Any]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = shared(await fleet.model_path() if rank == 0 else None)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.to(options.device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    history = []
    async with fleet.trainer(model, transport=options.transport) as live:
        for number in range(options.steps):
            times = [time.perf_counter()]
            batch = await rollouts(fleet, options.samples, number * 1000) if rank == 0 else None
            batch = shared(batch)
            times.append(time.perf_counter())
            policy_gradient(model, optimizer, batch[rank::world_size])
            times.append(time.perf_counter())
            result = await live.push(f"fsdp-{number + 1}")
            times.append(time.perf_counter())
            mean = sum(sample["reward"] for sample in batch) / len(batch)
            rollout_s, train_s, push_s = (b - a for a, b in pairwise(times))
            history.append({"reward": mean, "version": result.version, "push_s": push_s})
            if rank == 0:
                print(
                    f"step {number:2}  reward {mean:.3f}  rollouts {rollout_s:.2f} s  training "
                    f"{train_s:.2f} s  push {push_s:.2f} s, frozen {result.freeze_window_s:.3f} s",
                    flush=True,
                )
        if options.save:
            save(model, options.save)
    return history


def save(model: Any, directory: Path) -> None:
    """Gather the model once, to compare: pushes never do."""
    tensors = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        model.save_pretrained(directory, state_dict=tensors)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-f", "--file", type=Path, help="fleet file (default: as skyctl finds it)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=16, help="per prompt")
    parser.add_argument("--learning-rate", type=float, default=0.006)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--transport", choices=("auto", "ipc", "gloo", "nccl"), default="auto", help="of the pushes"
    )
    parser.add_argument("--history", type=Path, default=Path("fsdp_rl.json"), help="JSON to write")
    parser.add_argument("--save", type=Path, help="directory for the last weights")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    torch.manual_seed(0)
    try:
        async with Fleet.load(options.file) as fleet:
            history = await train(fleet, options)
    finally:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        options.history.write_text(json.dumps(history, indent=2) + "\n")
        print(f"reward {history[0]['reward']:.3f} → {history[-1]['reward']:.3f}")


if __name__ == "__main__":
    asyncio.run(main())

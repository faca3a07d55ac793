#!/usr/bin/env python3
"""Reinforcement learning on a live fleet, small enough for two CPU cores and one minute.

    skyctl init --tiny demo && cd demo && skyctl up
    python ../examples/rl_toy.py --plot reward.svg
    skyctl down

Each step is what every RL loop does: rollouts through the router, a policy-gradient step in this
process, and the new weights pushed into the running servers, whose requests are frozen for as long
as `freeze_window_s` says. The reward is the share of vowels in what the model writes.

Needs the `cpu` (or `gpu`) extra of skyctl: torch and transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from plots import Panel, plot

from skyctl import Fleet
from skyctl.api import GenerationResult

PROMPTS = ("The fleet", "Every server", "Morning light", "Please describe")


@dataclass(frozen=True)
class Settings:
    """`samples` answers of `tokens` tokens to each prompt make one batch."""

    steps: int = 10
    samples: int = 16
    tokens: int = 16
    learning_rate: float = 0.006
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One step's history. Times are in seconds.

    `logprob_gap` is the mean difference between the log probabilities that the servers sampled
    with and the trainer's own: near zero as long as both have the same weights.
    """

    step: int
    reward: float
    logprob_gap: float
    weight_version: str
    freeze_window_s: float
    rollout_s: float
    train_s: float
    push_s: float


def reward(text: str) -> float:
    """The share of vowels among the text's characters, 0..1."""
    return sum(character in "aeiou" for character in text) / max(1, len(text))


async def rollouts(fleet: Fleet, settings: Settings, step: int) -> list[list[GenerationResult]]:
    """Sampled answers to every prompt, grouped by prompt, each with its log probabilities."""
    results = await fleet.generate(
        [
            {"prompt": prompt, "seed": settings.seed + step * 1000 + sample}
            for prompt in PROMPTS
            for sample in range(settings.samples)
        ],
        max_tokens=settings.tokens,
        temperature=1.0,
        ignore_eos=True,
        logprobs=0,
    )
    size = settings.samples
    return [results[i : i + size] for i in range(0, len(results), size)]


def policy_gradient(
    model: Any, optimizer: torch.optim.Optimizer, groups: list[list[GenerationResult]]
) -> float:
    """One REINFORCE step with each prompt's mean reward as the baseline; the logprob gap."""
    loss = torch.zeros(())
    gaps = []
    for group in groups:
        prompt = group[0].prompt_token_ids
        if prompt is None or any(result.logprobs is None for result in group):
            raise SystemExit("the servers send no token ids or log probabilities")
        answers = torch.tensor([result.token_ids for result in group])
        sampled = torch.tensor([result.logprobs for result in group])
        rewards = torch.tensor([reward(result.text) for result in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        inputs = torch.cat([torch.tensor(prompt).expand(len(group), -1), answers], dim=1)
        logits = model(inputs).logits[:, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        gaps.append((logprobs.detach() - sampled).abs().mean())
        loss = loss - (advantages[:, None] * logprobs).mean() / len(groups)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(torch.stack(gaps).mean())


async def train(fleet: Fleet, settings: Settings) -> list[Step]:
    """Train what the fleet runs for some steps, pushing the weights after each."""
    torch.manual_seed(settings.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        await fleet.model_path(), dtype=torch.float32
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    history: list[Step] = []
    for number in range(settings.steps):
        times = [time.perf_counter()]
        groups = await rollouts(fleet, settings, number)
        times.append(time.perf_counter())
        gap = policy_gradient(model, optimizer, groups)
        times.append(time.perf_counter())
        push = await fleet.sync_weights(
            model.state_dict(), weight_version=f"rl-toy-{number + 1}", dtype="match"
        )
        times.append(time.perf_counter())
        answers = [result for group in groups for result in group]
        rollout_s, train_s, push_s = (b - a for a, b in pairwise(times))
        history.append(
            Step(
                step=number,
                reward=sum(reward(result.text) for result in answers) / len(answers),
                logprob_gap=gap,
                weight_version=push.version,
                freeze_window_s=push.freeze_window_s,
                rollout_s=rollout_s,
                train_s=train_s,
                push_s=push_s,
            )
        )
        say(history[-1], answers[0].text)
    return history


def say(step: Step, answer: str) -> None:
    """One line per step."""
    frozen_ms = step.freeze_window_s * 1000
    print(
        f"step {step.step:2}  reward {step.reward:.3f}  frozen {frozen_ms:4.0f} ms"
        f"  rollouts {step.rollout_s:.1f} s  push {step.push_s:.1f} s  {answer[:40]!r}",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-f", "--file", type=Path, help="fleet file (default: as skyctl finds it)")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--samples", type=int, default=Settings.samples, help="per prompt")
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--history", type=Path, default=Path("rl_toy.json"), help="JSON to write")
    parser.add_argument("--plot", type=Path, help="SVG to write")
    options = parser.parse_args()
    settings = Settings(options.steps, options.samples, learning_rate=options.learning_rate)
    began = time.perf_counter()
    async with Fleet.load(options.file) as fleet:
        history = await train(fleet, settings)
    seconds = time.perf_counter() - began
    print(f"reward {history[0].reward:.3f} → {history[-1].reward:.3f} in {seconds:.0f} s")
    document = {
        "fleet": fleet.name,
        "settings": asdict(settings),
        "seconds": round(seconds, 1),
        "steps": [asdict(step) for step in history],
    }
    options.history.write_text(json.dumps(document, indent=2) + "\n")
    if options.plot:
        rewards = Panel("reward (share of vowels)", [step.reward for step in history])
        windows_ms = [1000 * step.freeze_window_s for step in history]
        frozen = Panel("freeze window per push (ms)", windows_ms, bars=True)
        options.plot.write_text(plot(rewards, frozen))


if __name__ == "__main__":
    asyncio.run(main())

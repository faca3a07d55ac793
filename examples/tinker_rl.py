"""Reinforcement learning through the Tinker API: the reward is the share of vowels in an answer.

    skyctl up                                   # fleet.yaml has `lora:` and `tinker:`
    eval "$(skyctl urls --format tinker)"
    python examples/tinker_rl.py org/tiny --plot reward.svg     # the `tinker: base_model`

Each step samples with the weights of the step before. `--rank 0` trains all parameters, which the
fleet file has to offer (`tinker: {full_parameters: true}`): then each step is a push.
"""

import argparse
import statistics
import time
from pathlib import Path

import tinker
from plots import Panel, plot
from tinker import types

PROMPTS = ("The fleet", "Every server", "Morning light", "Please describe")


def reward(text: str) -> float:
    """The share of vowels among the text's characters, 0..1."""
    return sum(character in "aeiou" for character in text) / max(1, len(text))


def datum(
    prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float
) -> types.Datum:
    """One answer; the prompt's tokens have no advantage."""
    before = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": prompt[1:] + tokens,
            "logprobs": before + logprobs,
            "advantages": before + [advantage] * len(tokens),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base_model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--samples", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--plot", type=Path, help="SVG to write")
    options = parser.parse_args()
    rewards = []
    with tinker.ServiceClient() as service:
        make = service.create_lora_training_client
        trainer = make(base_model=options.base_model, rank=options.rank, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        for step in range(options.steps):
            began = time.perf_counter()
            sampler = trainer.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(
                max_tokens=options.tokens, temperature=1.0, seed=step, stop=[]
            )
            prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
            asked = [
                sampler.sample(types.ModelInput.from_ints(prompt), options.samples, params)
                for prompt in prompts
            ]
            data, seen = [], []
            for prompt, future in zip(prompts, asked, strict=True):
                answers = future.result().sequences
                scores = [reward(tokenizer.decode(answer.tokens)) for answer in answers]
                mean, spread = statistics.fmean(scores), statistics.pstdev(scores) + 1e-6
                data += [
                    datum(prompt, list(a.tokens), list(a.logprobs or ()), (score - mean) / spread)
                    for a, score in zip(answers, scores, strict=True)
                ]
                seen += scores
            sampled_s = time.perf_counter() - began
            forward = trainer.forward_backward(data, "importance_sampling")
            optim = trainer.optim_step(
                types.AdamParams(learning_rate=options.learning_rate, grad_clip_norm=1.0)
            )
            forward.result()
            optim.result()
            rewards.append(statistics.fmean(seen))
            print(
                f"step {step:2}  reward {rewards[-1]:.3f}  sampled in {sampled_s:.1f} s, trained "
                f"in {time.perf_counter() - began - sampled_s:.1f} s",
                flush=True,
            )
    print(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
    if options.plot:
        options.plot.write_text(plot(Panel("reward (share of vowels)", rewards)))


if __name__ == "__main__":
    main()

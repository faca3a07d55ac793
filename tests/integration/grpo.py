"""A GRPO trainer of TRL as its documentation has it, for a fleet behind one URL. Imports TRL."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from tests.integration.files_backend import FilesTrainer, FilesTrainerInit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of versions of vLLM that it does not know
    from trl.generation.vllm_client import VLLMClient

GENERATIONS, TOKENS = 8, 12


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class Rollouts:
    """TRL's `rollout_func`: after each step the servers get the weights, then they generate."""

    def __init__(self, url: str, checkpoint: Path) -> None:
        self.labels: list[str] = []
        self._client = VLLMClient(base_url=url)
        self._sender = FilesTrainer.trainer_init(
            FilesTrainerInit(rank=0), client=HTTPVLLMWeightSyncClient(url)
        )
        self._checkpoint = checkpoint
        self._names = set(load_file(checkpoint / "model.safetensors"))

    def push(self, trainer: Any) -> None:
        """The trainer's weights into the fleet; its checkpoint has them as well."""
        label = f"grpo-{trainer.state.global_step}"
        if self.labels[-1:] == [label]:
            return
        tensors = {
            name: tensor.detach().clone()
            for name, tensor in trainer.model.state_dict().items()
            if name in self._names
        }
        assert tensors.keys() == self._names
        save_file(tensors, self._checkpoint / "model.safetensors", {"format": "pt"})
        self._sender.send(label, self._checkpoint)
        self.labels.append(label)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.push(trainer)
        ids = trainer.processing_class(prompts)["input_ids"]
        answers = self._client.generate(ids, max_tokens=TOKENS, temperature=1.0)
        return {
            "prompt_ids": answers["prompt_ids"],
            "completion_ids": answers["completion_ids"],
            "logprobs": [[token[0] for token in tokens] for tokens in answers["logprobs"]],
        }


def train(url: str, checkpoint: Path, output: Path, steps: int) -> tuple[list[float], list[str]]:
    """Train the `checkpoint` in place. Returns the reward of each step, and the labels pushed."""
    rollouts = Rollouts(url, checkpoint)
    trainer = trainer_of(checkpoint, output, steps, rollouts)
    trainer.train()
    rollouts.push(trainer)
    rewards = [float(line["reward"]) for line in trainer.state.log_history if "reward" in line]
    return rewards, rollouts.labels


def trainer_of(checkpoint: Path, output: Path, steps: int, rollout: Any) -> Any:
    """A trainer of this checkpoint's model."""
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32"),
        reward_funcs=even_tokens,
        args=GRPOConfig(
            output_dir=str(output),
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            max_steps=steps,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            beta=0.0,
            num_generations=GENERATIONS,
            per_device_train_batch_size=2 * GENERATIONS,
            max_completion_length=TOKENS,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["The fleet", "A replica", "One two", "Slow"]}),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        rollout_func=rollout,
    )

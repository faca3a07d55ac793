"""Passes of a trainer, asked for as the API asks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from skyctl.tinker import wire
from skyctl.tinker.losses import LossError
from skyctl.tinker.trainer import Trainer

LORA = {"rank": 4, "seed": 7, "train_unembed": True, "train_mlp": True, "train_attn": True}
ROWS = ([5, 300, 41, 8, 77, 260], [9, 280, 411], [100, 101, 102, 103])
RL = {"logprobs", "advantages"}


def tensor(value: Tensor, sparse: bool = False) -> Any:
    kinds = {torch.int64: wire.INT64, torch.float32: wire.FLOAT32}
    message = wire.message("Tensor")(dtype=kinds[value.dtype], shape=value.shape)
    if sparse:
        csr = value.to_sparse_csr()
        message.sparse_csr.values = csr.values().numpy().tobytes()
        message.sparse_csr.crow_indices = csr.crow_indices().numpy().tobytes()
        message.sparse_csr.col_indices = csr.col_indices().numpy().tobytes()
    else:
        message.dense = value.numpy().tobytes()
    return message


def request(
    loss: str,
    data: list[tuple[list[int], dict[str, Tensor]]],
    config: dict[str, float] | None = None,
    *,
    forward_only: bool = False,
    sparse: bool = False,
) -> bytes:
    message = wire.message("ForwardBackwardRequest")(
        model_id="m", seq_id=1, loss_fn=loss, loss_fn_config=config, forward_only=forward_only
    )
    for tokens, inputs in data:
        datum = message.data.add()
        chunk = torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()
        datum.model_input.add().encoded_text.tokens = chunk
        for name, value in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(tensor(value, sparse and value.dim() == 2))
    return bytes(message.SerializeToString())


def outcome(trainer: Trainer, model: str, body: bytes) -> bytes:
    """The answer to a single request."""
    [[answer]], more = trainer.forward_backward(model, [[body]])
    assert not more
    if isinstance(answer, LossError):
        raise answer
    return answer


def inputs_for(loss: str, count: int, generator: Any) -> dict[str, Tensor]:
    inputs = {"target_tokens": torch.randint(0, 512, (count,), generator=generator)}
    if loss == "cross_entropy":
        return {**inputs, "weights": torch.rand(count, generator=generator)}
    inputs["logprobs"] = -6 - 0.5 * torch.rand(count, generator=generator)
    inputs["advantages"] = torch.randn(count, generator=generator)
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (torch.arange(count) > 0).float()
    return inputs


def reference(
    trainer: Trainer, loss: str, data: list[tuple[list[int], dict[str, Tensor]]], config: Any
) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Loss, gradients and logprobs from merged weights, one row and one token at a time."""
    model = trainer.models["m"]
    lora = {
        name: value.detach().clone().requires_grad_() for name, value in model.parameters.items()
    }
    weights = {**trainer.base.model.state_dict(), **({} if model.config.rank else lora)}
    for name in [key[: -len(".lora_A")] for key in lora if key.endswith("lora_A")]:
        change = lora[f"{name}.lora_B"] @ lora[f"{name}.lora_A"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + 32 / model.config.rank * change
    total, all_logprobs = torch.zeros((), dtype=torch.float64), []
    for tokens, inputs in data:
        answer = functional_call(trainer.base.model, weights, (torch.tensor([tokens]),))
        distribution = torch.log_softmax(answer.logits[0].double(), -1)
        rows = []
        for place in range(len(tokens)):
            target = inputs["target_tokens"][place]
            rows.append(distribution[place][target])
        lp = torch.stack(rows)
        all_logprobs.append(lp.detach())
        total = total + by_hand(loss, lp, inputs, config)
    names = list(lora)
    gradients = torch.autograd.grad(total, [lora[name] for name in names])
    return float(total.detach()), dict(zip(names, gradients, strict=True)), all_logprobs


def by_hand(loss: str, lp: Tensor, inputs: dict[str, Tensor], config: Any) -> Tensor:
    if loss == "cross_entropy":
        return -(lp * inputs.get("weights", torch.ones(1)).double()).sum()
    q, advantage = inputs["logprobs"].double(), inputs["advantages"].double()
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    total = torch.zeros((), dtype=torch.float64)
    if loss == "gspo":
        mask = inputs["sequence_ratio_mask"].bool()
        sequence = math.exp(float((lp.detach() - q)[mask].mean()))
    for t in range(len(lp)):
        ratio = torch.exp(lp[t] - q[t])
        a = advantage[t]
        if loss == "importance_sampling":
            total = total - ratio * a
        elif loss == "cispo":
            total = total - min(max(float(ratio), low), high) * lp[t] * a
        elif loss == "dro":
            total = total - (lp[t] * a - 0.5 * config["beta"] * (lp[t] - q[t]) ** 2)
        else:
            if loss == "gspo":
                ratio = sequence * torch.exp(lp[t] - float(lp[t].detach()))
            unclipped, clipped = ratio * a, ratio.clamp(low, high) * a
            total = total - (unclipped if unclipped <= clipped else clipped)
    return total

"""The losses of `forward_backward`, per token and summed; gradients flow only through `logprobs`.

Formulas: the vendor's documentation of tinker (ppo, dro, gspo) and SkyRL 0.3.0's source
(cross_entropy, importance_sampling, ppo, cispo). Thresholds bound the ratio itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from skyctl.tinker.offers import INSTEAD

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


class LossError(ValueError):
    """The client's data cannot be trained on; the text is for that client."""


def cross_entropy(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """−weight · log p; with targets of shape (N, K) each token has K of them."""
    return -lp


def importance_sampling(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """−ratio · advantage, the ratio to the sampler's probability unclipped."""
    return -(lp - inputs["logprobs"]).exp() * inputs["advantages"]


def ppo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """−min(ratio · A, clamp(ratio) · A)."""
    return _clipped((lp - inputs["logprobs"]).exp(), inputs, config)


def cispo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """−clamp(ratio) · log p · A, the clamped ratio a constant."""
    low, high = _thresholds(inputs, config)
    ratio = (lp.detach() - inputs["logprobs"]).exp()
    return -torch.minimum(torch.maximum(ratio, low), high) * lp * inputs["advantages"]


def dro(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """−(log p · A − ½ beta (log p − log q)²)."""
    distance = lp - inputs["logprobs"]
    return -(lp * inputs["advantages"] - 0.5 * config["beta"] * distance**2)


def gspo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """ppo with one ratio per sequence: its mean over `sequence_ratio_mask`, constant except for
    each token's own gradient.
    """
    mask = (inputs["sequence_ratio_mask"] != 0).float()
    distance = (lp.detach() - inputs["logprobs"]) * mask
    sequence = (distance.sum() / mask.sum().clamp(min=1.0)).exp()
    return _clipped(sequence * (lp - lp.detach()).exp(), inputs, config)


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = _thresholds(inputs, config)
    advantages = inputs["advantages"]
    clipped = torch.minimum(torch.maximum(ratio, low), high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _thresholds(inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    """Per token if the datum has them, else the request's, else the defaults."""
    like = inputs["logprobs"]
    low, high = (
        inputs[name] if name in inputs else torch.full_like(like, config.get(name, default))
        for name, default in CLIP.items()
    )
    return low, high


_RL = ("logprobs", "advantages")
Loss = Callable[[Tensor, Inputs, Config], Tensor]
# loss -> function, inputs it needs beside target_tokens, keys of its config
LOSSES: dict[str, tuple[Loss, tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, (), ()),
    "importance_sampling": (importance_sampling, _RL, ()),
    "ppo": (ppo, _RL, tuple(CLIP)),
    "cispo": (cispo, _RL, tuple(CLIP)),
    "dro": (dro, _RL, ("beta",)),
    "gspo": (gspo, (*_RL, "sequence_ratio_mask"), tuple(CLIP)),
}


def check(name: str, config: Mapping[str, Any]) -> None:
    """Refuse an unknown loss, an unknown key of its config, or a value that is not a number.

    Raises:
        LossError: with a text for the client.
    """
    if name not in LOSSES:
        advice = f"; {INSTEAD}" if name == "stable_reinforce" else ""
        offered = ", ".join(LOSSES)
        raise LossError(f"loss_fn {name!r} is not offered here; offered: {offered}{advice}")
    keys = LOSSES[name][2]
    for key, value in config.items():
        if key not in keys:
            offered = ", ".join(keys) or "none"
            raise LossError(f"loss_fn_config of {name} has no key {key!r} (it has: {offered})")
        if not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
            raise LossError(f"loss_fn_config {key} of {name} must be a finite number")
    if name == "dro" and "beta" not in config:
        raise LossError("loss_fn dro needs loss_fn_config={'beta': …}; it has no default")


def check_inputs(name: str, inputs: Inputs, length: int) -> None:
    """Refuse inputs that are missing, unknown, or do not fit a datum of `length` tokens.

    Raises:
        LossError: with a text for the client.
    """
    needed = ("target_tokens", *LOSSES[name][1])
    allowed = {*needed, "weights", *LOSSES[name][2]} - {"beta"}
    for key in needed:
        if key not in inputs:
            raise LossError(f"loss_fn {name} needs loss_fn_inputs[{key!r}]")
    for key in inputs:
        if key not in allowed:
            raise LossError(
                f"loss_fn {name} has no input {key!r} (it has: {', '.join(sorted(allowed))})"
            )
    shape = inputs["target_tokens"].shape
    if shape[:1] != (length,) or len(shape) > 2 or (len(shape) == 2 and name != "cross_entropy"):
        expected = f"({length},)" + (f" or ({length}, K)" if name == "cross_entropy" else "")
        raise LossError(f"target_tokens of {name} has shape {tuple(shape)}, not {expected}")
    for key, value in inputs.items():
        if value.shape != shape:
            raise LossError(
                f"{key} has shape {tuple(value.shape)}, target_tokens {tuple(shape)}: "
                "both must be the same"
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise LossError(f"{key} has values that are not finite")


def elementwise(name: str, logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """The loss of each token of a datum, which is their sum. `logprobs` (N,) or (N, K) are those of
    its target tokens.
    """
    per_token = LOSSES[name][0](logprobs, inputs, config)
    return per_token * inputs["weights"] if "weights" in inputs else per_token


def counted(inputs: Inputs) -> Tensor:
    """Which tokens (N,) of a datum are a response: not those of weight 0, nor a prompt's in
    reinforcement learning, which have neither a probability nor an advantage.
    """
    if "weights" in inputs:
        counts = inputs["weights"] != 0
    elif "advantages" in inputs:
        counts = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    else:
        counts = torch.ones_like(inputs["target_tokens"], dtype=torch.bool)
    return counts if counts.dim() == 1 else counts.any(-1)

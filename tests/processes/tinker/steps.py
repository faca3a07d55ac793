"""A training step by the tinker SDK."""

from __future__ import annotations

from typing import Any

from tinker import types

TOKENS = [70, 301, 412, 9, 33, 208, 77, 160]
ADAM = types.AdamParams(learning_rate=1e-2)


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def step(trainer: Any, data: list[Any] | None = None) -> float:
    """One training step, both requests under way at once; the loss before it."""
    forward = trainer.forward_backward(data or [datum()], "cross_entropy")
    optim = trainer.optim_step(ADAM)
    assert optim.result().metrics["grad_norm"] >= 0
    return float(forward.result().metrics["loss:sum"])

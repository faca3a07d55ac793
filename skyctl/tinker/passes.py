"""Forward and backward passes over the data of several requests of one model.

Requests are computed in units: one each, or several together, which rounds differently. So whoever
repeats them gives the same units. A unit is all or nothing; one of several requests that cannot be
computed is computed again, request by request, so that only the wrong ones fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyctl.tinker import losses, wire
from skyctl.tinker.adapter import Base, Parameters
from skyctl.tinker.losses import LossError
from skyctl.tinker.tensors import array_of, output_message, tensor_of

Answer = bytes | LossError
"""What a request gets: a serialized ForwardBackwardOutput, or why there is none."""


@dataclass
class Model:
    """One training run's parameters and gradients."""

    parameters: Parameters
    """The trained parameters, float32."""
    gradients: list[Tensor] | None = None
    """Summed since the last optimizer step, None before any."""
    tokens: int = 0
    """Tokens processed for those gradients."""
    seconds: float = 0.0
    """Seconds that they took."""


@dataclass(frozen=True)
class Datum:
    """Tokens (N,) int64, and the inputs of the loss: targets int64, everything else float32."""

    tokens: Tensor
    inputs: dict[str, Tensor]


@dataclass
class Unit:
    """What is computed together."""

    bodies: list[bytes]
    """Its requests as they came."""
    backward: bool = True
    """Whether gradients are computed."""
    losses: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Name and configuration of each request's loss."""
    data: list[tuple[int, Datum]] = field(default_factory=list)
    """The requests' data in order, each with the index of its request."""
    batches: Iterator[list[int]] = field(default_factory=lambda: iter(()))
    """Indices of data that one pass takes, for the passes that are left to do."""
    sums: list[Tensor] = field(default_factory=list)
    """The gradient so far."""
    results: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    """The log-probabilities and the loss of each datum that is done."""


class Pass:
    """The passes of these units of serialized ForwardBackwardRequests, a slice of time at once."""

    def __init__(
        self, base: Base, model: Model, units: Sequence[Sequence[bytes]], batch_tokens: int
    ) -> None:
        self._base = base
        self._model = model
        self._batch_tokens = batch_tokens
        self._units = [list(unit) for unit in units]
        self._unit: Unit | None = None

    @property
    def over(self) -> bool:
        """Whether every unit is done."""
        return not self._units

    def run(self, slice_s: float) -> list[list[Answer]]:
        """Compute until this much time is over, at least one batch; returns the units that ended.

        A unit that failed has added no gradient.
        """
        ended: list[list[Answer]] = []
        began = time.perf_counter()
        while self._units:
            try:
                unit = self._unit = self._unit or self._begun(self._units[0])
                for batch in unit.batches:
                    self._compute(unit, batch)
                    if time.perf_counter() - began > slice_s:
                        break
                if len(unit.results) < len(unit.data):
                    break
                ended.append(self._answers(unit))
                del self._units[0]
            except LossError as error:
                failed = self._units.pop(0)
                if len(failed) > 1:
                    self._units[:0] = [[body] for body in failed]
                else:
                    ended.append([error])
            self._unit = None
        return ended

    def _begun(self, bodies: list[bytes]) -> Unit:
        unit = Unit(bodies)
        for place, body in enumerate(bodies):
            request = wire.message("ForwardBackwardRequest").FromString(body)
            config: dict[str, Any] = dict(request.loss_fn_config)
            for key, value in request.loss_fn_config_v2.items():
                config[key] = value.text if value.WhichOneof("one") == "text" else value.number
            losses.check(request.loss_fn, config)
            if not request.data:
                raise LossError("the request has no data")
            unit.losses.append((request.loss_fn, config))
            unit.data += [(place, self._datum(datum, request.loss_fn)) for datum in request.data]
            unit.backward = not request.forward_only
        unit.batches = self._batches([datum for _, datum in unit.data])
        return unit

    def _compute(self, unit: Unit, batch: list[int]) -> None:
        began, data = time.perf_counter(), [unit.data[index] for index in batch]
        parameters = self._model.parameters
        with self._base.using(parameters), torch.set_grad_enabled(unit.backward):
            picked = _logprobs(self._base, [datum for _, datum in data])
            each = torch.stack(
                [
                    losses.loss_of(unit.losses[place][0], lp, datum.inputs, unit.losses[place][1])
                    for lp, (place, datum) in zip(picked, data, strict=True)
                ]
            )
            values = each.detach().tolist()
            for value in values:
                if not np.isfinite(value):
                    raise LossError(f"the loss is {value}: no gradient was added")
            if unit.backward:
                gradients = torch.autograd.grad(
                    each.sum(), list(parameters.values()), materialize_grads=True
                )
                unit.sums = added(unit.sums, gradients)
                del gradients  # a whole model's must not exist twice
                self._model.seconds += time.perf_counter() - began
        for index, lp, value in zip(batch, picked, values, strict=True):
            unit.results[index] = lp.detach().cpu(), value

    def _answers(self, unit: Unit) -> list[Answer]:
        if unit.backward:
            self._model.gradients = added(self._model.gradients, unit.sums)
            self._model.tokens += sum(len(datum.tokens) for _, datum in unit.data)
        answers: list[Answer] = []
        for place in range(len(unit.bodies)):
            mine = [unit.results[i] for i, (owner, _) in enumerate(unit.data) if owner == place]
            answers.append(output_message([lp for lp, _ in mine], sum(value for _, value in mine)))
        return answers

    def _batches(self, data: Sequence[Datum]) -> Iterator[list[int]]:
        """Rows of similar length together, the longest first: what runs out of memory does so at
        once. A row that is longer than `batch_tokens` has a pass of its own.
        """
        order = sorted(range(len(data)), key=lambda index: -len(data[index].tokens))
        batch: list[int] = []
        for index in order:
            if batch and len(data[batch[0]].tokens) * (len(batch) + 1) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def _datum(self, datum: Any, loss: str) -> Datum:
        chunks = []
        for chunk in datum.model_input:
            if chunk.WhichOneof("one") != "encoded_text":
                raise LossError("images and audio are not offered here: text tokens only")
            chunks.append(array_of(chunk.encoded_text.tokens, wire.INT32))
        tokens = torch.from_numpy(np.concatenate(chunks or [np.zeros(0)]).astype(np.int64))
        check_tokens(self._base, tokens, "model_input")
        inputs = {name: tensor_of(name, value) for name, value in datum.loss_fn_inputs.items()}
        losses.check_inputs(loss, inputs, len(tokens))
        targets = inputs["target_tokens"]
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < (
            self._base.vocabulary
        ):
            raise LossError(f"target_tokens must be from 0 to {self._base.vocabulary - 1}")
        return Datum(tokens, {name: value.to(self._base.device) for name, value in inputs.items()})


def check_tokens(base: Base, tokens: Tensor, name: str) -> None:
    """Raise LossError for tokens that the model does not take."""
    if not 1 <= len(tokens) <= base.context:
        raise LossError(f"{name} has {len(tokens)} tokens: 1 to {base.context} are taken")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < base.vocabulary:
        raise LossError(f"{name} has tokens outside 0 to {base.vocabulary - 1}")


def added(sums: list[Tensor] | None, more: Sequence[Tensor]) -> list[Tensor]:
    """Sums with more added in place: a whole model's are as large as the model."""
    if not sums:
        return list(more)
    for total, addend in zip(sums, more, strict=True):
        total += addend
    return sums


def _logprobs(base: Base, batch: Sequence[Datum]) -> list[Tensor]:
    """log p of each datum's targets, in their shape."""
    targets = [datum.inputs["target_tokens"] for datum in batch]
    two = [target if target.dim() == 2 else target[:, None] for target in targets]
    picked = base.logprobs([datum.tokens for datum in batch], two)
    return [lp.view(t.shape) for lp, t in zip(picked, targets, strict=True)]

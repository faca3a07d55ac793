"""Forward and backward passes over the data of several requests of one model.

Requests are computed in units: one each, or several together, which rounds differently. So whoever
repeats them gives the same units. A unit is all or nothing; one of several requests that cannot be
computed is computed again, request by request, so that only the wrong ones fail.

Of several ranks each computes its share of a unit's data. They exchange results, and whether one
failed, after every slice of time; gradients are summed once, by the optimizer step. Where they
compute together, with a sharded model, they do so after every pass, and make equally many.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyctl.tinker import losses, wire, worker_messages
from skyctl.tinker.adapter import Base
from skyctl.tinker.losses import LossError
from skyctl.tinker.low_rank import Parameters
from skyctl.tinker.ranks import OutOfStep, Ranks
from skyctl.tinker.sharded import Shards
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


@dataclass(frozen=True)
class Result:
    """Of one datum, on the CPU."""

    logprobs: Tensor
    """log p of its targets, in their shape."""
    losses: Tensor
    """The loss of each, which their weights have scaled."""
    loss: float
    """Their sum."""
    entropy: float
    """Mean of the distribution's entropy at the tokens of the response; 0 if not computed."""

    def pack(self) -> bytes:
        """As bytes; the shape of its targets says how many."""
        numbers = np.array([self.loss, self.entropy], np.float32)
        tensors = [value.numpy().tobytes() for value in (self.logprobs, self.losses)]
        return b"".join([*tensors, numbers.tobytes()])

    @classmethod
    def unpack(cls, values: Tensor, shape: torch.Size) -> Result:
        """Inverse of `pack`."""
        logprobs, losses, numbers = values.split([shape.numel(), shape.numel(), 2])
        return cls(logprobs.view(shape), losses.view(shape), *numbers.tolist())


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
    shares: list[list[int]] = field(default_factory=list)
    """Indices of the data that each rank computes, the longest first."""
    batches: Iterator[list[int]] = field(default_factory=lambda: iter(()))
    """Indices of data that one pass takes, for the passes that are left to do."""
    sums: list[Tensor] = field(default_factory=list)
    """The gradient of this rank's share so far."""
    results: dict[int, Result] = field(default_factory=dict)
    """Those of each datum that is done."""


class Pass:
    """The passes of these units of serialized ForwardBackwardRequests, a slice of time at once."""

    def __init__(
        self,
        base: Base,
        model: Model,
        units: Sequence[Sequence[bytes]],
        batch_tokens: int,
        ranks: Ranks,
    ) -> None:
        self._base = base
        self._model = model
        self._batch_tokens = batch_tokens
        self._ranks = ranks
        self._units = [list(unit) for unit in units]
        self._unit: Unit | None = None
        self._together = base.together(model.parameters)

    @property
    def over(self) -> bool:
        """Whether every unit is done."""
        return not self._units

    def run(self, slice_s: float) -> list[list[Answer]]:
        """Compute until this much time is over, at least one batch; returns the units that ended.

        A unit that failed has added no gradient.
        """
        ended: list[list[Answer]] = []
        until = time.perf_counter() + slice_s
        while self._units:
            try:
                unit = self._unit = self._unit or self._begun(self._units[0])
                done, late = self._advance(unit, until)
                if not done and not late:
                    continue
                if not done:
                    break
                ended.append(self._answers(unit))
                del self._units[0]
            except LossError as error:
                failed = self._units.pop(0)
                if len(failed) > 1:
                    self._units[:0] = [[body] for body in failed]
                else:
                    ended.append([error])
                late = False
            self._unit = None
            if late:
                break
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
        lengths = [len(datum.tokens) for _, datum in unit.data]
        unit.shares = self._ranks.deal(lengths)
        batches = [list(self._batches(share, lengths)) for share in unit.shares]
        own = batches[self._ranks.rank]
        if self._together:
            own += [[]] * (max(map(len, batches)) - len(own))
            if isinstance(self._model.parameters, Shards):
                self._model.parameters.module.drop_gradients()  # of a unit that failed
        unit.batches = iter(own)
        return unit

    def _advance(self, unit: Unit, until: float) -> tuple[bool, bool]:
        """Compute this rank's share until then. Whether all of the unit is done, and whether it is
        late, by the clock of rank 0.

        Raises:
            LossError: the data of a rank cannot be trained on. RuntimeError: a rank failed.
            OutOfStep: this one failed, and others compute with it.
        """
        failure: Exception | None = None
        began = time.perf_counter()
        try:
            for batch in unit.batches:
                self._compute(unit, batch)
                if self._together or time.perf_counter() > until:
                    break
        except OutOfStep:
            raise
        except Exception as error:
            failure = error
        reports = self._exchanged(unit, failure, late=time.perf_counter() > until)
        if unit.backward:
            self._model.seconds += time.perf_counter() - began
        for rank, report in enumerate(reports):
            if "error" in report:  # every rank raises the same
                if failure is not None and rank == self._ranks.rank:
                    raise failure
                raise (LossError if report["user"] else RuntimeError)(report["error"])
        return all(report["done"] for report in reports), reports[0]["late"]

    def _exchanged(
        self, unit: Unit, failure: Exception | None, *, late: bool
    ) -> list[dict[str, Any]]:
        """What every rank reports of its share. The unit gets results that are done."""
        own = unit.shares[self._ranks.rank]
        done = failure is None and all(index in unit.results for index in own)
        report: dict[str, Any] = {"done": done, "late": late}
        if failure is not None:
            user = isinstance(failure, LossError)
            report |= {"error": str(failure) if user else repr(failure), "user": user}
        content = b"".join(unit.results[index].pack() for index in own) if done else b""
        reports = []
        messages = self._ranks.exchange(worker_messages.pack(report, content))
        for share, message in zip(unit.shares, messages, strict=True):
            read = worker_messages.read(io.BytesIO(message))
            assert read is not None
            reports.append(read[0])
            if read[0]["done"] and share is not own:
                self._unpack(unit, share, read[1])
        return reports

    def _unpack(self, unit: Unit, share: list[int], content: bytes) -> None:
        shapes = [unit.data[index][1].inputs["target_tokens"].shape for index in share]
        values = torch.from_numpy(np.frombuffer(content, np.float32).copy())
        parts = values.split([2 * shape.numel() + 2 for shape in shapes])
        for index, part, shape in zip(share, parts, shapes, strict=True):
            unit.results[index] = Result.unpack(part, shape)

    def _compute(self, unit: Unit, batch: list[int]) -> None:
        """One pass; of an empty batch, one that adds nothing."""
        data = [unit.data[index] for index in batch]
        rewarded = any("advantages" in datum.inputs for _, datum in data)
        rows = [datum for _, datum in data] or [self._nothing()]
        with (
            self._base.using(self._model.parameters),
            torch.set_grad_enabled(unit.backward),
        ):
            picked, entropies = _logprobs(self._base, rows, rewarded)
            each = [
                losses.elementwise(unit.losses[place][0], lp, datum.inputs, unit.losses[place][1])
                for lp, (place, datum) in zip(picked, data, strict=False)
            ]
            sums = torch.stack([values.sum() for values in each or [0.0 * picked[0]]])
            if unit.backward:
                self._differentiate(unit, sums.sum())
            for value in (values := sums.detach().tolist()):
                if not np.isfinite(value):
                    raise LossError(f"the loss is {value}: no gradient was added")
        for index, lp, by_token, value, entropy in zip(
            batch, picked, each, values, entropies, strict=bool(batch)
        ):
            logprobs, by_token = lp.detach().float().cpu(), by_token.detach().float().cpu()
            unit.results[index] = Result(logprobs, by_token, value, entropy)

    def _nothing(self) -> Datum:
        token = torch.zeros(1, dtype=torch.int64)
        return Datum(token, {"target_tokens": token.to(self._base.device)})

    def _differentiate(self, unit: Unit, loss: Tensor) -> None:
        parameters = self._model.parameters
        if isinstance(parameters, Shards):
            loss.backward()  # adds to the module's
            return
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        unit.sums = added(unit.sums, gradients)

    def _answers(self, unit: Unit) -> list[Answer]:
        if unit.backward:
            if isinstance(self._model.parameters, Shards):
                unit.sums = self._model.parameters.module.take_gradients()
            if unit.sums:
                self._model.gradients = added(self._model.gradients, unit.sums)
            self._model.tokens += sum(len(datum.tokens) for _, datum in unit.data)
        answers: list[Answer] = []
        for place in range(len(unit.bodies)):
            mine = [index for index, (owner, _) in enumerate(unit.data) if owner == place]
            results = [unit.results[index] for index in mine]
            lengths = [int(losses.counted(unit.data[index][1].inputs).sum()) for index in mine]
            metrics = {
                "loss:sum": sum(result.loss for result in results),
                "response_length:mean": sum(lengths) / len(mine),
            }
            if losses.LOSSES[unit.losses[place][0]][1]:
                metrics["policy_entropy:mean"] = sum(r.entropy for r in results) / len(mine)
            tensors = [{"logprobs": r.logprobs, "elementwise_loss": r.losses} for r in results]
            answers.append(output_message(tensors, metrics))
        return answers

    def _batches(self, order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
        """Rows of similar length together, the longest first: what runs out of memory does so at
        once. A row that is longer than `batch_tokens` has a pass of its own.
        """
        batch: list[int] = []
        for index in order:
            if batch and lengths[batch[0]] * (len(batch) + 1) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
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


def _logprobs(
    base: Base, batch: Sequence[Datum], entropy: bool
) -> tuple[list[Tensor], list[float]]:
    """log p of each datum's targets, in their shape; its mean entropy if wanted, else 0."""
    targets = [datum.inputs["target_tokens"] for datum in batch]
    two = [target if target.dim() == 2 else target[:, None] for target in targets]
    picked, entropies = base.logprobs([datum.tokens for datum in batch], two, entropy=entropy)
    logprobs = [lp.view(t.shape) for lp, t in zip(picked, targets, strict=True)]
    if not entropy:
        return logprobs, [0.0] * len(batch)
    means = []
    for datum, values in zip(batch, entropies, strict=True):
        response = losses.counted(datum.inputs)
        means.append((values * response).sum() / response.sum().clamp(min=1))
    return logprobs, torch.stack(means).tolist()

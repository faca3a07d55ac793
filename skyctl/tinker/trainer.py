"""The models of a training worker: their gradients, optimizers and files, over one base.

Every operation is deterministic and all or nothing: one that fails leaves the model as it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyctl.tinker import files, losses, wire
from skyctl.tinker.adapter import Base, LoraConfig, Parameters, peft_config
from skyctl.tinker.losses import LossError
from skyctl.tinker.tensors import array_of, output_message, tensor_of


@dataclass
class Model:
    """One training run."""

    config: LoraConfig
    """How it is trained."""
    parameters: Parameters
    """The trained parameters, float32."""
    optimizer: torch.optim.AdamW
    """Their optimizer."""
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


class Trainer:
    """All models of one worker. `batch_tokens` bounds rows × longest row of one forward pass."""

    def __init__(self, base: Base, *, name: str, batch_tokens: int = 4096) -> None:
        self.base = base
        self.name = name
        self.batch_tokens = batch_tokens
        self.models: dict[str, Model] = {}
        self._samplers: dict[str, Parameters] = {}

    def create(self, model: str, config: Mapping[str, Any]) -> None:
        """Create a model, the same for the same config."""
        lora = LoraConfig(**config)
        self.close(model)  # one that a failure left here; two may not fit
        self.models[model] = _model(lora, self.base.new_parameters(lora))

    def open(self, model: str, directory: Path, *, optimizer: bool) -> None:
        """Open a model from a checkpoint; without its `optimizer` state, with a fresh one.

        Raises:
            LossError: it has another base, or no optimizer state.
            DamagedCheckpoint: its files are not what was written.
        """
        config, state = self._checked(directory, optimizer=optimizer)
        self.close(model)  # two may not fit
        parameters = self.base.read(directory, config)
        opened = _model(config, parameters)
        if state is not None:
            _restore(opened, load_file(state), self.base.device)
        self.models[model] = opened

    def _checked(self, directory: Path, *, optimizer: bool) -> tuple[LoraConfig, Path | None]:
        """How a checkpoint was trained, and the path of its optimizer's state, if wanted."""
        meta = files.read_meta(directory)
        if meta["base"] != self.name:
            raise LossError(f"the checkpoint is of base model {meta['base']}, not {self.name}")
        state = files.optimizer_of(directory, meta) if optimizer else None
        if optimizer and state is None:
            raise LossError("the checkpoint has no optimizer state: it was saved for a sampler")
        files.check(directory, meta, optimizer=optimizer)
        return LoraConfig(**meta["lora"]), state

    def close(self, model: str) -> None:
        """Drop a model."""
        self.models.pop(model, None)

    def save(self, model: str, directory: Path, *, optimizer: bool) -> int:
        """Write a checkpoint; returns its size in bytes. A whole model is in float32 if its
        optimizer's state is saved with it, else in the base's dtype.
        """
        trained = self.models[model]

        def write(beside: Path) -> None:
            self.base.write(
                trained.parameters, beside, torch.float32 if optimizer else self.base.dtype
            )
            if trained.config.rank:
                text = json.dumps(peft_config(trained.parameters, self.name), indent=1)
                (beside / files.ADAPTER_CONFIG).write_text(text)
            if optimizer:
                save_file(_optimizer_tensors(trained), beside / files.OPTIMIZER)

        meta = {"base": self.name, "lora": asdict(trained.config)}
        return files.write_directory(directory, write, meta)

    def zero_gradients(self, model: str) -> None:
        """Drop what was accumulated since the last step."""
        self.models[model].gradients = None

    def forward_backward(self, model: str, body: bytes) -> bytes:
        """A serialized ForwardBackwardOutput for a serialized ForwardBackwardRequest.

        Raises:
            LossError: it cannot be computed; no gradient was added.
        """
        began = time.perf_counter()
        request = wire.message("ForwardBackwardRequest").FromString(body)
        config: dict[str, Any] = dict(request.loss_fn_config)
        for key, value in request.loss_fn_config_v2.items():
            config[key] = value.text if value.WhichOneof("one") == "text" else value.number
        losses.check(request.loss_fn, config)
        if not request.data:
            raise LossError("the request has no data")
        data = [self._datum(datum, request.loss_fn) for datum in request.data]
        trained, backward = self.models[model], not request.forward_only
        parameters = list(trained.parameters.values())
        sums: list[Tensor] = []
        total, outputs = 0.0, []
        for batch in self._batches(data):
            with self.base.using(trained.parameters), torch.set_grad_enabled(backward):
                picked = _logprobs(self.base, batch)
                each = [
                    losses.loss_of(request.loss_fn, lp, datum.inputs, config)
                    for lp, datum in zip(picked, batch, strict=True)
                ]
                loss = torch.stack(each).sum()
                if not bool(torch.isfinite(loss)):
                    raise LossError(f"the loss is {loss.item()}: no gradient was added")
                if backward:
                    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
                    sums = _added(sums, gradients)
                    del gradients  # a whole model's must not exist twice
            total += float(loss.detach())
            outputs += [lp.detach().cpu() for lp in picked]
        if backward:
            trained.gradients = _added(trained.gradients, sums)
            trained.tokens += sum(len(datum.tokens) for datum in data)
            trained.seconds += time.perf_counter() - began
        return output_message(outputs, total)

    def optim_step(self, model: str, params: Mapping[str, float]) -> dict[str, float]:
        """One AdamW step over the gradients since the last one, which are then dropped; returns its
        metrics.

        Raises:
            LossError: the gradients are not finite, or a parameter makes no sense; the gradients
                were dropped.
        """
        trained = self.models[model]
        gradients = trained.gradients or [torch.zeros_like(p) for p in trained.parameters.values()]
        trained.gradients = None  # also on failure: a rebuilt model has none either
        speed = {"tokens_per_s": trained.tokens / trained.seconds} if trained.tokens else {}
        trained.tokens, trained.seconds = 0, 0.0
        group = _adam(params)
        clip = float(params.get("grad_clip_norm", 0.0))
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        )
        if not bool(torch.isfinite(norm)):
            raise LossError("the gradients are not finite: they were dropped, nothing was changed")
        if clip > 0 and float(norm) > clip:
            for gradient in gradients:
                gradient *= clip / norm
        trained.optimizer.param_groups[0].update(group)
        for parameter, gradient in zip(trained.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": float(norm), "learning_rate": group["lr"], **speed}

    def prompt_logprobs(self, request: Mapping[str, Any], body: bytes) -> bytes:
        """A serialized SampleResponse with what it says about the prompt, its N `tokens`.

        float32 logprobs of each token if `wanted`, NaN where there is none; with `top` the most
        likely ids and their logprobs, (N, top); with `body`, a serialized Tensor of int64 (N−1, K),
        those of these tokens, 0 for −1. `directory` holds the sampler's weights, None is the base;
        only the `last` rows.

        Raises:
            LossError: the tokens or the targets make no sense.
        """
        top, last = request["top"], request["last"]
        row = torch.tensor(request["tokens"], dtype=torch.int64)
        self._check_tokens(row, "prompt")
        with torch.no_grad(), self.base.using(self._sampler(request["directory"])):
            rows = torch.log_softmax(self.base.logits([row])[0, :-1], dim=-1).cpu()
        first = 0 if last is None else max(len(row) - 1 - last, 0)
        answer = wire.message("SampleResponse")()
        if request["wanted"]:
            scored = torch.full((len(row),), float("nan"))
            scored[1 + first :] = rows.gather(1, row[1:, None])[first:, 0]
            answer.prompt_logprobs = scored.numpy().tobytes()
        if top:
            best = rows.topk(min(top, rows.shape[-1]), dim=-1)
            ids = torch.zeros(len(row), top, dtype=torch.int32)
            values = torch.full((len(row), top), -99999.0)
            ids[1 + first :, : best.indices.shape[1]] = best.indices[first:].to(torch.int32)
            values[1 + first :, : best.values.shape[1]] = best.values[first:]
            likely = answer.topk_prompt_logprobs
            likely.token_ids, likely.logprobs = ids.numpy().tobytes(), values.numpy().tobytes()
            likely.k, likely.length = top, len(row)
        if body:
            targets = tensor_of("target_tokens", wire.message("Tensor").FromString(body))
            wrong = targets.dim() != 2 or targets.shape[0] != len(row) - 1
            if wrong or (targets.numel() and int(targets.max()) >= self.base.vocabulary):
                raise LossError("target_prompt_logprobs must be (prompt length − 1, K) token ids")
            picked = rows.gather(1, targets.clamp(min=0)).masked_fill(targets < 0, 0.0)
            scores = answer.target_prompt_logprobs
            scores.dense, scores.dtype = picked.numpy().tobytes(), wire.FLOAT32
            scores.shape.extend(targets.shape)
        return bytes(answer.SerializeToString())

    def _sampler(self, directory: str | None) -> Parameters | None:
        """A sampler's parameters; the latest few adapters, or the latest model, are cached."""
        if directory is None:
            return None
        if directory not in self._samplers:
            config, _ = self._checked(Path(directory), optimizer=False)
            while len(self._samplers) >= (4 if config.rank else 1):
                del self._samplers[next(iter(self._samplers))]
            self._samplers[directory] = self.base.read(Path(directory), config)
        return self._samplers[directory]

    def _datum(self, datum: Any, loss: str) -> Datum:
        chunks = []
        for chunk in datum.model_input:
            if chunk.WhichOneof("one") != "encoded_text":
                raise LossError("images and audio are not offered here: text tokens only")
            chunks.append(array_of(chunk.encoded_text.tokens, wire.INT32))
        tokens = torch.from_numpy(np.concatenate(chunks or [np.zeros(0)]).astype(np.int64))
        self._check_tokens(tokens, "model_input")
        inputs = {name: tensor_of(name, value) for name, value in datum.loss_fn_inputs.items()}
        losses.check_inputs(loss, inputs, len(tokens))
        targets = inputs["target_tokens"]
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < (
            self.base.vocabulary
        ):
            raise LossError(f"target_tokens must be from 0 to {self.base.vocabulary - 1}")
        return Datum(tokens, {name: value.to(self.base.device) for name, value in inputs.items()})

    def _check_tokens(self, tokens: Tensor, name: str) -> None:
        if not 1 <= len(tokens) <= self.base.context:
            raise LossError(f"{name} has {len(tokens)} tokens: 1 to {self.base.context} are taken")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.base.vocabulary:
            raise LossError(f"{name} has tokens outside 0 to {self.base.vocabulary - 1}")

    def _batches(self, data: Sequence[Datum]) -> list[list[Datum]]:
        batches: list[list[Datum]] = []
        longest = 0
        for datum in data:
            longest = max(longest, len(datum.tokens))
            if batches and longest * (len(batches[-1]) + 1) <= self.batch_tokens:
                batches[-1].append(datum)
            else:
                batches.append([datum])
                longest = len(datum.tokens)
        return batches


def _added(sums: list[Tensor] | None, more: Sequence[Tensor]) -> list[Tensor]:
    """Sums with more added in place: a whole model's are as large as the model."""
    if not sums:
        return list(more)
    for total, addend in zip(sums, more, strict=True):
        total += addend
    return sums


def _model(config: LoraConfig, parameters: Parameters) -> Model:
    for value in parameters.values():
        value.requires_grad_(True)
    on_gpu = next(iter(parameters.values())).is_cuda
    # on a CPU one tensor after the other: the same bits whatever other tensors there are
    optimizer = torch.optim.AdamW(parameters.values(), foreach=False, fused=on_gpu)
    return Model(config, parameters, optimizer)


def _adam(params: Mapping[str, float]) -> dict[str, Any]:
    defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    defaults |= {"weight_decay": 0.0, "grad_clip_norm": 0.0}
    value = {name: float(params.get(name, default)) for name, default in defaults.items()}
    # without it, a gradient of zero makes a parameter NaN: 0 / (sqrt(0) + eps)
    least = {"eps": float(np.finfo(np.float32).tiny)}
    for name, number in value.items():
        too_large = name.startswith("beta") and number >= 1
        if not np.isfinite(number) or number < least.get(name, 0) or too_large:
            raise LossError(f"adam_params {name}={number} makes no sense")
    return {
        "lr": value["learning_rate"],
        "betas": (value["beta1"], value["beta2"]),
        "eps": value["eps"],
        "weight_decay": value["weight_decay"],
    }


def _logprobs(base: Base, batch: Sequence[Datum]) -> list[Tensor]:
    """log p of each datum's targets, in their shape."""
    logits = base.logits([datum.tokens for datum in batch])
    picked = []
    for row, datum in zip(logits, batch, strict=True):
        row = row[: len(datum.tokens)]
        targets = datum.inputs["target_tokens"]
        two = targets if targets.dim() == 2 else targets[:, None]
        lp = row.gather(1, two) - torch.logsumexp(row, dim=-1, keepdim=True)
        picked.append(lp if targets.dim() == 2 else lp[:, 0])
    return picked


def _optimizer_tensors(model: Model) -> dict[str, Tensor]:
    """Moments by parameter; none before the first step."""
    tensors = {}
    for name, parameter in model.parameters.items():
        for key, value in model.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return tensors


def _restore(model: Model, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    for place, value in tensors.items():
        key, name = place.split("/", 1)
        model.optimizer.state[model.parameters[name]][key] = value.to(device, copy=True)

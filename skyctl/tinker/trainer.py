"""The models of a training worker: their gradients, optimizers and files, over one base.

Every operation is deterministic and all or nothing: one that fails leaves the model as it was.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from skyctl.tinker import files, wire
from skyctl.tinker.adapter import Base, LoraConfig
from skyctl.tinker.losses import LossError
from skyctl.tinker.low_rank import Parameters, peft_config
from skyctl.tinker.passes import Answer, Model, Pass, check_tokens
from skyctl.tinker.sharded import Shards, stored
from skyctl.tinker.tensors import tensor_of


@dataclass
class Run(Model):
    """One training run."""

    config: LoraConfig = field(kw_only=True)
    """How it is trained."""
    optimizer: torch.optim.AdamW = field(kw_only=True)
    """The parameters' optimizer."""
    passes: Pass | None = None
    """What is being computed."""


class Trainer:
    """All models of one rank. `batch_tokens` bounds rows × longest row of one forward pass."""

    def __init__(self, base: Base, *, name: str, batch_tokens: int = 4096) -> None:
        self.base = base
        self.name = name
        self.batch_tokens = batch_tokens
        self.ranks = base.ranks
        self.models: dict[str, Run] = {}
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
        _restore(opened, state, self.base.device)
        self.models[model] = opened

    def _checked(self, directory: Path, *, optimizer: bool) -> tuple[LoraConfig, list[Path]]:
        """How a checkpoint was trained, and the paths of its optimizer's state, if wanted."""
        meta = files.read_meta(directory)
        if meta["base"] != self.name:
            raise LossError(f"the checkpoint is of base model {meta['base']}, not {self.name}")
        state = files.optimizer_of(directory, meta) if optimizer else []
        if optimizer and not state:
            raise LossError("the checkpoint has no optimizer state: it was saved for a sampler")
        files.check(directory, meta, optimizer=optimizer)
        return LoraConfig(**meta["lora"]), state

    def bytes_of(self, model: str) -> int:
        """Memory of a model's weights, moments and gradients."""
        return sum(4 * int(value.nbytes) for value in self.models[model].parameters.values())

    def park(self, model: str) -> None:
        """Move a model to host memory, until its next operation."""
        _move(self.models[model], torch.device("cpu"))

    def _on_device(self, model: str) -> Run:
        run = self.models[model]
        _move(run, self.base.device)
        return run

    def close(self, model: str) -> None:
        """Drop a model."""
        dropped = self.models.pop(model, None)
        if dropped is not None and isinstance(dropped.parameters, Shards):
            del dropped
            gc.collect()  # a sharded model refers to itself

    def save(self, model: str, directory: Path, *, optimizer: bool) -> int:
        """Write a checkpoint; returns its size in bytes. A whole model is in float32 if its
        optimizer's state is saved with it, else in the base's dtype.
        """
        trained = self._on_device(model)
        if isinstance(trained.parameters, Shards):
            return save_shares(self, trained, trained.parameters, directory, optimizer=optimizer)
        if self.ranks.rank:
            return 0  # all have the same

        def write(beside: Path) -> None:
            self.base.write(
                trained.parameters, beside, torch.float32 if optimizer else self.base.dtype
            )
            if trained.config.rank:
                text = json.dumps(peft_config(trained.parameters, self.name), indent=1)
                (beside / files.ADAPTER_CONFIG).write_text(text)
            if optimizer:
                save_file(_optimizer_tensors(trained), beside / files.OPTIMIZER)

        return files.write_checkpoint(directory, write, self.meta(trained))

    def meta(self, trained: Run) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        return {"base": self.name, "lora": asdict(trained.config)}

    def zero_gradients(self, model: str) -> None:
        """Drop what was accumulated since the last step."""
        self.models[model].gradients = None

    def forward_backward(
        self, model: str, units: Sequence[Sequence[bytes]], slice_s: float = math.inf
    ) -> tuple[list[list[Answer]], bool]:
        """Begin these units of serialized ForwardBackwardRequests. See `go_on`."""
        trained = self._on_device(model)
        trained.passes = Pass(self.base, trained, units, self.batch_tokens, self.ranks)
        return self.go_on(model, slice_s)

    def go_on(self, model: str, slice_s: float) -> tuple[list[list[Answer]], bool]:
        """The units that end within about `slice_s` seconds, and whether there are more."""
        passes = self._on_device(model).passes
        assert passes is not None
        answers = passes.run(slice_s)
        return answers, not passes.over

    def optim_step(self, model: str, params: Mapping[str, float]) -> dict[str, float]:
        """One AdamW step over the gradients since the last one, which are then dropped; returns its
        metrics.

        Raises:
            LossError: the gradients are not finite, or a parameter makes no sense; the gradients
                were dropped.
        """
        trained = self._on_device(model)
        gradients = trained.gradients or [torch.zeros_like(p) for p in trained.parameters.values()]
        trained.gradients = None  # also on failure: a rebuilt model has none either
        speed = {"tokens_per_s": trained.tokens / trained.seconds} if trained.tokens else {}
        trained.tokens, trained.seconds = 0, 0.0
        group = _adam(params)
        clip = float(params.get("grad_clip_norm", 0.0))
        norm = self._summed(gradients, isinstance(trained.parameters, Shards))
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

    def _summed(self, gradients: list[Tensor], shards: bool) -> Tensor:
        """Sum gradients over the ranks, unless each has its rows of the sum; returns their norm."""
        if not shards:
            self.ranks.sum(gradients)
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        if not shards:
            return torch.linalg.vector_norm(norms)
        total = norms.square().sum()
        self.ranks.sum([total])
        return total.sqrt()

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
        check_tokens(self.base, row, "prompt")
        parameters = self._sampler(request["directory"])
        if self.ranks.rank and not self.base.together(parameters):
            return b""  # rank 0 answers
        first = 0 if last is None else max(len(row) - 1 - last, 0)
        targets = torch.zeros(len(row) - 1, 0, dtype=torch.int64)
        if body:
            targets = tensor_of("target_tokens", wire.message("Tensor").FromString(body))
            wrong = targets.dim() != 2 or targets.shape[0] != len(row) - 1
            if wrong or (targets.numel() and int(targets.max()) >= self.base.vocabulary):
                raise LossError("target_prompt_logprobs must be (prompt length − 1, K) token ids")
        with torch.no_grad(), self.base.using(parameters):
            scored, ids, values, picked = self.base.inside(
                partial(_scored, self.base, row, top, targets)
            )
        scored[: 1 + first], ids[: 1 + first], values[: 1 + first] = float("nan"), 0, -99999.0
        answer = wire.message("SampleResponse")()
        if request["wanted"]:
            answer.prompt_logprobs = scored.numpy().tobytes()
        if top:
            likely = answer.topk_prompt_logprobs
            likely.token_ids, likely.logprobs = ids.numpy().tobytes(), values.numpy().tobytes()
            likely.k, likely.length = top, len(row)
        if body:
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
            if not config.rank:
                gc.collect()  # a sharded model refers to itself
            self._samplers[directory] = self.base.read(Path(directory), config)
        return self._samplers[directory]


def _scored(
    base: Base, row: Tensor, top: int, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log p of a prompt's tokens (N,); ids and log p of the most likely ones (N, top), and log p of
    `targets` (N−1, K). The first token has none.
    """
    k = min(top, base.vocabulary)
    scored = torch.full((len(row),), float("nan"))
    ids = torch.zeros(len(row), top, dtype=torch.int32)
    values = torch.full((len(row), top), -99999.0)
    picked = torch.zeros(targets.shape)
    hidden = base.hidden([row])[0, :-1]
    for cut in base.chunks(len(hidden)):
        rows = torch.log_softmax(base.logits(hidden[cut]), dim=-1)
        after = slice(cut.start + 1, cut.start + 1 + len(rows))
        scored[after] = rows.gather(1, row[after, None].to(rows.device))[:, 0].cpu()
        best = rows.topk(k, dim=-1)
        ids[after, :k], values[after, :k] = best.indices.int().cpu(), best.values.cpu()
        of_targets = rows.gather(1, targets[cut].clamp(min=0).to(rows.device)).cpu()
        picked[cut] = of_targets.masked_fill(targets[cut] < 0, 0.0)
    return scored, ids, values, picked


def _model(config: LoraConfig, parameters: Parameters) -> Run:
    for value in parameters.values():
        value.requires_grad_(True)
    on_gpu = next(iter(parameters.values())).is_cuda
    # on a CPU one tensor after the other: the same bits whatever other tensors there are
    optimizer = torch.optim.AdamW(parameters.values(), foreach=False, fused=on_gpu)
    return Run(parameters, config=config, optimizer=optimizer)


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


def _move(run: Run, device: torch.device) -> None:
    """Move a model's tensors; those that are there stay."""
    if next(iter(run.parameters.values())).device.type == device.type:
        return
    for parameter in run.parameters.values():
        parameter.data = parameter.data.to(device)
        state = run.optimizer.state.get(parameter, {})
        state.update({key: value.to(device) for key, value in state.items()})
    if run.gradients is not None:
        run.gradients = [gradient.to(device) for gradient in run.gradients]


def _optimizer_tensors(model: Run) -> dict[str, Tensor]:
    """Moments by parameter; none before the first step."""
    tensors = {}
    for name, parameter in model.parameters.items():
        for key, value in model.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return tensors


def _restore(model: Run, paths: list[Path], device: torch.device) -> None:
    """Give a model the optimizer's state in these files: of shards, this rank's rows."""
    shards = model.parameters if isinstance(model.parameters, Shards) else None
    with ExitStack() as stack:
        for place, rows_of in stored(stack, paths).items():
            key, name = place.split("/", 1)
            rows = shards.module.rows(name) if shards and key != "step" else None
            state = rows_of(rows).to(device, copy=True)
            model.optimizer.state[model.parameters[name]][key] = state


def save_shares(
    trainer: Trainer, trained: Run, shards: Shards, directory: Path, *, optimizer: bool
) -> int:
    """Write a checkpoint of a sharded model: each rank its share of the tensors, one gathered after
    the other. Rank 0 returns the size in bytes; the others 0.

    Raises:
        OSError: one cannot write.
    """
    ranks, base, module = trainer.ranks, trainer.base, shards.module
    places = [directory.with_name(f".{directory.name}.{n}.partial") for n in range(ranks.size)]
    own, problem = places[ranks.rank], ""
    kinds: dict[str, dict[str, Tensor]] = {"": dict(shards)}
    for name, parameter in shards.items():
        for key, value in trained.optimizer.state.get(parameter, {}).items() if optimizer else ():
            kinds.setdefault(key, {})[name] = value
    for key, values in kinds.items():
        dtype = torch.float32 if optimizer else base.dtype
        share = module.gathered({name: value.detach() for name, value in values.items()}, dtype)
        try:  # whatever becomes of it, the others gather with this rank
            if not key:
                shutil.rmtree(own, ignore_errors=True)
                base.write_model(share, own)
            else:
                tensors = {f"{key}/{name}": value.contiguous() for name, value in share.items()}
                save_file(tensors, own / f"optimizer-{key}-{ranks.rank}.state")
        except Exception as error:
            problem = problem or f"rank {ranks.rank}: {error!r}"
    try:
        problems = [text.decode() for text in ranks.exchange(problem.encode()) if text]
        if problems:
            raise OSError("; ".join(problems))
        if ranks.rank:
            return 0

        def write(beside: Path) -> None:
            files.merge(places, beside)
            base.describe(beside)

        return files.write_checkpoint(directory, write, trainer.meta(trained))
    finally:
        for place in places if ranks.rank == 0 else [own] if problem else []:
            shutil.rmtree(place, ignore_errors=True)

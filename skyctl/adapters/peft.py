"""A LoRA adapter as PEFT saves it: read, checked against the running model, and written.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. A directory with
adapter_config.json, and adapter_model.safetensors with `base_model.model.<module>.lora_A.weight`
[rank, in] and `.lora_B.weight` [out, rank] of every adapted module (of embeddings:
`.lora_embedding_A` [rank, vocabulary] and `.lora_embedding_B` [hidden, rank], without `.weight`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from skyctl.adapters.forms import not_lora, refuse_config, same_name
from skyctl.adapters.requests import SentTensors
from skyctl.checkpoints.checkpoint import locate, read_config
from skyctl.checkpoints.compat import in_short
from skyctl.checkpoints.configs import Difference, compare_configs
from skyctl.checkpoints.finite import first_not_finite
from skyctl.checkpoints.header import FileIdentity, Tensor, read_header, read_json
from skyctl.checkpoints.live import RunningModel, running_model
from skyctl.checkpoints.staging import without_links
from skyctl.errors import NotFoundError, PreflightError, SkyctlError
from skyctl.store.paths import expanded

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
UNWRITTEN = "adapter_model.unwritten"
"""Its size and its header, while only servers have the tensors: they are written into it, and then
it is renamed.
"""

_PREFIX = "base_model.model."
PART = re.compile(r"^(?P<module>.+)\.(?P<part>lora_(embedding_)?[AB])(\.weight)?$")
_HEAD, _TIED_TO = "lm_head", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Adapter:
    """A PEFT directory that was read."""

    path: Path
    """The directory, absolute and without links."""
    config: Mapping[str, Any]
    """The content of its adapter_config.json."""
    tensors: tuple[Tensor, ...]
    """The headers of its tensors."""
    rank: int
    """The largest rank of its modules."""
    digest: str
    """Of every byte of its weights and the configuration that applies to them."""
    bytes: int
    """The size of its files."""
    is_zero: bool = False
    """Whether all of one side of each module is zero, so that it changes nothing."""


def read_adapter(path: str, sent: SentTensors | None = None) -> Adapter:
    """Read and check a PEFT directory, every byte of it. The content of tensors that are `sent` was
    checked by the process that has them, and servers compare theirs with it.

    Raises:
        NotFoundError: there is no such directory.
        PreflightError: it is not a LoRA adapter in PEFT's format, or one that vLLM does not take.
    """
    directory = Path(without_links(os.path.abspath(expanded(path))))  # noqa: PTH100
    if not os.path.isdir(directory):  # noqa: PTH112 - Path.is_dir raises
        exists = os.path.exists(directory)  # noqa: PTH110 - so does Path.exists
        raise NotFoundError(
            f"{path} is a file" if exists else f"adapter {path} does not exist",
            hint=f"give the directory that PEFT's save_pretrained wrote, with its {CONFIG}",
        )
    config = _read_config(directory)
    if sent is not None:
        return _sent_adapter(directory, config, sent)
    if not (directory / WEIGHTS).exists():
        other = next(directory.glob("adapter_model.*"), None)
        raise PreflightError(
            f"{directory} has no {WEIGHTS}" + (f", only {other.name}" if other else ""),
            hint="save it as safetensors: model.save_pretrained(DIR, safe_serialization=True)",
        )
    _, tensors = read_header(directory / WEIGHTS)
    ranks = _ranks(directory, config, tensors)
    data = (directory / WEIGHTS).read_bytes()
    for tensor in tensors:
        element = first_not_finite(data, tensor.dtype, tensor.begin, tensor.nbytes)
        if element is not None:
            raise PreflightError(
                f"{directory}: {tensor.name} holds NaN or infinity (element {element})",
                hint="load an earlier version of the adapter",
            )
    digest = hashlib.blake2b(data, digest_size=16)
    digest.update(json.dumps(config, sort_keys=True).encode())
    total = len(data) + (directory / CONFIG).stat().st_size
    zero = [t for t in tensors if data.count(0, t.begin, t.begin + t.nbytes) == t.nbytes]
    modules = {module_of(tensor.name) for tensor in tensors}
    return Adapter(
        directory,
        config,
        tuple(tensors),
        max(ranks),
        digest.hexdigest(),
        total,
        is_zero={module_of(tensor.name) for tensor in zero} == modules,
    )


def _sent_adapter(directory: Path, config: Mapping[str, Any], sent: SentTensors) -> Adapter:
    """Its digest covers every byte by the numbers of its tensors."""
    shard, tensors = read_header(directory / (UNWRITTEN if sent.export else WEIGHTS))
    ranks = _ranks(directory, config, tensors)
    if len(sent.numbers) != len(tensors):
        raise PreflightError(f"{len(sent.numbers)} numbers were sent for {len(tensors)} tensors")
    content = json.dumps([shard.header_digest, config, sent.numbers], sort_keys=True)
    return Adapter(
        directory,
        config,
        tuple(tensors),
        max(ranks),
        hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        shard.identity.size + (directory / CONFIG).stat().st_size,
        sent.is_zero,
    )


def read_parts(path: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The configuration and the tensors' headers of an adapter that was read before. Raises as
    `read_adapter`.
    """
    directory = Path(path)
    return _read_config(directory), read_header(directory / WEIGHTS)[1]


def module_of(tensor: str) -> str:
    """The module that a tensor of this name belongs to."""
    return tensor.partition(".lora_")[0]


def check_fits(
    adapter: Adapter,
    *,
    model: str | None,
    bases: Sequence[str],
    max_rank: int | None,
    any_base: bool = False,
) -> list[str]:
    """Check that an adapter fits what the servers run; returns notes on what could not be compared
    here.

    `model` is what they run (a directory or hub id, None if unknown), `bases` all its names;
    `any_base` accepts an adapter of a base with another name. The servers check shapes as well.

    Raises:
        PreflightError: it does not.
    """
    if max_rank is not None and adapter.rank > max_rank:
        raise PreflightError(
            f"{adapter.path} has rank {adapter.rank}, and this fleet takes {max_rank} at most",
            hint=f"write `lora: {{max_rank: {adapter.rank}}}` into the fleet file, then: "
            "skyctl up; attached servers: restart them with a larger rank, where they were started",
        )
    running = _running(model)
    if not any_base:
        _check_base(adapter, bases, running)
    notes = []
    if adapter.is_zero:
        notes.append("its weights are zero: it answers as the model without an adapter does")
    if not running.tensors:
        which = model or "what the servers run"
        return [*notes, f"{which} is not on this machine: shapes were not compared with it"]
    problems = _misfits(adapter, {tensor.name: tensor for tensor in running.tensors})
    if problems:
        raise PreflightError(
            f"{adapter.path} does not fit the running model: {in_short(problems)}",
            hint="load an adapter that was trained on this model",
            details={"problems": problems},
        )
    return notes


def copy_adapter(adapter: Adapter, directory: Path) -> None:
    """Copy what vLLM reads into an empty directory.

    Raises:
        SkyctlError: it cannot be written. PreflightError: it changed since it was read.
    """
    try:
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(adapter.path / name, directory / name)
    except OSError as error:
        raise SkyctlError(f"{adapter.path} cannot be copied to {directory}: {error}") from error
    if read_adapter(str(directory)).digest != adapter.digest:
        raise PreflightError(
            f"{adapter.path} changed while it was copied", hint="load it once it is written"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = read_json(directory / CONFIG)
    except FileNotFoundError as error:
        hint = f"give the directory that PEFT's save_pretrained wrote, with its {CONFIG}"
        if (directory / "config.json").exists():
            hint = f"a whole checkpoint is pushed: skyctl sync-weights {directory}"
        raise PreflightError(
            f"{directory} is not an adapter: it has no {CONFIG}", hint=hint
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise PreflightError(f"{directory / CONFIG} cannot be read: {error}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise PreflightError(
            f"{directory} is not a LoRA adapter: its peft_type is {kind!r}",
            hint="vLLM serves LoRA alone; merge others into their base and push that",
        )
    refuse_config(directory, config)
    return dict(config)


def _ranks(directory: Path, config: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[int]:
    """The rank of each module, from its tensors.

    Raises:
        PreflightError: a tensor is not part of a LoRA module, or one of two parts is missing.
    """
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or alpha is None:
        raise PreflightError(f"{directory / CONFIG} lacks a rank `r`, or `lora_alpha`")
    pattern, scales = (
        _pattern(directory, config, key) for key in ("rank_pattern", "alpha_pattern")
    )
    for name, scale in {"lora_alpha": alpha, **scales}.items():
        if not isinstance(scale, int | float) or not -math.inf < scale < math.inf:
            raise PreflightError(f"{directory / CONFIG}: the scale {name} is {scale!r}")
    parts: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        match = PART.match(tensor.name)
        if match is None or len(tensor.shape) != 2:
            raise not_lora(directory, tensor.name)
        parts.setdefault(match["module"], {})[match["part"][-1]] = tensor
    if not parts:
        raise PreflightError(f"{directory} holds no tensors")
    ranks = [rank, *pattern.values()]
    for module, pair in parts.items():
        if len(pair) != 2:
            raise PreflightError(f"{directory}: {module} has lora_{next(iter(pair))} alone")
        down, up = pair["A"].shape[0], pair["B"].shape[1]
        if down != up or down not in ranks:
            raise PreflightError(
                f"{directory}: {module} has rank {down} in lora_A and {up} in lora_B, and "
                f"{CONFIG} says {rank}"
            )
    return [pair["A"].shape[0] for pair in parts.values()]


def _pattern(directory: Path, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What a configuration sets for some modules, by patterns of their names."""
    pattern = config.get(key) or {}
    if not isinstance(pattern, dict):
        raise PreflightError(f"{directory / CONFIG}: {key} is not a mapping")
    return pattern


@lru_cache(maxsize=4)
def _running_as(model: str, identities: tuple[FileIdentity, ...]) -> RunningModel:
    return running_model(model)


def _running(model: str | None) -> RunningModel:
    """What the servers run, as far as it is local; cached while it is unchanged."""
    directory = locate(model) if model else None
    if model is None or directory is None:
        return RunningModel()
    identities = []
    for path in sorted((directory / "config.json", *directory.glob("*.safetensors"))):
        with suppress(OSError):
            identities.append(FileIdentity.of_status(path.stat()))
    return _running_as(model, tuple(identities))


def _check_base(adapter: Adapter, bases: Sequence[str], running: RunningModel) -> None:
    """Raise PreflightError if an adapter says that it was trained on another model."""
    base = adapter.config.get("base_model_name_or_path")
    if not base or not isinstance(base, str) or not bases:
        return
    problems: list[Difference] = []
    directory = expanded(base)
    with suppress(PreflightError):  # what cannot be read is compared by its name
        if running.config and os.path.isfile(directory / "config.json"):  # noqa: PTH113 - see _same_model
            problems = compare_configs(read_config(directory), running.config)
    if not problems and any(_same_model(base, name) for name in bases):
        return
    difference = f": {problems[0]}" if problems else ""
    raise PreflightError(
        f"{adapter.path} was trained on {base}, and this fleet runs {bases[0]}{difference}",
        hint="load an adapter of this model; or, if it is one under another name: --any-base",
    )


def _same_model(name: str, other: str) -> bool:
    """Whether two names, of directories or on the hub, can mean the same model."""
    # os.path: a directory of another user, or a name that is too long for a path, does not count
    if os.path.exists(name) and os.path.exists(other) and os.path.samefile(name, other):  # noqa: PTH110, PTH121
        return True
    return same_name(name, other)


def _misfits(adapter: Adapter, base: Mapping[str, Tensor]) -> list[str]:
    """Parts of an adapter that the running model lacks or has in another shape, one line each."""
    problems = []
    for tensor in adapter.tensors:
        match = PART.match(tensor.name)
        assert match is not None  # read_adapter checked it
        module, part = match["module"].removeprefix(_PREFIX), match["part"]
        weight = base.get(f"{module}.weight")
        if weight is None and module == _HEAD:
            weight = base.get(_TIED_TO)
        if weight is None:
            # quantized weights have other names and shapes, fused experts no module of their own
            if ".experts" not in module and not any(n.startswith(f"{module}.") for n in base):
                problems.append(f"{module} is not in the model the servers run")
            continue
        if len(weight.shape) != 2:
            problems.append(f"{module} is neither a linear layer nor an embedding")
            continue
        rows, columns = weight.shape
        if "embedding" in part:
            rows, columns = columns, rows
        own, theirs = (tensor.shape[1], columns) if part[-1] == "A" else (tensor.shape[0], rows)
        if own != theirs:
            side = "inputs" if part[-1] == "A" else "outputs"
            problems.append(f"{module} has {own} {side} in the adapter, {theirs} in the servers")
    return sorted(set(problems))

"""Copy a stored checkpoint to a directory, or merge an adapter into its base model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.checkpoints.checkpoint import INDEX_NAME, read_checkpoint
from skyctl.errors import PreflightError, UsageError
from skyctl.tinker import files

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def copy_checkpoint(directory: Path, to: Path) -> None:
    """Copy the weights and what describes them; the optimizer's state stays.

    Raises:
        UsageError: `to` exists. PreflightError: a file is not what was written.
    """
    meta = _checked(directory)
    optimizer = {path.name for path in files.optimizer_of(directory, meta)}
    names = [name for name in meta["files"] if name not in optimizer]

    def write(beside: Path) -> None:
        for name in names:
            shutil.copyfile(directory / name, beside / name)

    _write(to, write)


def merge_adapter(directory: Path, base: str, to: Path) -> None:
    """Write `base` with the adapter of `directory` added to its weights: W + scale · B A, computed
    in float32 and rounded once, to the dtype that W has. Other files of the base are copied. If the
    adapter changes the output layer of a base that ties it to the embedding, the model has one of
    its own.

    Raises:
        UsageError: `to` exists. NotFoundError: the base is not on this machine.
        PreflightError: a file is damaged, or the adapter has a layer that the base lacks.
    """
    from safetensors.torch import load_file, save_file

    _checked(directory)
    config = json.loads((directory / files.ADAPTER_CONFIG).read_bytes())
    scale = config["lora_alpha"] / config["r"]
    adapter = load_file(directory / files.ADAPTER)
    layers = {name.rsplit(".lora_", 1)[0].removeprefix(_PREFIX) for name in adapter}
    model = read_checkpoint(base)
    names = {tensor.name for tensor in model.tensors}
    untied = f"{_PREFIX}lm_head.lora_A{_WEIGHT}" in adapter and _HEAD not in names
    mergeable = names | {_HEAD} if untied and _EMBEDDING in names else names
    if missing := sorted(layers - {name.removesuffix(_WEIGHT) for name in mergeable}):
        raise PreflightError(
            f"{base} has no weights of its own for {missing[0]}, which the adapter changes",
            hint="load the adapter as it is: skyctl adapters load NAME TINKER_PATH",
        )

    def merged(name: str, weight: Tensor) -> Tensor:
        layer = name.removesuffix(_WEIGHT)
        if layer not in layers:
            return weight
        low, high = (adapter[f"{_PREFIX}{layer}.lora_{part}{_WEIGHT}"].float() for part in "AB")
        return (weight.float() + scale * (high @ low)).to(weight.dtype)

    def write(beside: Path) -> None:
        for shard in model.shards:
            weights = load_file(shard.path)
            if untied and _EMBEDDING in weights:
                weights[_HEAD] = weights[_EMBEDDING]
            tensors = {name: merged(name, weight) for name, weight in weights.items()}
            save_file(tensors, beside / shard.name, metadata={"format": "pt"})
        index = [path for path in [model.path / INDEX_NAME] if path.exists()]
        for path in [*files.beside_weights(model.path), *index]:
            shutil.copyfile(path, beside / path.name)
        if untied:
            _untie(beside)

    _write(to, write)


def _untie(directory: Path) -> None:
    """Say in a checkpoint's config and index that the output layer has weights of its own."""
    path = directory / "config.json"
    config = json.loads(path.read_bytes())
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))
    if (path := directory / INDEX_NAME).exists():
        index = json.loads(path.read_bytes())
        index["weight_map"][_HEAD] = index["weight_map"][_EMBEDDING]
        path.write_text(json.dumps(index, indent=2))


def _checked(directory: Path) -> dict[str, dict[str, str]]:
    try:
        meta = files.read_meta(directory)
        files.check(directory, meta, optimizer=False)
    except files.DamagedCheckpoint as error:
        raise PreflightError(str(error)) from error
    return meta


def _write(to: Path, write: Callable[[Path], None]) -> None:
    if to.exists():
        raise UsageError(f"{to} exists", hint="give a directory that does not exist yet")
    files.write_directory(to, write)

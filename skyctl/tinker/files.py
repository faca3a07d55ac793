"""Checkpoints on disk: a directory is complete or does not exist, and is verified when read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import INDEX_NAME
from skyctl.store.paths import sync_directory

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER, META = "optimizer.state", "meta.json"
"""The optimizer's state is in safetensors format; by its name, no program loads it as weights. Of
several ranks each has written `optimizer-*.state`; earlier versions wrote `optimizer.safetensors`.
"""


class DamagedCheckpoint(Exception):
    """Files are missing or differ from what was written."""


def write_checkpoint(
    directory: Path, write: Callable[[Path], None], meta: Mapping[str, Any]
) -> int:
    """`write_directory`, with a `meta.json` that has the digests of the files.

    Returns the bytes written. What was at `directory` (a save that was not recorded) is replaced.
    """

    def described(beside: Path) -> None:
        beside.chmod(0o700)
        write(beside)
        paths = sorted(beside.iterdir())
        with ThreadPoolExecutor() as pool:
            digests = dict(
                zip([path.name for path in paths], pool.map(_digest, paths), strict=True)
            )
        (beside / META).write_text(json.dumps({**meta, "files": digests}, indent=1, sort_keys=True))
        shutil.rmtree(directory, ignore_errors=True)

    return write_directory(directory, described)


def write_directory(directory: Path, write: Callable[[Path], None]) -> int:
    """Let `write` fill a directory beside `directory`, then rename it.

    Returns the bytes written. Raises OSError if there is something at `directory`.
    """
    beside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        write(beside)
        size = 0
        for path in beside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                size += os.fstat(file.fileno()).st_size
        sync_directory(beside)
        beside.rename(directory)
    except BaseException:  # such as a full disk, which it would go on filling
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync_directory(directory.parent)
    return size


def merge(places: Sequence[Path], directory: Path) -> None:
    """Move what ranks have written, each its share of a model's tensors, to one directory: with an
    index of the weights, and what is not weights from the first.
    """
    from safetensors import safe_open

    weights = [path for place in places for path in sorted(place.glob("*.safetensors"))]
    index: dict[str, str] = {}
    size = sum(path.stat().st_size for path in weights)
    for number, path in enumerate(weights, 1):
        name = f"model-{number:05}-of-{len(weights):05}.safetensors"
        with safe_open(path, "pt") as file:
            index |= dict.fromkeys(file.keys(), name)
        path.rename(directory / name)
    for path in [path for place in reversed(places) for path in place.iterdir()]:
        path.rename(directory / path.name)
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
    (directory / INDEX_NAME).write_text(f"{text}\n")


def beside_weights(model: Path) -> list[Path]:
    """The files of a model's directory other than its weights and what indexes them: its config,
    its tokenizer, its code.
    """
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
    paths = sorted(model.iterdir()) if model.is_dir() else []
    return [path for path in paths if path.is_file() and not path.name.endswith(weights)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_meta(directory: Path) -> dict[str, Any]:
    """What was given as `meta`, and `files`: name → sha256.

    Raises:
        DamagedCheckpoint: it cannot be read.
    """
    try:
        meta = json.loads((directory / META).read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{directory / META}: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict) or not meta["files"]:
        raise DamagedCheckpoint(f"{directory / META} does not describe a checkpoint")
    return meta


def optimizer_of(directory: Path, meta: Mapping[str, Any]) -> list[Path]:
    """The files with the optimizer's state; empty if there is none."""
    return [directory / name for name in sorted(meta["files"]) if _of_optimizer(name)]


def _of_optimizer(name: str) -> bool:
    return name.startswith("optimizer") and name.endswith((".state", ".safetensors"))


def check(directory: Path, meta: Mapping[str, Any], *, optimizer: bool) -> None:
    """Compare each file with its digest, the optimizer's state only with `optimizer`.

    Raises:
        DamagedCheckpoint: one is missing or differs.
    """
    for name, digest in meta["files"].items():
        if _of_optimizer(name) and not optimizer:
            continue
        try:
            actual = _digest(directory / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{directory / name}: {error}") from error
        if actual != digest:
            raise DamagedCheckpoint(f"{directory / name} is not what was written")

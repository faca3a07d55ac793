"""Checkpoints of adapters on disk: a directory is whole or not there, and is read back checked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.store.paths import sync_directory

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER, META = "optimizer.safetensors", "meta.json"


class DamagedCheckpoint(Exception):
    """Files are missing or differ from what was written."""


def write_directory(directory: Path, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> int:
    """Write `files` and a `meta.json` with their digests beside `directory`, then rename.

    Bytes written. What was at `directory` (a save that was not recorded) is replaced.
    """
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    everything = {
        **files,
        META: json.dumps({**meta, "files": digests}, indent=1, sort_keys=True).encode(),
    }
    beside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True, mode=0o700)
    for name, content in everything.items():
        with (beside / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(beside)
    shutil.rmtree(directory, ignore_errors=True)
    beside.rename(directory)
    sync_directory(directory.parent)
    return sum(len(content) for content in everything.values())


def read_meta(directory: Path) -> dict[str, Any]:
    """What was given as `meta`, and `files`: name → sha256.

    Raises:
        DamagedCheckpoint: it cannot be read.
    """
    try:
        found = json.loads((directory / META).read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{directory / META}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise DamagedCheckpoint(f"{directory / META} is no checkpoint's")
    return found


def read_file(directory: Path, name: str, meta: Mapping[str, Any]) -> bytes:
    """One file, compared with its digest.

    Raises:
        DamagedCheckpoint: it is missing or differs.
    """
    try:
        content = (directory / name).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{directory / name}: {error}") from error
    if hashlib.sha256(content).hexdigest() != meta["files"].get(name):
        raise DamagedCheckpoint(f"{directory / name} is not what was written")
    return content

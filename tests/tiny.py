"""Tiny checkpoints, each made once in a run by whoever needs it first: torch and transformers take
four seconds of a processor to import, in every process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from skyctl.checkpoints import tiny

_DIRECTORY = "SKYCTL_TEST_TINY"


def share() -> str:
    """Keep what is made from here on for all processes of this run. Returns the directory, which is
    the caller's to remove; "" in a process that shares another's.
    """
    if _DIRECTORY in os.environ:
        return ""
    os.environ[_DIRECTORY] = tempfile.mkdtemp(prefix="skyctl-tiny-")
    return os.environ[_DIRECTORY]


def make_tiny_checkpoint(directory: Path, **how: Any) -> Path:
    """`skyctl.checkpoints.tiny.make_tiny_checkpoint`, or a copy of what that wrote."""
    if _DIRECTORY not in os.environ:  # in a benchmark
        return tiny.make_tiny_checkpoint(directory, **how)
    name = hashlib.blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=8).hexdigest()
    made = Path(os.environ[_DIRECTORY]) / name
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            tiny.make_tiny_checkpoint(made.with_suffix(".new"), **how).rename(made)
    return Path(shutil.copytree(made, directory, dirs_exist_ok=True))

"""The temporary directory of a fleet's processes, removed with the last of them.

A vLLM server that is killed leaves its sockets and rendezvous files where it made them. The latter
name the shared memory that its ranks left.
"""

from __future__ import annotations

import os
import shutil

from skyctl.launch.local.segments import remove_left
from skyctl.store.paths import FleetPaths, private_directory


def scratch_environment(paths: FleetPaths) -> dict[str, str]:
    """Variables that let a process keep its temporary files in the fleet's own directory (0700).

    What torch compiled is worth keeping; where torch would keep it, another user can put his own.

    Raises:
        SkyctlError: the directory is not ours alone.
    """
    environment = {"TMPDIR": str(private_directory(paths.scratch))}
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(private_directory(paths.compiled))
    return environment


def sweep_scratch(paths: FleetPaths) -> None:
    """Remove the directory. Only when no process of the fleet is left."""
    if not paths.scratch.is_symlink():
        remove_left(paths.scratch)
        shutil.rmtree(paths.scratch, ignore_errors=True)

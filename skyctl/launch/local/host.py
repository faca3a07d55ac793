"""This machine as a `Host`."""

from __future__ import annotations

import os
import shutil

from skyctl.launch.base import Host
from skyctl.launch.local.devices import discover_cpus, discover_gpus
from skyctl.launch.local.ports import bind_error, free_port, port_holder
from skyctl.launch.local.process import ManagedProcess
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


LOCAL = Host(
    name="local",
    gpus=discover_gpus,
    cpus=discover_cpus,
    free_port=free_port,
    port_holder=port_holder,
    bind_error=bind_error,
    spawn=ManagedProcess.spawn,
    adopt=ManagedProcess,
    environment=scratch_environment,
    sweep=sweep_scratch,
)

"""This machine as a `Host`."""

from __future__ import annotations

from skyctl.launch.base import Host
from skyctl.launch.local.devices import discover_cpus, discover_gpus
from skyctl.launch.local.ports import bind_error, free_port, port_holder
from skyctl.launch.local.process import ManagedProcess
from skyctl.launch.local.scratch import scratch_environment, sweep_scratch

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

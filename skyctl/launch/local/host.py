"""This machine as a `Host`: its ports, and fleets' scratch directories."""

from __future__ import annotations

import errno
import os
import random
import shlex
import shutil
import socket
import threading
from collections import deque

import psutil

from skyctl.launch.base import Host
from skyctl.launch.local.devices import discover_cpus, discover_gpus
from skyctl.launch.local.process import ManagedProcess
from skyctl.launch.local.segments import remove_left
from skyctl.store.paths import FleetPaths, private_directory

# below Linux's range for outgoing connections (32768 up): a port found free here is not lost to
# some client's connection while vLLM is still loading
_FIRST, _LAST = 20000, 32000
_TRIES = 200
_MOST_CLAIMS = 256
_given: set[int] = set()
_claims: deque[socket.socket] = deque()
_lock = threading.Lock()


def free_port(host: str) -> int:
    """A free port at `host`; never the same one twice in this process.

    Ports that another skyctl process has just chosen are skipped as well: its server does not
    listen there yet, because it is still loading.

    Raises:
        OSError: `host` is not an address of this machine, or no port is free.
    """
    with _lock:
        for _ in range(_TRIES):
            port = random.randint(_FIRST, _LAST)
            free = port not in _given and _bind(host, port, reuse=False) is None
            if free and _claim(port):
                _given.add(port)
                return port
        port = _any_port(host)
        _given.add(port)
        return port


def _claim(port: int) -> bool:
    """Whether no other process has chosen the port; a named lock (Linux) announces our choice while
    we live.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0skyctl-port-{port}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    _claims.append(claim)
    if len(_claims) > _MOST_CLAIMS:
        _claims.popleft().close()
    return True


def _any_port(host: str) -> int:
    """A port chosen by the kernel, for machines whose usual range is full (or `host` is wrong)."""
    for _ in range(_TRIES):
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            return port
    raise OSError(f"no free port at {host}")


def port_holder(host: str, port: int) -> str | None:
    """Who listens at `host:port`: `pid 4711 (python -m …)`, or None if it is free."""
    error = _bind(host, port, reuse=True)
    if error is None or error.errno != errno.EADDRINUSE:
        return None
    return _listener(port) or "another process"


def bind_error(host: str, port: int) -> str | None:
    """Why no process of ours could listen at `host:port`, even if it were free; None if one can."""
    error = _bind(host, port, reuse=True)
    if error is None or error.errno == errno.EADDRINUSE:
        return None
    return error.strerror or str(error)


def _listener(port: int) -> str | None:

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port == port and connection.pid:
            return f"pid {connection.pid} ({_command(connection.pid)})"
    return None


def _command(pid: int) -> str:

    try:
        process = psutil.Process(pid)
        command = shlex.join(process.cmdline()) or process.name()
    except (psutil.Error, OSError):
        return "unknown command"
    return command if len(command) <= 60 else command[:59] + "…"


def _bind(host: str, port: int, *, reuse: bool) -> OSError | None:
    """Listen for a moment. `reuse` is SO_REUSEADDR, as servers set it: closed connections that
    linger in TIME_WAIT are then ignored.
    """
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            if reuse:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def scratch_environment(paths: FleetPaths) -> dict[str, str]:
    """Variables that keep a process's temporary files in the fleet's own directory (0700).

    What torch compiled is worth keeping; in torch's default place, another user can plant files.

    Raises:
        SkyctlError: the directory is not ours alone.
    """
    environment = {"TMPDIR": str(private_directory(paths.scratch))}
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(private_directory(paths.compiled))
    return environment


def sweep_scratch(paths: FleetPaths) -> None:
    """Remove the directory. Call only when no process of the fleet is left."""
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

"""What runs on the other machine, for ssh, srun or Ray: `PYTHON -m skyctl.launch.remote.agent`.

One request per connection, a JSON line: `facts` (what the machine has), `keep` (start a server, or
take up the one that runs, and tell of it until it ends), `stop` (end a server for certain).

A server is the child of a keeper, which has no parent here: it outlives the agent and the
connection. While a tether is heard, the agent touches a file (`lease`), and so does the server when
the supervisor asks it something (`engines/inside/guard.py`); when it was not touched for the
fleet's grace, the keeper ends the server and removes every trace of it. Times are
differences on the keeper's own clock, so that no clock's date matters.
Its files are in `hosted.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from skyctl import __version__
from skyctl.errors import SkyctlError
from skyctl.launch.base import LEASE_VARIABLE
from skyctl.launch.local.devices import discover_cpus, discover_gpus, interface_of, visible_gpus
from skyctl.launch.local.host import LOCAL, free_port, port_holder
from skyctl.launch.local.process import ManagedProcess, listening_ports
from skyctl.launch.remote.hosted import (
    MARKED_S,
    NAME,
    hosted_paths,
    is_alive,
    lease_time,
    mark_stopped,
    read_json,
    remove_files,
    reserve_room,
    server_identity,
    set_closed,
    stopped_mark,
    touch_lease,
    write_json,
)
from skyctl.launch.remote.session import PROTOCOL
from skyctl.store.identity import ProcessIdentity, own_identity
from skyctl.store.paths import FleetPaths, create_private_file

STOP_TIMEOUT_S = 15.0
SILENCE_S = 20.0
_TICK_S = 0.05
_STATE_S = 1.0
_TREE_S = 5.0
_GUARD_S = 0.2
_BEGIN_S = 20.0
_ABANDONED_S = 3600.0  # beyond the grace
_PIECE = 64 * 1024
_LOG_BYTES = 32 * 1024 * 1024


def main() -> None:
    """Answer one request on stdin and stdout."""
    lines = _Lines()
    sys.stdout.write("\n")  # ends a line that a login shell has left open
    try:
        _send({"agent": PROTOCOL, "skyctl": __version__})
        request = lines.next(SILENCE_S)
        if request is None:
            return
        work: dict[str, Callable[..., None]] = {"facts": facts, "keep": keep, "stop": stop}
        try:
            work[request.pop("do")](lines, **request)
        except (SkyctlError, OSError) as error:
            _send({"error": str(error)})
    except BrokenPipeError:  # its reader is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def facts(
    lines: _Lines,
    *,
    ports: int,
    modules: Sequence[str] = (),
    paths: Sequence[str] = (),
    listening: Sequence[int] = (),
) -> None:
    """GPUs, CPUs, the address that it was reached by (or the node's), its interface and free ports
    there; what of the wanted modules and paths is missing, the versions of the others, and who
    holds the ports that are asked for."""
    address = _own_address()
    holders = {port: port_holder(address, port) for port in listening}
    _send(
        {
            "address": address,
            "interface": interface_of(address),
            "gpus": [asdict(gpu) for gpu in visible_gpus(discover_gpus(), os.environ)],
            "cpus": [asdict(cpu) for cpu in discover_cpus()],
            "ports": [free_port(address) for _ in range(ports)],
            "versions": _versions(modules),
            "missing": [name for name in modules if importlib.util.find_spec(name) is None],
            "absent": [path for path in paths if not os.access(path, os.R_OK)],
            "taken": {port: holder for port, holder in holders.items() if holder},
        }
    )


def _own_address() -> str:
    """The address of this machine for the machine that asks. Raises SkyctlError: it is unknown."""
    address = os.environ.get("SKYCTL_NODE_ADDRESS")
    slurm_address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if address:
        return address
    if slurm_address:  # before ssh's: srun hands on the variables of the login
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards_it:
            towards_it.connect((slurm_address, 1))  # sends nothing
            return str(towards_it.getsockname()[0])
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if len(connection) != 4:
        raise SkyctlError(
            "nothing says by which address it was reached: neither sshd (SSH_CONNECTION), "
            "nor Slurm, nor SKYCTL_NODE_ADDRESS"
        )
    return connection[2]


def _versions(modules: Sequence[str]) -> dict[str, str]:
    """By module, of the packages that brought them: as `packages_distributions` has them, which
    parses the lists of all files that are installed."""
    import importlib.metadata  # for one request only

    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions() if modules else ():
        declared = (package.read_text("top_level.txt") or "").split()
        files = "" if declared else f"\n{package.read_text('RECORD') or ''}"
        for name in modules:
            brought = name in declared or f"\n{name}/" in files or f"\n{name}.py," in files
            if brought and name not in versions:
                versions[name] = package.version
    return versions


def stop(lines: _Lines, *, token: str, timeout_s: float) -> None:
    """End a server's whole tree, and answer when nothing of it is left, its keeper neither."""
    paths = hosted_paths(token)
    recorded = read_json(paths.directory / "server.json")
    # first: a `keep` that is late starts nothing, or ends it itself
    with contextlib.suppress(SkyctlError):  # a full disk: there is room once it has ended
        mark_stopped(paths)
    gently = _end(paths, timeout_s)
    mark_stopped(paths)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while recorded and is_alive(recorded["keeper"]) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    _send({"gently": gently})


def keep(
    lines: _Lines,
    *,
    token: str,
    fresh: bool,
    argv: Sequence[str],
    env: Mapping[str, str],
    closed: bool,
    closed_variables: Sequence[str],
    grace_s: float,
    at: int,
) -> None:
    """Start the server (`fresh`), or take up the one that runs; then tell its state and its output
    from byte `at` on, until it ends or its lease runs out."""
    paths = hosted_paths(token)
    if fresh:
        paths.prepare()
        os.close(create_private_file(paths.directory / "lease"))
        touch_lease(paths)
        _end_abandoned(paths)
        reserve_room(paths)
        set_closed(paths, closed)
        variables = dict.fromkeys(closed_variables, str(paths.hold_file(NAME)))
        variables[LEASE_VARIABLE] = str(paths.directory / "lease")
        env = {**LOCAL.environment(paths), **env, **variables}
        _begin(paths, lambda: ManagedProcess.spawn(argv, env, paths.log(NAME), token), grace_s)
    elif not paths.directory.exists():
        _send({"ended": "is not on its machine any more"})
        return
    _Telling(paths, at).until_ended(lines, grace_s)


class _Telling:
    """Tells of one server: what it is, what it writes, and how it ended."""

    def __init__(self, paths: FleetPaths, at: int) -> None:
        self._paths = paths
        self._at = at
        self._reported_at = float("-inf")
        self._tree_read_at = float("-inf")
        self._tree: list[psutil.Process] = []
        self._ports: set[int] = set()

    def until_ended(self, lines: _Lines, grace_s: float) -> None:
        heard = time.monotonic()
        while time.monotonic() - heard < SILENCE_S:
            message = lines.next(_TICK_S)
            if lines.ended:
                return
            if message is not None:
                heard = time.monotonic()
                set_closed(self._paths, bool(message["closed"]))
                touch_lease(self._paths)
                self._reported_at = float("-inf")
            ended = read_json(self._paths.directory / "ended")
            self._send_log()
            if ended is not None or not self._paths.directory.exists():
                _send({"ended": ended["how"] if ended else "was ended"})
                return  # what it left is still being ended; `stop` comes next
            self._replace_keeper(grace_s)
            if time.monotonic() - self._reported_at >= _STATE_S:
                self._report()

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        server = server_identity(self._paths)
        process = server.process() if server else None
        if process is not None and self._reported_at - self._tree_read_at > _TREE_S:
            self._tree_read_at = self._reported_at
            self._tree = [process, *_gently(lambda p: p.children(recursive=True), process, [])]
            self._ports = {port for p in self._tree for port in _gently(listening_ports, p, ())}
        if process is not None:  # the one that usually has the port, looked at more often
            self._ports.update(_gently(listening_ports, process, ()))
        rss = sum(_gently(lambda p: p.memory_info().rss, p, 0) for p in self._tree)
        closed = self._paths.hold_file(NAME).exists()
        pid = process.pid if process else None
        _send({"pid": pid, "rss": rss, "ports": sorted(self._ports), "closed": closed})

    def _send_log(self) -> None:
        log = self._paths.log(NAME)
        with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
            if self._at > os.fstat(file.fileno()).st_size:
                self._at = 0
            file.seek(self._at)
            while data := file.read(_PIECE):
                self._at += len(data)
                _send({"log": data.decode(errors="surrogateescape"), "at": self._at})
            if self._at > _LOG_BYTES:  # all of it is on the other machine
                os.truncate(log, 0)
                self._at = 0

    def _replace_keeper(self, grace_s: float) -> None:
        """Without its keeper, no process would end the server."""
        recorded = read_json(self._paths.directory / "server.json")
        if recorded and not is_alive(recorded["keeper"]):
            server = ProcessIdentity(**recorded["server"])
            token = self._paths.name
            _begin(self._paths, lambda: ManagedProcess(server, token), grace_s)


def _begin(paths: FleetPaths, start: Callable[[], ManagedProcess], grace_s: float) -> None:
    """Put a keeper over a server, and wait until it has it (or could not start it)."""
    (paths.directory / "server.json").unlink(missing_ok=True)
    touch_lease(paths)
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        try:
            asyncio.run(_guard(paths, start, grace_s))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + _BEGIN_S
    traces = (paths.directory / "server.json", paths.directory / "ended", stopped_mark(paths))
    while not any(path.exists() for path in traces):
        if time.monotonic() > deadline:
            raise SkyctlError("its keeper does not start")
        time.sleep(_TICK_S)


async def _guard(paths: FleetPaths, start: Callable[[], ManagedProcess], grace_s: float) -> None:
    """Be a server's keeper until `stop` has removed its directory, or the lease runs out."""
    if stopped_mark(paths).exists():
        remove_files(paths)
        return
    try:
        process = start()
    except SkyctlError as error:
        write_json(paths.directory / "ended", {"how": error.message})
        return
    if stopped_mark(paths).exists():  # its look round may have been before the start
        await process.stop(STOP_TIMEOUT_S)
        remove_files(paths)
        return
    assert process.identity is not None  # it was just started, or is taken up by its identity
    identities = {"server": asdict(process.identity), "keeper": asdict(own_identity())}
    write_json(paths.directory / "server.json", {**identities, "grace_s": grace_s})
    lease, since, ended = 0, time.monotonic(), False
    while (touched := lease_time(paths, unreadable=lease)) is not None:
        if process.exited.is_set() and not ended:
            ended = True
            write_json(paths.directory / "ended", {"how": process.exit_text()})
            await process.stop(STOP_TIMEOUT_S)  # what it left below it
        if touched != lease:
            lease, since = touched, time.monotonic()
        elif time.monotonic() - since > grace_s:
            break
        await asyncio.sleep(_GUARD_S)
    await process.stop(STOP_TIMEOUT_S)
    remove_files(paths)


def _end(paths: FleetPaths, timeout_s: float) -> bool:
    """End a server's whole tree and remove what is known of it; False when force was needed."""

    async def stop() -> bool:
        return await ManagedProcess(server_identity(paths), paths.name).stop(timeout_s)

    gently = asyncio.run(stop())
    remove_files(paths)
    return gently


def _end_abandoned(ours: FleetPaths) -> None:
    """End what a keeper left that died long ago, as with its machine, and that no supervisor has
    asked for since.

    How long none did is shown by the lease that was touched just now: machines may share the
    directory, and have other clocks.
    """
    now = lease_time(ours)
    assert now is not None
    for lease in ours.root.glob("fleets/*/lease"):
        paths = hosted_paths(lease.parent.name)
        recorded = read_json(paths.directory / "server.json") or {}
        patience_s = float(recorded.get("grace_s", MARKED_S)) + _ABANDONED_S
        untouched_s = (now - (lease_time(paths, unreadable=now) or now)) / 1e9
        if untouched_s > patience_s and not ("keeper" in recorded and is_alive(recorded["keeper"])):
            _end(paths, STOP_TIMEOUT_S)


def _gently(read: Callable[..., Any], process: psutil.Process, otherwise: Any) -> Any:
    """What a look at a process finds; it may have ended."""
    try:
        return read(process)
    except psutil.Error:
        return otherwise


def _send(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class _Lines:
    """The messages on stdin, each waited for a bounded time."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._buffer = b""
        self.ended = False

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next one, None when there is none in time; `ended` is set at the end of all."""
        while b"\n" not in self._buffer:
            if self.ended or not self._selector.select(timeout_s):
                return None
            data = os.read(0, _PIECE)
            self.ended = not data
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))


if __name__ == "__main__":
    main()

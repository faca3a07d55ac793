"""The supervisor as a process: started detached, one per fleet, answering on its socket."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import uvicorn

from skyctl.checkpoints.staging import sweep
from skyctl.core.plan import FleetPlan
from skyctl.core.registry import supervisor_running
from skyctl.core.repeated import needed
from skyctl.core.requests import TakenDown
from skyctl.engines.logs import mark_start, why_it_died
from skyctl.errors import ConflictError, FleetDownError, SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.client import ControlClient
from skyctl.launch.local.process import start_detached
from skyctl.launch.local.rotation import rotate
from skyctl.store.owned import FileLock
from skyctl.store.paths import FleetPaths, create_private_file
from skyctl.store.state import FleetState
from skyctl.supervisor import adapters
from skyctl.supervisor.api import make_app
from skyctl.supervisor.client import RemoteFleet
from skyctl.supervisor.event_commands import EventCommands
from skyctl.supervisor.interface import own_handlers
from skyctl.supervisor.listening import Listening, QuietServer
from skyctl.supervisor.resident import Supervisor
from skyctl.supervisor.rollout import host_of
from skyctl.supervisor.trainer_listening import TrainerListening

START_TIMEOUT_S = 20.0
_LOCK_TIMEOUT_S = 1.0
_UNPLANNED_S = 10.0
"""How long a supervisor waits for its plan: the process that started it may have died."""
_PR_SET_CHILD_SUBREAPER = 36
_PACKAGES = tuple(
    f"skyctl.{name}"
    for name in (
        "supervisor",
        "core",
        "push",
        "adapters",
        "transfer",
        "checkpoints",
        "engines",
        "launch",
        "http",
        "store",
        "fleetfile",
    )
)
_ELSEWHERE = (".inside.", "skyctl.transfer.gpu", "skyctl.transfer.sender")
"""Parts of the names of modules that run in servers and in the sender, some beside torch."""
_HOUSEKEEPING_INTERVAL_S = 5.0
_PRUNE_INTERVAL_S = 3600.0
_kept: list[FileLock] = []
"""The fleet's lock: this process has it until it exits."""
_LOG = logging.getLogger(__name__)


async def ensure_running(paths: FleetPaths) -> bool:
    """Start the fleet's supervisor unless one answers; True if this call started it.

    It survives its parent: own session, output to the supervisor's log. If two processes start one
    at the same time, one of the two supervisors finds the lock taken and exits.

    Raises:
        SkyctlError: it did not come up; the message says why.
    """
    async with RemoteFleet.on_this_machine(paths) as client:
        if await _answers(client):
            return False
        child = _spawn(paths)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await _answers(client):
            ended = child.poll() is not None and not supervisor_running(paths)
            if ended or time.monotonic() > deadline:
                reason = why_it_died(paths.supervisor_log) or "it does not answer"
                raise SkyctlError(
                    f"the supervisor of fleet {paths.name} did not start: {reason}",
                    hint=f"its log is {paths.supervisor_log}",
                )
            await asyncio.sleep(0.05)
        return True


def _spawn(paths: FleetPaths) -> subprocess.Popen[bytes]:
    paths.prepare()
    argv = [sys.executable, "-m", "skyctl.supervisor", "--fleet", paths.name]
    mark_start(paths.supervisor_log, "supervisor", time.time())
    return start_detached(argv, paths, paths.supervisor_log)


async def serve(paths: FleetPaths) -> None:
    """Be the fleet's supervisor until the fleet is down. TERM and INT bring it down.

    The fleet's lock is held until this process exits: a free lock means no supervisor.

    Raises:
        ConflictError: another supervisor holds the fleet.
    """
    paths.prepare()
    load_everything()
    _kept.append(await _lock(paths))
    become_subreaper()
    async with ControlClient() as client:
        with FleetState(paths.database, warn=_log, owner=True) as state:
            supervisor = Supervisor(paths, state, client)
            sweep(paths.staging, state.checkpoints() | needed(state))
            with _socket(paths) as listener:
                await _serve_until_finished(supervisor, listener)


def load_everything() -> None:
    """Import everything this process may ever need: an upgrade replaces the files while it lives,
    and two versions must not mix.
    """
    for package in _PACKAGES:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            elsewhere = any(part in module.name for part in _ELSEWHERE)
            if not elsewhere and not module.name.endswith("__main__"):
                importlib.import_module(module.name)


async def wait_gone(paths: FleetPaths, timeout_s: float = 10.0) -> None:
    """Wait until the supervisor's process has released the fleet, even if another has it then.

    Raises:
        SkyctlError: it has not, after `timeout_s` seconds.
    """
    deadline, its_socket = time.monotonic() + timeout_s, _bound(paths)
    while supervisor_running(paths):
        if (bound := _bound(paths)) is not None and bound != its_socket:
            return
        if time.monotonic() > deadline:
            raise SkyctlError(
                f"the supervisor of fleet {paths.name} does not end",
                hint=f"its log is {paths.supervisor_log}",
            )
        await asyncio.sleep(0.05)


def _bound(paths: FleetPaths) -> tuple[int, int] | None:
    """Tells a supervisor's socket from that of the next."""
    try:
        status = paths.socket.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def become_subreaper() -> None:
    """Let orphaned grandchildren become our children, so that they can be reaped (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def _serve_until_finished(supervisor: Supervisor, listener: socket.socket) -> None:
    config = uvicorn.Config(
        make_app(own_handlers(supervisor), ready=supervisor.readiness),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",  # which it would import
        timeout_graceful_shutdown=2,
    )
    server = QuietServer(config)
    loop = asyncio.get_running_loop()
    listeners = (Listening(supervisor), TrainerListening(supervisor))
    changes = set[asyncio.Task[None]]()

    def planned(plan: FleetPlan) -> None:
        for listening in listeners:
            task = loop.create_task(listening.become(plan))
            changes.add(task)
            task.add_done_callback(changes.discard)

    supervisor.on_plan = planned
    downs: list[asyncio.Task[TakenDown]] = []

    def go_down() -> None:
        if not downs:
            downs.append(loop.create_task(supervisor.down()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, go_down)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    commands = EventCommands(supervisor)
    supervisor.state.on_event = commands.enqueue
    chores = (
        asyncio.create_task(commands.run()),
        asyncio.create_task(keep_house(supervisor)),
        asyncio.create_task(supervisor.scaler.run()),
        asyncio.create_task(_end_without_plan(supervisor)),
    )
    _log(f"supervisor of fleet {supervisor.paths.name} is up (pid {os.getpid()})")
    await supervisor.finished.wait()
    for chore in chores:
        chore.cancel()
    await asyncio.gather(*chores, return_exceptions=True)
    server.should_exit = True
    for listening in listeners:
        await listening.close()
    await serving
    for result in await asyncio.gather(*downs, return_exceptions=True):
        if isinstance(result, BaseException):
            _log(f"down: {result}")
    _log("fleet is down")


async def _end_without_plan(supervisor: Supervisor) -> None:
    """End a supervisor that is given no plan: as long as it lives, no other can take its place."""
    await asyncio.sleep(_UNPLANNED_S)
    if supervisor.plan is None:
        _log("no command said what to run")
        supervisor.finished.set()


async def _lock(paths: FleetPaths) -> FileLock:
    """The fleet's lock, taken. A process that only tests the lock holds it for an instant."""
    lock = FileLock(paths.supervisor_lock, lambda: create_private_file(paths.supervisor_lock))
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while not lock.take():
        if time.monotonic() > deadline:
            lock.close()
            raise ConflictError(f"fleet {paths.name} has a supervisor already")
        await asyncio.sleep(0.02)
    return lock


@contextlib.contextmanager
def _socket(paths: FleetPaths) -> Iterator[socket.socket]:
    """Listen at the fleet's socket path. We hold the lock, so an existing socket there is dead."""
    paths.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        listener.bind(str(paths.socket))
    finally:
        os.umask(umask)
    listener.listen(64)
    try:
        yield listener
    finally:
        listener.close()
        paths.socket.unlink(missing_ok=True)


async def _answers(client: RemoteFleet) -> bool:
    try:
        await client.processes()
    except FleetDownError as error:
        if "stopped" in error.details:  # it lives, and no other can take its place
            raise
        return False
    return True


def _log(line: str) -> None:
    """Write one line to the supervisor's log (its stderr)."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
    sys.stderr.flush()


async def keep_house(supervisor: Supervisor) -> None:
    """Maintain logs, history, state and adapters until cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_keep_adapters(supervisor))
        await _keep_records(supervisor)


async def _keep_records(supervisor: Supervisor) -> None:
    pruned_at = -_PRUNE_INTERVAL_S
    while True:
        try:
            if supervisor.plan is not None:
                await look_after_logs(supervisor.paths, supervisor.plan.config)
            supervisor.state.complete()
            host_of(supervisor.state).reap()
            await supervisor.canaries.tend()
            if time.monotonic() - pruned_at > _PRUNE_INTERVAL_S:
                supervisor.state.prune()
                pruned_at = time.monotonic()
        except Exception:
            _LOG.exception("housekeeping")
        await asyncio.sleep(_HOUSEKEEPING_INTERVAL_S)


async def _keep_adapters(supervisor: Supervisor) -> None:
    """Beside the housekeeping, since servers may take long to write one."""
    while True:
        try:
            await adapters.keep_house(supervisor)
        except Exception:
            _LOG.exception("adapters")
        await asyncio.sleep(_HOUSEKEEPING_INTERVAL_S)


async def look_after_logs(paths: FleetPaths, config: FleetConfig) -> None:
    """Rotate each log of the fleet that is too large, including the supervisor's own."""
    for log in sorted(paths.logs.glob("*.log")):
        await asyncio.to_thread(rotate, log, config.logs.max_size, config.logs.keep)

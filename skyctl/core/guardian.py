"""The guardian of a push: a small process that recovers the fleet if the pusher dies.

pusher ── spawns ──► guardian ── waits for the pusher's death (pidfd); kills one that is stopped
   │ done: one byte         └─► `skyctl recover --yes`
   └─────────────► ends
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from skyctl.errors import StateUnwritable
from skyctl.launch.local.process import start_detached
from skyctl.launch.local.rotation import rotate
from skyctl.startup import is_command
from skyctl.store.owned import own, unforked
from skyctl.store.paths import FleetPaths
from skyctl.store.stopped import STOPPED_S

LOG = "guardian"
_SCRIPT = Path(__file__).with_name("guard_process.py")
_LOG_BYTES = 1024 * 1024
_END_TIMEOUT_S = 2.0


@contextlib.asynccontextmanager
async def guarded(paths: FleetPaths) -> AsyncIterator[None]:
    """While the block runs, the death of this process makes the guardian run `skyctl recover`. A
    command or a supervisor that is stopped for `STOPPED_S` seconds is killed for it.

    If the guardian cannot be started, the push goes on without: recovery by hand remains.
    """
    try:
        guardian = _spawn(paths)
    except (OSError, StateUnwritable):
        yield
        return
    try:
        yield
    finally:
        await asyncio.to_thread(_release, guardian)


def _spawn(paths: FleetPaths) -> subprocess.Popen[bytes]:
    recover = [sys.executable, "-m", "skyctl", "recover", "--fleet", paths.name, "--yes", "--json"]
    rotate(paths.log(LOG), _LOG_BYTES, keep=1)
    stopped_s = STOPPED_S if is_command() else 0.0
    argv = [sys.executable, "-I", "-S", str(_SCRIPT), str(os.getpid()), str(stopped_s), *recover]
    with unforked():
        guardian = start_detached(argv, paths, paths.log(LOG), stdin=subprocess.PIPE)
        assert guardian.stdin is not None  # a pipe
        own(guardian.stdin)
    return guardian


def _release(guardian: subprocess.Popen[bytes]) -> None:
    assert guardian.stdin is not None  # a pipe
    with contextlib.suppress(OSError):  # it is gone
        guardian.stdin.write(b".")
        guardian.stdin.close()
    try:
        guardian.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()

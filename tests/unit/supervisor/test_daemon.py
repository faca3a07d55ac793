"""Waiting for a supervisor's end."""

from __future__ import annotations

import asyncio
import fcntl
from pathlib import Path

import pytest

from skyctl.errors import SkyctlError
from skyctl.store.paths import FleetPaths
from skyctl.supervisor.daemon import wait_gone


@pytest.mark.parametrize("before", [True, False], ids=["it dies", "it has closed its socket"])
async def test_a_supervisor_in_its_place_is_not_taken_for_one_that_does_not_end(
    tmp_path: Path, before: bool
) -> None:
    """The next one waits for the lock, and may have it before anybody sees it free."""
    paths = FleetPaths(tmp_path, "demo")
    paths.prepare()
    if before:
        paths.socket.touch()
    with paths.supervisor_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SkyctlError, match="does not end"):
            await wait_gone(paths, timeout_s=0.1)
        waiting = asyncio.create_task(wait_gone(paths, timeout_s=60.0))
        await asyncio.sleep(0)
        paths.socket.unlink(missing_ok=True)
        paths.socket.touch()
        await asyncio.wait_for(waiting, 5.0)

"""Other processes, by pid."""

from __future__ import annotations

import os
import signal
import time

import psutil


def gone(pid: int) -> bool:
    """Whether it has ended, also if nobody has reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(pid: int) -> None:
    """SIGKILL, and wait until its locks are free: the next command finds nobody at work."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, f"{pid} does not end"
        time.sleep(0.01)

"""Other processes, by pid."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


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


def segments(*pids: int) -> set[Path]:
    """The shared memory that these processes have mapped. A semaphore is mapped under a name that
    it had before, so inodes are compared.
    """
    mapped: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {line.split()[4] for line in lines if " /dev/shm/" in line}
    return {Path(one) for one in os.scandir(SHARED_MEMORY) if str(one.inode()) in mapped}


def abandoned() -> set[Path]:
    """The shared memory that no process has mapped. Other fleets on this machine have theirs."""
    return set(SHARED_MEMORY.iterdir()) - segments(*psutil.pids())

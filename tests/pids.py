"""Other processes, by pid."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
_UNMAPPED_S = 10.0


def gone(pid: int, within_s: float = 0.0) -> bool:
    """Whether every thread of it has ended, also if nobody has reaped it yet. The first may be a
    zombie while others still keep its locks."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)


def kill(pid: int) -> None:
    """SIGKILL, and wait until its locks are free: the next command finds nobody at work."""
    os.kill(pid, signal.SIGKILL)
    assert gone(pid, within_s=10), f"{pid} does not end"


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
    files = {path for path in SHARED_MEMORY.iterdir() if path.is_file()}
    return files - segments(*psutil.pids())


def abandoned_since(before: set[Path]) -> set[Path]:
    """What stays abandoned of all that was not before. Other tests run at the same time: what they
    have just made is not mapped yet."""
    deadline = time.monotonic() + _UNMAPPED_S
    while (remaining := abandoned() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return remaining

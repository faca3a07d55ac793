"""Whether a process is stopped: it lives, keeps its locks, and does nothing.

Standard library only, and run as a file too: by the guardian of a push (`core/guard_process.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

STOPPED_S = 10.0
"""A guardian kills a pusher that stays stopped for so long."""
_STOPPED = ("T", "t")
"""By a signal, or by a debugger (proc_pid_stat(5))."""


def is_stopped(pid: int) -> bool:
    """Whether the kernel has stopped a process (SIGSTOP, Ctrl-Z, a debugger) or frozen its cgroup.
    False for a process that is gone, or where that cannot be read: one that is merely slow never
    counts as stopped.
    """
    with contextlib.suppress(OSError, IndexError):
        # the third field follows the name, which may hold spaces and parentheses
        if _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] in _STOPPED:
            return True
        group = _read(f"/proc/{pid}/cgroup").partition("0::")[2].strip()
        return "frozen 1" in _read(f"/sys/fs/cgroup{group}/cgroup.events")
    return False


def end_stopped(pid: int, still: Callable[[], bool]) -> bool:
    """Kill a process that is stopped, unless it goes on or is gone; whether it was killed. `still`
    says that the pid belongs to the process that is meant: it is asked when the kernel can no
    longer give the pid to another.
    """
    try:
        process = os.pidfd_open(pid)
    except (AttributeError, OSError):  # it is gone; or not Linux
        return False
    try:
        if not (still() and is_stopped(pid)):
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _read(path: str) -> str:
    with open(path) as file:  # noqa: PTH123 - the guardian does not load pathlib
        return file.read()

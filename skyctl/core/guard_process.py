"""The guardian's process: waits for the death of a pusher, then becomes `skyctl recover`.

Run as a file by an interpreter without site packages: it imports nothing of skyctl but
`store/stopped.py`, and costs a few milliseconds and megabytes. Its arguments are the pusher's pid,
for how many seconds that may be stopped, and the command to run. A byte on stdin releases it.

A pusher that is stopped (SIGSTOP, a frozen cgroup) keeps servers frozen and others out. If it is a
command or a supervisor of skyctl, it is killed once it was seen stopped for that long; a trainer
that is not skyctl's (0 seconds) never is.
"""

from __future__ import annotations

import os
import runpy
import select
import sys
from collections.abc import Callable
from pathlib import Path

_CHECK_S = 0.5


def main() -> None:
    pusher, stopped_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        poll.register(os.pidfd_open(pusher), select.POLLIN)
        told_by_kernel = True
    except (AttributeError, OSError):  # not Linux, or already dead
        told_by_kernel = False
    check = _watcher(pusher, stopped_s) if stopped_s else lambda: None
    while os.getppid() == pusher:
        ready = [descriptor for descriptor, _ in poll.poll(_CHECK_S * 1000 if stopped_s else None)]
        if not ready:
            check()
            continue
        if 0 not in ready:
            break
        if os.read(0, 1):
            os._exit(0)  # the end of a push waits for it
        if not told_by_kernel:
            break
        poll.unregister(0)
    os.environ.pop("SKYCTL_KILL_AT", None)
    os.execv(command[0], command)


def _watcher(pusher: int, stopped_s: float) -> Callable[[], None]:
    """Kills a pusher that was stopped at all checks within `stopped_s` seconds. Checks are counted,
    not time: in a suspended container, or on a laptop that sleeps, none are made.
    """
    functions = runpy.run_path(str(Path(__file__).parents[1] / "store" / "stopped.py"))
    is_stopped, end_stopped = functions["is_stopped"], functions["end_stopped"]
    checks = 0

    def check() -> None:
        nonlocal checks
        checks = checks + 1 if is_stopped(pusher) else 0
        if checks * _CHECK_S < stopped_s or not end_stopped(pusher, lambda: os.getppid() == pusher):
            return
        sys.stderr.write(f"pid {pusher} was stopped for {stopped_s:g} s while it pushed: killed\n")
        sys.stderr.flush()

    return check


if __name__ == "__main__":
    main()

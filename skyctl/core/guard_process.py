"""The guardian's process: waits for the death of a pusher, then becomes `skyctl recover`.

Run as a file by an interpreter without site packages: it imports nothing of skyctl, and costs a few
milliseconds and megabytes. Its arguments are the pusher's pid and the command to run. A byte on
stdin releases it.
"""

from __future__ import annotations

import os
import select
import sys


def main() -> None:
    pusher, command = int(sys.argv[1]), sys.argv[2:]
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        poll.register(os.pidfd_open(pusher), select.POLLIN)
        told_by_kernel = True
    except (AttributeError, OSError):  # not Linux, or already dead
        told_by_kernel = False
    while os.getppid() == pusher:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if 0 not in ready:
            break
        if os.read(0, 1):
            os._exit(0)  # the end of a push waits for it
        if not told_by_kernel:
            break
        poll.unregister(0)
    os.environ.pop("SKYCTL_KILL_AT", None)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

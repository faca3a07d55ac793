"""Notices that another process has ended."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

GRACE_S = 5.0
"""What it was in the middle of may still come to its end."""


def when_ended(pids: Sequence[int], act: Callable[[], object]) -> None:
    """Call `act`, in a thread of its own, some seconds after the first of these processes ended.

    Those that cannot be seen, in another container, are not watched.
    """
    descriptors = []
    for pid in pids:
        try:
            descriptors.append(os.pidfd_open(pid))
        except OSError:
            continue

    def wait() -> None:
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll()
        for descriptor in descriptors:
            os.close(descriptor)
        time.sleep(GRACE_S)
        act()

    if descriptors:
        threading.Thread(target=wait, name="skyctl-ended", daemon=True).start()

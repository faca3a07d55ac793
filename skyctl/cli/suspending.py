"""Ctrl-Z in a command: refused while it acts on a fleet, whose servers may be frozen."""

from __future__ import annotations

import os
import signal
import sys

_REFUSED = (
    "not suspended: this command acts on the fleet, and servers may be frozen; cancel: Ctrl-C"
)


def handle_suspend() -> None:
    """Have this process answer Ctrl-Z, unless it was started to ignore it."""
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _suspend)


def _suspend(number: int, frame: object) -> None:
    from skyctl.store.locks import Locks

    if any(Locks.own_of_directory.values()):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{_REFUSED}\n".encode())
        return
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)  # returns when it is let go on
    signal.signal(signal.SIGTSTP, _suspend)

"""Processes of a CPU server that wait for each other without taking a whole core for it.

vLLM's engine and its workers talk through shared memory, and whoever reads there spins for a
second after each message, yielding its core between two looks, before it sleeps
(`shm_broadcast.py`, 0.26 to 0.32). Beside GPUs that costs nothing that is wanted elsewhere. On CPU
the cores are what the other replicas, the router and skyctl compute with. After a pause, every
replica kept a core busy for a second; and on two cores under Linux 6.18 the yielding reader of one
long generation kept other processes from running at all, for seconds: a pause arrived when the
generation had ended. A reader that sleeps between two looks costs a lone generation some speed.
"""

from __future__ import annotations

import inspect
import os
import time

from skyctl.engines.vllm.inside.wire import SPIN_VARIABLE

_PARAMETER = "busy_loop_s"
_BETWEEN_LOOKS_S = 50e-6


def spin_less() -> None:
    """Make readers sleep between two looks, and those created from here on wait for a notice
    sooner, where the environment says so. Where vLLM has changed, nothing happens."""
    seconds = os.environ.get(SPIN_VARIABLE)
    if not seconds:
        return
    try:
        from vllm.distributed.device_communicators import shm_broadcast
    except ImportError:
        return
    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(_BETWEEN_LOOKS_S)
    condition = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None:
        return
    create = condition.__init__
    last = list(inspect.signature(create).parameters)[-1:]
    if last == [_PARAMETER] and len(create.__defaults__ or ()) == 1:
        create.__defaults__ = (float(seconds),)

"""Processes of a CPU server that wait for each other without taking a whole core for it.

vLLM's engine and its workers talk through shared memory, and whoever reads there spins for a
second after each message before it sleeps (`shm_broadcast.py`, 0.26 to 0.32). Beside GPUs that
costs nothing that is wanted elsewhere. On CPU the cores are what the other replicas, the router and
skyctl compute with: after a pause, every replica kept a core busy for a second.
"""

from __future__ import annotations

import inspect
import os

from skyctl.engines.vllm.inside.wire import SPIN_VARIABLE

_PARAMETER = "busy_loop_s"


def spin_less() -> None:
    """Make readers that are created from here on sleep sooner, where the environment says so. Where
    vLLM has changed, nothing happens."""
    seconds = os.environ.get(SPIN_VARIABLE)
    if not seconds:
        return
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        return
    create = SpinCondition.__init__
    last = list(inspect.signature(create).parameters)[-1:]
    if last == [_PARAMETER] and len(create.__defaults__ or ()) == 1:
        create.__defaults__ = (float(seconds),)

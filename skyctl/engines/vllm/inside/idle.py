"""Make the processes of a CPU server wait for each other without taking a whole core.

vLLM's engine and its workers talk through shared memory, and a reader there spins for a second
after each message, yielding its core between polls, before it sleeps (`shm_broadcast.py`, 0.26 to
0.32). On CPU the other replicas, the router and skyctl compute with those cores; and on two cores
under Linux 6.18 the yielding reader of one long generation kept other processes from running at
all, for seconds. A reader that sleeps between polls costs a lone generation some speed.

The progress thread of NIXL, which carries KV caches between servers, polls without pause: its
Python API asks for that. On two cores that kept a server from starting for three minutes.
"""

from __future__ import annotations

import inspect
import os
import time
from typing import Any

from skyctl.wire.messages import SPIN_VARIABLE

_PARAMETER = "busy_loop_s"
_BETWEEN_LOOKS_S = 50e-6
_NIXL_WAITS_US = 1000  # per wait for an event, which ends it early


def spin_less() -> None:
    """Make readers sleep between polls, and those created from here on wait for a notification
    sooner, if the environment says so. A no-op where vLLM has changed.
    """
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


def let_nixl_rest() -> None:
    """Make agents created from here on wait for events instead of polling, if the environment says
    so. May be called more than once.
    """
    if not os.environ.get(SPIN_VARIABLE):
        return
    try:
        from nixl import _api
    except ImportError:
        return
    bindings: Any = getattr(_api, "nixlBind", None)
    create = getattr(bindings, "nixlAgent", None)
    if create is None or getattr(create, "waits_us", None):
        return

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = _NIXL_WAITS_US
        return create(name, config)

    agent.waits_us = _NIXL_WAITS_US  # type: ignore[attr-defined]  # marks it as done
    bindings.nixlAgent = agent

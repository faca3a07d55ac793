"""Named points at which a process kills itself on a test's request.

    SKYCTL_KILL_AT=push.update.sent        the first time that point is reached
    SKYCTL_KILL_AT=push.update.sent:3      the third time
    SKYCTL_KILL_AT=push.update.call:2+15   15 ms after the second time, during what follows
    SKYCTL_KILL_AT=@FILE                   as the file says; the one process that removes it dies

Each point is reached by one kind of process (the process that pushes, the sender, the supervisor, a
command), so that the variable may be inherited by all of them. `POINTS` lists every one.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

VARIABLE = "SKYCTL_KILL_AT"

PUSH = (
    "push.begun",
    "push.guarded",
    "push.prepared",
    "push.staged",
    "push.pause.call",
    "push.pause.done",
    "push.init.done",
    "push.start.call",
    "push.start.done",
    "push.update.call",
    "push.update.sent",
    "push.update.done",
    "push.finish.call",
    "push.finish.done",
    "push.verify.done",
    "push.published",
    "push.resume.call",
    "push.resume.done",
    "push.record",
    "push.recorded",
    "push.ended",
)
"""Points of the process that pushes: the supervisor, or the command for an attached fleet."""

OUT_OF_ROUTER = (
    "push.drain.call",
    "push.drain.done",
    "push.trial.call",
    "push.trial.done",
    "push.part.done",
)
"""Points of the same process, in pushes that take servers out of the router."""

COLOCATED = ("push.woken", "push.awake")
"""Points of the same process, in pushes that wake servers."""

ADAPTERS = (
    "adapters.load.call",
    "adapters.name.call",
    "adapters.unload.call",
    "adapters.commit",
    "adapters.committed",
    "adapters.undo",
)
"""Points of the process that changes adapters: the supervisor, or the command for an attached
fleet.
"""

RANK = (
    "rank.begun",
    "rank.read",
    "rank.placed",
    "rank.sending",
    "rank.written",
    "rank.started",
    "rank.answered",
)
"""Points of a trainer's ranks in a live push; `rank.started` is rank 0's alone, and at
`rank.sending` ranks are in a group with the servers' workers.
"""

SENDER = ("sender.open", "sender.opened", "sender.filled", "sender.release", "sender.join")
SUPERVISOR = (
    "server.intended",
    "server.spawned",
    "server.recorded",
    "server.ready",
    "server.stopping",
    "server.stopped",
    "router.intended",
    "router.spawned",
    "router.recorded",
    "adopt.begin",
    "adopt.done",
    "canary.recorded",
    "recover.begin",
    "down.begin",
    "down.stopped",
)
COMMAND = (
    "up.begin",
    "up.supervised",
    "up.sent",
    "down.asked",
    "verb.asked",
    "verb.answered",
    "sync.asked",
    "sync.begun",
    "scale.asked",
)
SWITCH = ("switch.begin", "switch.sleeping", "switch.asleep", "switch.given", "switch.taken")
"""Points of a switch between fleets that share GPUs: the first and the last of the command, the
others of the supervisor whose fleet falls asleep.
"""
POINTS = (
    *(*PUSH, *OUT_OF_ROUTER, *COLOCATED, *ADAPTERS, *RANK, *SENDER, *SUPERVISOR, *COMMAND),
    *SWITCH,
)


def _parsed(text: str) -> tuple[str, int, float]:
    """Point, the number of times to reach it, and the delay after that in seconds."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text().strip()
        except FileNotFoundError:  # another process died of it
            return "", 1, 0.0
    place, _, delay_ms = text.partition("+")
    point, _, count = place.partition(":")
    if point and point not in POINTS:
        raise ValueError(f"{VARIABLE}: there is no point {point!r}")
    return point, int(count or 1), float(delay_ms or 0) / 1000


_request = os.environ.get(VARIABLE, "")
_point, _remaining, _delay_s = _parsed(_request)


def reached(point: str) -> None:
    """Kill this process if the variable names this point."""
    global _remaining
    if not _point or _point != point:
        return
    _remaining -= 1
    if _remaining != 0 or not _is_ours():
        return
    if _delay_s:
        timer = threading.Timer(_delay_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_ours() -> bool:
    if not _request.startswith("@"):
        return True
    try:
        Path(_request[1:]).unlink()
    except FileNotFoundError:
        return False
    return True

"""One cycle: what is killed, where, and what came of it."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from skyctl.core.registry import supervisor_running
from skyctl.store.paths import FleetPaths

TENSORS_BYTES = 6 * 1024
_REPEATED = {
    "push.update.call": 2,
    "push.update.sent": 2,
    "push.update.done": 1,
    "sender.filled": 1,
    "sender.release": 1,
}
"""Points that a push reaches once per chunk, times servers where that is 2."""

_SUCCESSOR = ("adopt.begin", "adopt.done", "recover.begin")


@dataclass(frozen=True)
class Dice:
    """What a seed decides: how far the point is counted, the delay after it, chunks, the guardian.

    `at` is the value of SKYCTL_KILL_AT. `guardian`: the kill is noticed by the push's own guardian,
    else recovery is started by hand. `fails_at`: the update call on which the first server's worker
    raises, as vLLM leaves it: session closed, half loaded; 0 for none. `successor`: the point at
    which the supervisor dies that recovery by hand started; the same recovery starts another.
    `again`: a trainer that overwrites its directory does so once more before anybody recovers.
    """

    point: str
    seed: int
    at: str
    chunk_bytes: int
    guardian: bool
    fails_at: int = 0
    successor: str = ""
    again: bool = False

    @property
    def transport(self) -> str:
        """Only a collective has ranks that join it."""
        return "gloo" if self.point == "sender.join" else "shm"

    @classmethod
    def thrown(cls, point: str, seed: int, *, guardian_every: int = 10) -> Dice:
        dice = random.Random(f"{point}/{seed}")
        chunk_bytes = dice.choice((512, 1024, 2048))
        chunks = TENSORS_BYTES // chunk_bytes
        count = 1
        if point in _REPEATED:
            count = dice.randint(1, chunks * _REPEATED[point])
        delay_ms = dice.choice((0, 0, dice.randint(1, 25)))
        at = f"{point}:{count}" + (f"+{delay_ms}" if delay_ms else "")
        guardian = point.startswith("push.") and seed % guardian_every == 0
        # before it stands, nobody is there to notice
        guardian = guardian and point != "push.begun"
        fails_at = dice.randint(1, chunks) if dice.random() < 0.25 else 0
        successor = dice.choice(("", "", *_SUCCESSOR))
        again = dice.random() < 0.5
        return cls(point, seed, at, chunk_bytes, guardian, fails_at, successor, again)


@dataclass
class Came:
    """What came of one cycle. Times in seconds, None where there was nothing to measure.

    `detected_s`: from the death of the pusher to the closing of its job; `pushed_s`: the push that
    recovery made; `healed_s`: from the death until every server served again; `seconds`: all of it.
    `successor_killed`: the supervisor that recovery started was killed, too.
    """

    point: str
    seed: int
    killed: bool
    violations: list[str] = field(default_factory=list)
    detected_s: float | None = None
    pushed_s: float | None = None
    healed_s: float | None = None
    guardian: bool = False
    successor_killed: bool = False
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def unsupervised(paths: FleetPaths, *, within_s: float) -> bool:
    """Whether no supervisor holds the fleet any more by then."""
    deadline = time.monotonic() + within_s
    while supervisor_running(paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True

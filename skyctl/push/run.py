"""One push under way: what it was asked, whom it tells, its stopwatch, and its label."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from skyctl.http.client import ControlClient
from skyctl.push.canary import CanaryResult
from skyctl.push.cancel_guard import CancelGuard
from skyctl.push.delivery import Delivery
from skyctl.push.preflight import Prepared
from skyctl.push.request import CarefulObserver, PushFleet, PushRequest
from skyctl.store.expected import Learned
from skyctl.transfer.sender_pool import SenderPool


class Rotation(Protocol):
    """Who receives users' requests, for whoever pushes."""

    async def leave(
        self, names: Collection[str], *, others_serve: bool, closed: bool = False
    ) -> None:
        """Returns once the router sends these servers nothing. `closed`: they refuse users who ask
        them directly, too. Raises SkyctlError, also when `others_serve` is asked for and nobody
        else would be left."""

    async def rejoin(self, names: Collection[str]) -> None:
        """They may be routed to again, if their state allows it. Never raises."""


@dataclass
class Run:
    """One push under way: what it was asked, whom it tells, and its stopwatch."""

    request: PushRequest
    fleet: PushFleet
    client: ControlClient
    observer: CarefulObserver
    clock: Callable[[], float]
    cancel_guard: CancelGuard
    senders: SenderPool
    rotation: Rotation | None = None
    began: float = 0.0
    froze_at: float | None = None
    thawed_at: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    canary: list[CanaryResult] = field(default_factory=list)
    learned: Learned = field(default_factory=Learned)

    @contextmanager
    def stage(self, name: str, *, announced: bool = False) -> Iterator[None]:
        """Time a stage, and tell the observer that it begins unless that was `announced`.

        Raises:
            StateUnwritable: the stage must be on record before it begins, and cannot be.
        """
        if not announced:
            self.observer.stage(name)
        began = self.clock()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + self.clock() - began

    def note(self, message: str) -> None:
        self.notes.append(message)
        self.observer.note(message)


def label_of(run: Run, prepared: Prepared, delivery: Delivery) -> str:
    """The version's label: the user's, else the checkpoint's name and a digest of its content."""
    if run.request.weight_version:
        return run.request.weight_version
    digest = delivery.content_digest or prepared.checkpoint.identity_digest
    return f"{prepared.checkpoint.name}@{digest[:8]}"

"""One push under way, what each of its phases establishes, and how it left each server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from skyctl.errors import PushError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.push.check import Checked
from skyctl.push.request import CarefulObserver, PushFleet, PushRequest, PushResult
from skyctl.push.servers import Holds, PushedServer
from skyctl.push.way import Delivery
from skyctl.states import PushStage, PushState
from skyctl.store.expected import Learned
from skyctl.transfer.sender_pool import SenderPool
from skyctl.units import count_of

if TYPE_CHECKING:
    from skyctl.push.trial_file import TrialResult

T = TypeVar("T")


class Abandoned(asyncio.CancelledError):
    """The push was cancelled, and everything it had done was undone."""


class CancelGuard:
    """Runs one transaction in a task of its own and decides what a cancellation does to it.

    Before `enter` a cancellation ends the push at once. After it, the push is told: it undoes what
    it did or, once bytes were sent, completes. A second cancellation stops it where it is.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._entered = False

    @property
    def cancelled(self) -> bool:
        """Whether the push is to end."""
        return self.requested.is_set()

    def enter(self) -> None:
        """Servers are about to be touched: from here on a cancellation is only a request."""
        self._entered = True

    async def run(self, transaction: Coroutine[Any, Any, T]) -> T:
        """The transaction's result. Raises CancelledError when it was cancelled and undone."""
        task = asyncio.ensure_future(transaction)
        while True:
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.done():  # too late to undo anything: it ends as it has ended
                    return task.result()
                again = self.cancelled
                self.requested.set()
                if again or not self._entered:
                    task.cancel()


class Rotation(Protocol):
    """Controls which servers receive users' requests, for a push."""

    async def take_out(
        self, names: Collection[str], *, others_serve: bool, closed: bool = False
    ) -> None:
        """Return once the router sends these servers nothing. `closed`: they also refuse users who
        ask them directly. Raises SkyctlError, also if `others_serve` is given and no other server
        would be left.
        """

    async def rejoin(self, names: Collection[str]) -> None:
        """They may be routed to again, if their state allows it. Never raises."""


@dataclass
class Stopwatch:
    """The moments of a push, in seconds of `clock`, and its stages."""

    clock: Callable[[], float]
    """Seconds from any beginning."""
    began: float = 0.0
    """When the push began."""
    froze_at: float | None = None
    """When the first pause was sent; None: not yet."""
    thawed_at: float = 0.0
    """When the last resume was answered."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage so far."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the block's time to a stage."""
        began = self.clock()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + self.clock() - began

    @property
    def frozen_s(self) -> float:
        """The freeze window."""
        return 0.0 if self.froze_at is None else self.thawed_at - self.froze_at


@dataclass
class Run:
    """One push under way: what was asked for, what it works with, and what came of it so far."""

    request: PushRequest
    """What is to be pushed, and how."""
    fleet: PushFleet
    """The servers, and the bounds to keep."""
    client: ControlClient
    """Calls the servers."""
    observer: CarefulObserver
    """Is told of everything as it happens."""
    stopwatch: Stopwatch
    """When it began, froze and thawed, and how long each stage took."""
    cancel_guard: CancelGuard
    """Knows whether the push was cancelled."""
    senders: SenderPool
    """Sender processes that outlive a push."""
    rotation: Rotation | None = None
    """Takes servers out of the router; None: there is none."""
    notes: list[str] = field(default_factory=list)
    """Lines the operator should read."""
    trial: list[TrialResult] = field(default_factory=list)
    """Answers to trial prompts."""
    learned: Learned = field(default_factory=Learned)
    """What was found out for later pushes."""

    @contextmanager
    def stage(self, name: str, *, announced: bool = False) -> Iterator[None]:
        """Time a stage, and tell the observer that it begins unless that was `announced`.

        Raises:
            StateUnwritable: the stage must be on record before it begins, and cannot be.
        """
        if not announced:
            self.observer.stage(name)
        with self.stopwatch.stage(name):
            yield

    def note(self, message: str) -> None:
        self.notes.append(message)
        self.observer.note(message)


@dataclass(frozen=True)
class Staged:
    """The weights are where they can be ahead of the freeze; no server was touched."""

    checked: Checked
    delivery: Delivery


@dataclass(frozen=True)
class Frozen(Staged):
    """Every server is paused with an update open, and the journal says that bytes follow."""


@dataclass(frozen=True)
class Delivered(Staged):
    """Each server holds all of the weights, or its record says why not."""

    label: str
    """The version that the servers get."""

    @property
    def content_digest(self) -> str:
        """Over every byte that was sent; "" for ways in which skyctl sends none."""
        return self.delivery.content_digest


@dataclass(frozen=True)
class Verified(Delivered):
    """Each server holds what was sent, and the same as the others, or its record says why not."""


def cut_short(run: Run, servers: Sequence[PushedServer], error: BaseException) -> BaseException:
    """The error to raise when a push ends midway; says which servers must not be resumed.

    An error that already says how each server was left stays as it is.
    """
    if isinstance(error, PushError) and "servers" in error.details:
        return error
    in_doubt = [server for server in servers if server.holds in (Holds.UNKNOWN, Holds.NEW)]
    for server in in_doubt:
        server.failure = server.failure or f"the push was interrupted ({error!r})"
        run.observer.server(server.name, PushState.QUARANTINED, server.failure)
    if isinstance(error, SkyctlError) or not isinstance(error, Exception):
        return error
    return PushError(
        f"the push broke off: {error!r}",
        details={"servers": [server.report().to_json() for server in servers]},
    )


def conclude(run: Run, delivered: Delivered) -> PushResult:
    """The result; raises PushError if a server is not at the new version and thawed."""
    result = result_of(
        run, delivered.checked, delivered.label, content_digest=delivered.content_digest
    )
    behind = [server for server in result.servers if not server.ok]
    if run.observer.failures:
        result.notes.append(f"progress could not be recorded: {run.observer.failures[0]!r}")
    if not behind:
        return result
    for server in behind:
        if server.state == PushState.QUARANTINED:
            run.observer.server(server.server, PushState.QUARANTINED, server.detail)
    updated = [server.server for server in result.servers if server.ok]
    done = f"{', '.join(updated)} at {delivered.label}; " if updated else ""
    stay = ", ".join(f"{server.server} {server.state}" for server in behind)
    raise PushError(
        f"the push failed on {len(behind)} of {count_of(len(result.servers), 'server')}: "
        f"{done}{stay} ({behind[0].detail})",
        hint="skyctl recover",
        details={**result.to_json(), "learned": result.learned},
    )


def result_of(run: Run, checked: Checked, label: str, *, content_digest: str = "") -> PushResult:
    """The result as of now; a dry run has delivered nothing."""
    total = checked.source.whole.bytes
    stages = run.stopwatch.stages
    moving_s = sum(stages.get(name, 0.0) for name in (PushStage.UPDATE, PushStage.FINISH))
    dry = run.request.dry_run
    return PushResult(
        version=label,
        checkpoint=checked.source.path,
        checkpoint_digest=checked.source.identity,
        transport=checked.way.name,
        total_bytes=total,
        chunks=checked.plan.chunks,
        seconds=run.stopwatch.clock() - run.stopwatch.began,
        gb_per_s=total / moving_s / 1e9 if moving_s else 0.0,
        freeze_window_s=run.stopwatch.frozen_s,
        stages=dict(stages),
        servers=[server.report() for server in checked.servers],
        content_digest=content_digest,
        trial=[result.to_json() for result in run.trial],
        notes=list(run.notes),
        compared=_compared(checked),
        layout_share=sum(server.proof.copied for server in checked.servers) / len(checked.servers),
        ranks=run.request.ranks,
        draft=checked.draft_record["draft"],
        draft_digest=checked.draft_record["draft_digest"],
        learned=run.learned.to_json(),
        plan=checked.to_json() if dry else None,
    )


def _compared(checked: Checked) -> dict[str, int] | None:
    """How much of the checkpoint every verified server was seen to hold: the least of them."""
    seen = [
        server.proof.compared
        for server in checked.servers
        if server.proof.compared and server.holds is Holds.VERIFIED
    ]
    if not (seen and checked.source.whole.tensors):
        return None
    least = min(seen, key=lambda compared: compared.bytes)
    return {
        "tensors": least.tensors,
        "of_tensors": checked.source.whole.tensors,
        "bytes": least.bytes,
        "of_bytes": checked.source.whole.bytes,
    }

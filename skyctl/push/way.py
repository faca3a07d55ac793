"""The two halves of what carries weights into servers. A new one is a module that has both.

Way        chosen by `push/check.py` before a server is touched: what it needs of servers and
           machines, what memory it takes, in which order and layout weights travel
Delivery   one attempt by it, driven by `push/transaction.py`

module                          ways                 weights come from
push/sender_way.py              shm ipc gloo nccl    a sender process that reads files
push/senderless_delivery.py     disk                 files that each server reads
push/senderless_delivery.py     a trainer's own      its engine: skyctl sees no byte
push/live_way.py                live                 a trainer's memory, which servers map
push/sibling_way.py             sibling              a server of the fleet that runs them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyctl.errors import ServerError
from skyctl.push.forecast import Forecast
from skyctl.push.frozen import require_paused
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.server_facts import ServerFacts
from skyctl.push.servers import Holds, PushedServer, alive, close_session, each
from skyctl.push.source import Source
from skyctl.transfer.plan import ChunkPlan
from skyctl.transfer.sender_pool import Lease, SenderPool


@dataclass(frozen=True)
class Question:
    """What a way is chosen by."""

    request: PushRequest
    """What was typed."""
    fleet: PushFleet
    """The servers, and the bounds to keep."""
    source: Source
    """The weights."""
    facts: tuple[ServerFacts, ...]
    """What each server reported of itself, in the fleet's order."""
    idle: Lease | None = None
    """The sender of the last push, if it is still alive."""
    names_compared: bool = True
    """Whether the names of its tensors were compared with those of a checkpoint that servers
    loaded."""


@dataclass(frozen=True)
class Plan:
    """What a way is going to do, as far as it is known before the push."""

    chunks: int = 0
    """Chunks to send; 0 where skyctl sends none."""
    memory_bytes: int = 0
    """The most memory that it takes on this machine."""
    notes: tuple[str, ...] = ()
    """Lines the operator should read."""
    forecasts: tuple[Forecast, ...] = ()
    """What each way of staging would take; of a dry run."""
    assumptions: tuple[str, ...] = ()
    """What the forecasts are based on, in words."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Chunk sizes and the largest tensor, as `--dry-run` shows them."""


def sizes_of(plan: ChunkPlan) -> dict[str, int | str]:
    """As `--dry-run` shows them."""
    largest = plan.largest
    return {
        "chunk_size": plan.chunk_size,
        "largest_chunk": plan.slot_bytes,
        "largest_tensor": largest.name,
        "largest_tensor_bytes": largest.nbytes,
    }


class Way(Protocol):
    """A way that fits the servers of a push."""

    @property
    def name(self) -> str:
        """As results and the journal name it."""

    @property
    def reason(self) -> str:
        """Why it was chosen, as the operator reads it."""

    @property
    def reads_every_byte(self) -> bool:
        """Whether skyctl itself reads the weights on their way, and refuses NaN there."""

    @property
    def layout_only_by_loader(self) -> bool:
        """Whether the engine's loader fills the parameters: rows of the files must be compared."""

    async def plan(self, question: Question, servers: Sequence[PushedServer]) -> tuple[Way, Plan]:
        """Settle what depends on what the servers hold; changes nothing.

        Raises:
            PreflightError: it does not fit; says what to change.
        """

    def delivery(self, senders: SenderPool, *, by_loader: bool = False) -> Delivery:
        """A new attempt, with a sender from the pool if it has one. `by_loader`: the weights go
        through the engine's loader, whatever the layout.
        """


class Delivery:
    """One attempt to bring weights into servers; where it is silent, without an update session.

    Each step records a server's failure in its record and goes on with the others. When what sends
    fails, every server fails.
    """

    _fleet: PushFleet
    """The bounds to keep."""
    frees_late: bool = False
    """What it holds on the servers' devices may stay there until they have been resumed."""
    copies: bool = False
    """Servers copy into their parameters, and vLLM's loader could take over."""

    @property
    def can_retry(self) -> bool:
        """Whether servers that failed may be scrubbed and pushed to once more."""
        return False

    @property
    def content_digest(self) -> str:
        """Digest over every byte that servers received; "" when unknown."""
        return ""

    async def open(self, servers: Sequence[PushedServer]) -> None:
        """Do everything that can be done before a server is touched. Raises SkyctlError."""

    async def init(self, servers: Sequence[PushedServer]) -> None:
        """Form a group with the servers, where there is one."""
        return

    async def start(self, servers: Sequence[PushedServer], *, scrubbing: bool = False) -> None:
        """Open an update in each server that is still paused; those that run fail. Here none is
        opened, but one that a dead push has left open is closed.
        """

        async def begin(server: PushedServer) -> None:
            await require_paused(server)
            if server.holds is Holds.UNKNOWN:
                with suppress(ServerError):  # an engine may complain once of what a session lacks
                    await close_session(server)
            if server.holds is Holds.UNKNOWN or server.did.open:
                await close_session(server)

        timeout_s = self._fleet.timeouts.control_s * 3
        await each(alive(servers), begin, timeout_s=timeout_s, call_name="start")

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        """Bring the weights in; `on_progress` gets the bytes that all have so far."""
        raise NotImplementedError

    async def finish(self, servers: Sequence[PushedServer], version: Callable[[], str]) -> None:
        """Close the update; these servers hold the new weights then."""
        for server in alive(servers):
            server.holds = Holds.NEW

    async def close(self) -> None:
        """Release everything; may be called twice."""
        return

"""The servers of one push as it proceeds: how each was found, what it holds, what to undo."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from skyctl.engines.base import Refusal, Server
from skyctl.engines.dialect import Dialect
from skyctl.errors import ServerError, SkyctlError
from skyctl.http.fanout import Outcome, fan_out
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushServer, ServerPush
from skyctl.push.rows import Compared, KnownRows
from skyctl.states import PushState
from skyctl.wire.layouts import Program

T = TypeVar("T")
ENGINE_TIMEOUT_S = 10.0
"""How long an engine may take to answer before it counts as stuck: it may still load the chunk
that a dead push sent it."""


@dataclass
class Spans:
    """Moments of one server's push, in seconds of `clock`. Calls that load may overlap."""

    clock: Callable[[], float] = time.perf_counter
    frozen_at: float | None = None
    thawed_at: float | None = None
    _loads: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wraps a call in which the server takes and loads tensors."""
        began = self.clock()
        try:
            yield
        finally:
            self._loads.append((began, self.clock()))

    @property
    def load_s(self) -> float:
        """Seconds in which at least one such call was under way."""
        total, reached = 0.0, float("-inf")
        for began, ended in sorted(self._loads):
            total += max(0.0, ended - max(began, reached))
            reached = max(reached, ended)
        return total

    @property
    def wait_s(self) -> float:
        """Seconds between the first call and the last in which none was under way: the server
        waited for the sender, or for the slowest server.
        """
        if not self._loads:
            return 0.0
        first = min(began for began, _ in self._loads)
        last = max(ended for _, ended in self._loads)
        return last - first - self.load_s

    @property
    def freeze_s(self) -> float | None:
        """From its own answer to the pause to its own answer to the resume; None without both."""
        if self.frozen_at is None or self.thawed_at is None:
            return None
        return self.thawed_at - self.frozen_at


class Holds(IntEnum):
    """Which weights a server's model holds."""

    OLD = 0
    """The previous weights: nothing was sent."""
    UNKNOWN = 1
    """Parts of several checkpoints: it must not be resumed."""
    NEW = 2
    """Everything was sent, and the server closed the update without complaint."""
    VERIFIED = 3
    """… and it is what was sent, and the same as the others hold."""


@dataclass(frozen=True)
class Before:
    """How a server was found."""

    dialect: Dialect | None = None
    """How tensors are announced to it; None for engines that only reload."""
    world_size: int = 1
    """Its workers: tensor x pipeline x data parallel."""
    paused: bool = False
    """It was paused by another command, and has not run since: it stays paused afterwards."""
    asleep: bool = False
    """It was asleep, and the push is to wake it."""
    empty: bool = False
    """A sleep has discarded its weights, and another program has woken it."""
    version: str | None = None
    """The label of its weights."""
    engine: str = ""
    """The version of its engine and, if known, its arguments."""
    kv_lease_s: float = 0.0
    """It prefills for decode servers, and keeps KV this long; 0 if it does not."""


@dataclass
class Did:
    """What the push has done to a server, so that it can be undone."""

    frozen: bool = False
    """Paused it; set before the call, because its answer may be lost."""
    open: bool = False
    """Opened an update session in it that is not closed yet."""
    woken: bool = False
    """Woke its weights, and not the rest."""
    slept: int | None = None
    """The level at which it was put to sleep, 0 for awake; None if nothing was changed."""
    resumed: bool = False
    """Thawed it."""


@dataclass
class Proof:
    """What is known of the bytes in a server."""

    digest_before: str = ""
    """The digest of its weights before the push; "" if it was not computed."""
    digest: str = ""
    """The digest after it."""
    compared: Compared | None = None
    """How much of the checkpoint it was seen to hold afterwards."""
    draft_digest: str = ""
    """The digest of what it drafts tokens with, after the push; "" if it was not computed."""
    copied: bool = False
    """It copied the weights in the runtime layout; the engine's loader did not fill them."""
    expected: list[tuple[Program, dict[str, int]]] = field(default_factory=list)
    """By rank, the numbers that its parameters must have (`push/layouts.py`); [] if unknown."""
    rows: tuple[KnownRows, ...] = ()
    """Rows of what it received that its parameters must hold; () where files have them."""


@dataclass
class PushedServer:
    """One server in a push."""

    given: PushServer
    """What the fleet knows of it."""
    control: Server
    """Its control routes."""
    before: Before = field(default_factory=Before)
    """How it was found."""
    holds: Holds = Holds.OLD
    """Which weights it holds now."""
    did: Did = field(default_factory=Did)
    """What has to be undone."""
    proof: Proof = field(default_factory=Proof)
    """What is known of the bytes that it holds."""
    failure: str = ""
    """Why it takes no further part; "" as long as it does."""
    version: str | None = None
    """The label that the push gave it; None: the one it had."""
    spans: Spans = field(default_factory=Spans)
    """When it was frozen, and when it loaded."""
    generated: int | None = None
    """The tokens that it had generated when it was frozen; None where its guard keeps it frozen."""
    intend: Callable[[Mapping[str, PushState]], None] = lambda states: None
    """Puts its state on record before it is acted upon."""

    @property
    def name(self) -> str:
        return self.given.name

    @property
    def target(self) -> ServerTarget:
        return self.given.target

    @property
    def dialect(self) -> Dialect:
        """How tensors are announced to it. Engines that only reload have none."""
        assert self.before.dialect is not None
        return self.before.dialect

    def report(self) -> ServerPush:
        """How the push leaves this server."""
        did, before = self.did, self.before
        safe = self.holds in (Holds.OLD, Holds.VERIFIED)
        if not safe:
            state = PushState.QUARANTINED
        elif did.slept or (before.asleep and did.slept is None):
            state = PushState.ASLEEP
        elif did.resumed or not (did.frozen or before.paused):
            state = PushState.READY
        else:
            state = PushState.PAUSED
        return ServerPush(
            server=self.name,
            ok=safe and not self.failure,
            state=state,
            version=(self.version or before.version) if safe else None,
            weights_digest=self.proof.digest if self.holds is Holds.VERIFIED else "",
            detail=self.failure,
            sleep_level=did.slept,
            weights_awake=did.woken,
            freeze_s=self.spans.freeze_s,
            load_s=self.spans.load_s,
            wait_s=self.spans.wait_s,
        )


async def ask_all(
    servers: Sequence[PushedServer],
    ask: Callable[[PushedServer], Awaitable[T]],
    *,
    timeout_s: float,
) -> list[Outcome[T]]:
    """`fan_out` to the servers of these servers, in their order."""
    by_target = {server.target: server for server in servers}
    targets = [server.target for server in servers]
    return await fan_out(targets, lambda target: ask(by_target[target]), timeout_s=timeout_s)


async def each(
    servers: Sequence[PushedServer],
    call: Callable[[PushedServer], Awaitable[T]],
    *,
    timeout_s: float,
    call_name: str,
) -> list[Outcome[T]]:
    """Call every server and wait for all; those that fail get a `failure` that names `what`.

    No call's exception escapes: all calls have ended before anything else is done.
    """

    async def ask(server: PushedServer) -> T:
        try:
            return await call(server)
        except SkyctlError:
            raise
        except Exception as error:
            raise ServerError(f"{server.name}: {error!r}") from error

    outcomes = await ask_all(servers, ask, timeout_s=timeout_s)
    for server, outcome in zip(servers, outcomes, strict=True):
        if not outcome.ok and not server.failure:
            server.failure = f"{call_name}: {outcome.detail}"
    return outcomes


async def all_or_none(
    servers: Sequence[PushedServer],
    call: Callable[[PushedServer], Awaitable[T]],
    *,
    timeout_s: float,
    call_name: str,
) -> str:
    """`each`, of servers to which nothing has happened yet: if one fails none counts as failed, and
    the reason is returned; "" if all got ready.
    """
    await each(servers, call, timeout_s=timeout_s, call_name=call_name)
    reasons = [f"{server.name}: {server.failure}" for server in servers if server.failure]
    for server in servers if reasons else ():
        server.failure = ""
    return reasons[0] if reasons else ""


def alive(servers: Sequence[PushedServer]) -> list[PushedServer]:
    """The servers that still take part."""
    return [server for server in servers if not server.failure]


async def open_session(server: PushedServer) -> None:
    """Start an update. A session that an earlier pusher left behind is closed first.

    A start that fails once may be due to such a session, or to layers it left half loaded; the
    weights are unknown then. The session is open afterwards.
    """
    server.did.open = True  # before the call: if its answer is lost, it may be open
    try:
        await server.control.start_weight_update()
    except ServerError as error:
        if not error.status:
            raise  # no answer: whether it started is unknown, and asking again changes nothing
        if await _close_leftover(server):
            server.holds = Holds.UNKNOWN
        try:
            await server.control.start_weight_update()
        except ServerError:
            raise error from None  # one that could not be closed may still be open
        server.holds = Holds.UNKNOWN


async def close_session(server: PushedServer) -> None:
    """Finish an update into which nothing was sent: the server goes on with its old weights.

    Until then its layers are empty: if this fails, it must not be resumed.
    """
    try:
        await server.control.finish_weight_update()
    except ServerError as error:
        if error.refusal not in (Refusal.NO_SESSION, Refusal.NO_TRANSFER):
            server.holds = Holds.UNKNOWN
            raise
    server.did.open = False


async def _close_leftover(server: PushedServer) -> bool:
    """Finish a session that may be open; returns whether there was one.

    An engine may complain once about what a session lacks and still keep it open: it is asked
    twice.
    """
    for _ in range(2):
        try:
            await server.control.finish_weight_update()
        except ServerError as error:
            if not error.status:
                raise
        else:
            return True
    return False


async def scrub(server: PushedServer) -> None:
    """Bring a half-updated server to where a full push can begin: start, finish, start.

    Finishing with nothing loaded takes layers off the meta device; without it a further push could
    build on what the broken one left (vLLM clears its session flag, not its layers).
    """
    await open_session(server)
    await server.control.finish_weight_update()
    await server.control.start_weight_update()


async def responsive(
    servers: Sequence[PushedServer], *, control_timeout_s: float, paused: bool = False
) -> list[PushedServer]:
    """The servers whose engine answers, and is `paused` if it must be. The others are stuck or
    dead: only a restart helps them.
    """
    timeout_s = min(control_timeout_s, ENGINE_TIMEOUT_S)
    outcomes = await ask_all(
        servers, lambda server: server.control.is_paused(), timeout_s=timeout_s
    )
    return [
        server
        for server, outcome in zip(servers, outcomes, strict=True)
        if outcome.ok and (outcome.value or not paused)
    ]

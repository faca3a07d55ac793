"""The servers of one push as it proceeds: what each is known to hold, and why it dropped out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from skyctl.engines.base import Dialect, Refusal, Server
from skyctl.errors import ServerError, SkyctlError
from skyctl.http.fanout import Outcome, fan_out
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushServer, ServerPush
from skyctl.push.rows import Compared
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


class Weights(IntEnum):
    """Which weights a server's model holds."""

    OLD = 0  # the previous weights: nothing was sent
    UNKNOWN = 1  # parts of several checkpoints: must not be resumed
    NEW = 2  # everything was sent, and the server closed the update without complaint
    VERIFIED = 3  # … and it agrees with the others


@dataclass
class Site:
    """One server in a push. `was_paused` is how it was found; `paused` whether we froze it.
    `engine` is the version of its engine and, if known, its arguments. `kv_lease_s`: it prefills
    for decode servers, and keeps KV this long (`StartedWith`).

    `digest_before` is the digest of its weights before the push, "" if nobody computed it; `digest`
    the one after it, `compared` how much of the checkpoint they were seen to hold. `expected` has,
    by rank, the numbers of its parameters (`push/layouts.py`), [] if unknown; `copied`: they were
    filled in the runtime layout, not by vLLM's loader. `open` is true while an update session is
    open in the server. `failure` is "" as long as the server takes part. `asleep` is how it was
    found, too; `woken`: we woke its weights, and not the rest; `slept` is the level at which we
    left it, 0 for awake, None if nothing was changed.
    """

    server: PushServer
    vllm: Server
    dialect: Dialect | None
    world_size: int
    was_paused: bool
    old_version: str | None
    engine: str = ""
    kv_lease_s: float = 0.0
    frozen: bool = False
    open: bool = False
    weights: Weights = Weights.OLD
    failure: str = ""
    version: str | None = None
    digest_before: str = ""
    digest: str = ""
    compared: Compared | None = None
    expected: list[tuple[Program, dict[str, int]]] = field(default_factory=list)
    copied: bool = False
    resumed: bool = False
    asleep: bool = False
    woken: bool = False
    slept: int | None = None
    spans: Spans = field(default_factory=Spans)

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def target(self) -> ServerTarget:
        return self.server.target

    @property
    def spoken(self) -> Dialect:
        """How tensors are announced to it. Engines that only reload have no dialect."""
        assert self.dialect is not None
        return self.dialect

    def report(self) -> ServerPush:
        """How the push leaves this server."""
        safe = self.weights in (Weights.OLD, Weights.VERIFIED)
        if not safe:
            state = PushState.QUARANTINED
        elif self.slept or (self.asleep and self.slept is None):
            state = PushState.ASLEEP
        elif self.resumed or not (self.frozen or self.was_paused):
            state = PushState.READY
        else:
            state = PushState.PAUSED
        version = (
            self.old_version if self.weights is Weights.OLD else self.version if safe else None
        )
        return ServerPush(
            server=self.name,
            ok=safe and not self.failure,
            state=state,
            version=version,
            weights_digest=self.digest if self.weights is Weights.VERIFIED else "",
            detail=self.failure,
            sleep_level=self.slept,
            weights_awake=self.woken,
            freeze_s=self.spans.freeze_s,
            load_s=self.spans.load_s,
            wait_s=self.spans.wait_s,
        )


async def ask_all(
    sites: Sequence[Site], ask: Callable[[Site], Awaitable[T]], *, timeout_s: float
) -> list[Outcome[T]]:
    """`fan_out` to the servers of these sites, in their order."""
    by_target = {site.target: site for site in sites}
    targets = [site.target for site in sites]
    return await fan_out(targets, lambda target: ask(by_target[target]), timeout_s=timeout_s)


async def each(
    sites: Sequence[Site], call: Callable[[Site], Awaitable[T]], *, timeout_s: float, what: str
) -> list[Outcome[T]]:
    """Call every site at once and wait for all; those that fail get a `failure` that names `what`.

    No call's exception escapes: siblings must settle before anything else is done.
    """

    async def one(site: Site) -> T:
        try:
            return await call(site)
        except SkyctlError:
            raise
        except Exception as error:
            raise ServerError(f"{site.name}: {error!r}") from error

    outcomes = await ask_all(sites, one, timeout_s=timeout_s)
    for site, outcome in zip(sites, outcomes, strict=True):
        if not outcome.ok and not site.failure:
            site.failure = f"{what}: {outcome.detail}"
    return outcomes


def alive(sites: Sequence[Site]) -> list[Site]:
    """The sites that still take part."""
    return [site for site in sites if not site.failure]


async def require_paused(site: Site) -> None:
    """Raise ServerError if a server that must be frozen is not: it would answer from a half-loaded
    model. A sleeping server answers nobody.
    """
    if not site.asleep and not await site.vllm.is_paused():
        raise ServerError(
            f"{site.name} is not paused: somebody else resumed it, or started it anew"
        )


async def open_session(site: Site) -> None:
    """Start an update. A session that an earlier pusher left behind is closed first.

    A start that fails once may be due to such a session, or to layers it left half loaded; the
    weights are unknown then. The session is open afterwards.
    """
    site.open = True  # before the call: if its answer is lost, it may be open
    try:
        await site.vllm.start_weight_update()
    except ServerError as error:
        if not error.status:
            raise  # no answer: whether it started is unknown, and asking again changes nothing
        if await _close_leftover(site):
            site.weights = Weights.UNKNOWN
        try:
            await site.vllm.start_weight_update()
        except ServerError as again:
            site.open = not again.status
            raise error from None
        site.weights = Weights.UNKNOWN


async def close_session(site: Site) -> None:
    """Finish an update into which nothing was sent: the server goes on with its old weights.

    Until then its layers are empty: if this fails, it must not be resumed.
    """
    try:
        await site.vllm.finish_weight_update()
    except ServerError as error:
        if error.refusal not in (Refusal.NO_SESSION, Refusal.NO_TRANSFER):
            site.weights = Weights.UNKNOWN
            raise
    site.open = False


async def _close_leftover(site: Site) -> bool:
    """Finish a session that may be open; returns whether there was one.

    An engine may complain once about what a session lacks and still keep it open: it is asked
    twice.
    """
    for _ in range(2):
        try:
            await site.vllm.finish_weight_update()
        except ServerError as error:
            if not error.status:
                raise
        else:
            return True
    return False


async def scrub(site: Site) -> None:
    """Bring a half-updated server to where a full push can begin: start, finish, start.

    Finishing with nothing loaded takes layers off the meta device; without it a further push could
    build on what the broken one left (vLLM clears its session flag, not its layers).
    """
    site.open = False
    await open_session(site)
    await site.vllm.finish_weight_update()
    site.open = False
    await site.vllm.start_weight_update()
    site.open = True


async def responsive(
    sites: Sequence[Site], *, control_timeout_s: float, paused: bool = False
) -> list[Site]:
    """The sites whose engine answers, and is `paused` if it must be. The others are stuck or dead:
    only a restart helps them.
    """
    timeout_s = min(control_timeout_s, ENGINE_TIMEOUT_S)
    outcomes = await ask_all(sites, lambda site: site.vllm.is_paused(), timeout_s=timeout_s)
    return [
        site
        for site, outcome in zip(sites, outcomes, strict=True)
        if outcome.ok and (outcome.value or not paused)
    ]

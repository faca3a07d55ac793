"""Freeze and thaw a whole fleet: one concurrent call and one outcome per server.

A call whose answer was lost (deadline, broken connection) may have been carried out. It is never
repeated; the server's state is read instead, and the outcome says what is known:

    call sent ── answer ──────────────► OK or FAILED, as answered
        └─ lost ── state read ── done ► OK, "… answer lost; state read back"
                        ├─ not done ──► TIMEOUT / UNREACHABLE, "… not paused"
                        └─ no answer ─► TIMEOUT / UNREACHABLE, "… state unknown"
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from skyctl import engines
from skyctl.engines.base import Feature, Server
from skyctl.errors import ServerError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, OutcomeStatus, fan_out
from skyctl.http.target import ServerTarget
from skyctl.states import PauseMode

T = TypeVar("T")

READ_BACK_TIMEOUT_S = 5.0
CPU_SLEEP_DETAIL = "state only: a CPU server frees no memory"

_ReadBack = Callable[[Server], Awaitable[tuple[bool, str]]]
"""Reads a server's state: whether the call is done, and the state in words."""

_LOST = (OutcomeStatus.TIMEOUT, OutcomeStatus.UNREACHABLE)


@dataclass
class _PauseProgress:
    """How far one server's pause got. `was_paused`, before the call, and `paused_now` are None
    where that state could not be read.
    """

    was_paused: bool | None = None
    sent: bool = False
    paused_now: bool | None = None


async def pause(
    client: ControlClient,
    targets: Sequence[ServerTarget],
    *,
    mode: PauseMode = "abort",
    clear_cache: bool = True,
    timeout_s: float = 30.0,
    keep_partial: bool = False,
    unfit: Collection[str] = (),
    read_back_timeout_s: float = READ_BACK_TIMEOUT_S,
) -> list[Outcome[bool]]:
    """Pause every server, each within `timeout_s` seconds; outcomes in the order of `targets`.
    Prefill servers are paused before the others. The value is True for a server that may be frozen,
    or become so, though it was to be resumed.

    If some servers paused and some did not, those that this call paused are resumed (status
    rolled-back), unless `keep_partial`; so are those that take no new requests because a wait ran
    out of time. A server that was already paused stays paused, and so does one named in `unfit`:
    what it holds must not answer. Reading a state back and rolling
    back take at most `read_back_timeout_s` seconds each.
    """
    progress = {target.name: _PauseProgress() for target in targets}

    async def pause_target(target: ServerTarget) -> bool:
        mine, server = progress[target.name], engines.server(client, target, timeout_s=timeout_s)
        # asked first, so that a rollback never resumes a server that another client paused
        mine.was_paused = await server.is_paused()
        mine.sent = True
        await server.pause(mode, clear_cache=clear_cache)
        mine.paused_now = True
        return False

    async def read_back_pause(target: ServerTarget, outcome: Outcome[bool]) -> Outcome[bool]:
        """Find out the result of a lost pause, and keep it for a rollback."""
        mine = progress[target.name]
        if outcome.status not in _LOST:
            return outcome.noting("was paused already") if mine.was_paused else outcome
        if not mine.sent:
            return outcome.noting("not asked to pause: its state could not be read")

        async def read_back(server: Server) -> tuple[bool, str]:
            mine.paused_now = await server.is_paused()
            if not mine.paused_now:
                return False, "not paused"
            if mode == "wait":
                return False, "takes no new requests, but running ones have not ended"
            return True, "paused"

        return await _resolve_lost(client, target, outcome, read_back, read_back_timeout_s, False)

    outcomes = await _in_turn(targets, pause_target, timeout_s)
    outcomes = await _each(targets, outcomes, read_back_pause)
    if keep_partial or all(o.ok for o in outcomes):
        return outcomes
    culprit = next(o.server for o in outcomes if not o.ok)
    return await _each(
        targets,
        outcomes,
        lambda t, o: _roll_back(
            client, t, o, progress[t.name], culprit, read_back_timeout_s, unfit=t.name in unfit
        ),
    )


async def resume(
    client: ControlClient,
    targets: Sequence[ServerTarget],
    *,
    timeout_s: float = 30.0,
    read_back_timeout_s: float = READ_BACK_TIMEOUT_S,
) -> list[Outcome[None]]:
    """Resume every server, each within `timeout_s` seconds."""

    async def read_back(server: Server) -> tuple[bool, str]:
        paused = await server.is_paused()
        return not paused, "still paused" if paused else "resumed"

    def call(target: ServerTarget) -> Awaitable[None]:
        return engines.server(client, target, timeout_s=timeout_s).resume()

    outcomes = await fan_out(targets, call, timeout_s=timeout_s)
    return await _resolved(client, targets, outcomes, read_back, read_back_timeout_s)


async def sleep(
    client: ControlClient,
    targets: Sequence[ServerTarget],
    *,
    level: int = 1,
    timeout_s: float = 60.0,
    device: str = "",
    partly: Collection[str] = (),
    read_back_timeout_s: float = READ_BACK_TIMEOUT_S,
) -> list[Outcome[None]]:
    """Put every server to sleep at `level` (1 keeps weights in host memory, 2 discards them).

    Those named in `partly` sleep, and their weights do not: engines ignore a sleep while any part
    is asleep, so the rest is woken first. With `device` "cpu" the outcomes say that only the state
    changes.

    Raises:
        UsageError: its engine has no sleep.
    """

    async def sleep_target(target: ServerTarget) -> None:
        server = engines.server(client, target, timeout_s=timeout_s)
        if target.name in partly:
            await server.wake(["kv_cache"])
        await server.sleep(level)

    async def read_back(server: Server) -> tuple[bool, str]:
        if not await server.is_sleeping():
            return False, "not asleep"
        # is_sleeping is true for a mere pause as well: the metrics have the level
        current = (await server.metrics()).sleep_level
        if current == level:
            return True, f"asleep at level {level}"
        return False, "paused, and not known to be asleep"

    _require_sleep(targets)
    outcomes = await _in_turn(targets, sleep_target, timeout_s)
    outcomes = await _resolved(client, targets, outcomes, read_back, read_back_timeout_s)
    if device != "cpu":
        return outcomes
    return [o.noting(CPU_SLEEP_DETAIL) if o.ok else o for o in outcomes]


async def _in_turn(
    targets: Sequence[ServerTarget], call: Callable[[ServerTarget], Awaitable[T]], timeout_s: float
) -> list[Outcome[T]]:
    """Call prefill servers, then the others: a prefill server answers once the decode servers,
    which still run, have fetched the KV cache that waits there.
    """
    outcomes: dict[str, Outcome[T]] = {}
    for first in (True, False):
        part = [target for target in targets if (target.role == "prefill") is first]
        for outcome in await fan_out(part, call, timeout_s=timeout_s) if part else ():
            outcomes[outcome.server] = outcome
    return [outcomes[target.name] for target in targets]


def _require_sleep(targets: Sequence[ServerTarget]) -> None:
    for name in {target.engine for target in targets}:
        engines.require(name, Feature.SLEEP)


async def wake(
    client: ControlClient,
    targets: Sequence[ServerTarget],
    *,
    tags: Sequence[str] = (),
    timeout_s: float = 60.0,
    read_back_timeout_s: float = READ_BACK_TIMEOUT_S,
) -> list[Outcome[bool]]:
    """Wake every server, entirely or only `tags`. The value says whether it is entirely awake.

    A full wake also resumes a server that was paused before it slept: the caller, who recorded the
    intended state, pauses it again. The caller also decides whether waking is safe
    (`core/verbs.py`).
    """

    async def read_back(server: Server) -> tuple[bool, str]:
        if await server.is_sleeping():
            # after a successful partial wake the server is still asleep as well
            return False, "still asleep, or awake in part" if tags else "still asleep"
        return True, "awake"

    _require_sleep(targets)

    def call(target: ServerTarget) -> Awaitable[bool]:
        return engines.server(client, target, timeout_s=timeout_s).wake(tags)

    outcomes = await fan_out(targets, call, timeout_s=timeout_s)
    outcomes = [
        o.noting(f"awake in part: {', '.join(tags)}") if o.ok and tags and o.value is False else o
        for o in outcomes
    ]
    return await _resolved(client, targets, outcomes, read_back, read_back_timeout_s, done=True)


async def _roll_back(
    client: ControlClient,
    target: ServerTarget,
    outcome: Outcome[bool],
    progress: _PauseProgress,
    culprit: str,
    timeout_s: float,
    *,
    unfit: bool,
) -> Outcome[bool]:
    """Resume a server that this pause froze, or may have frozen, unless it is unfit to answer."""
    if not progress.sent or progress.was_paused or progress.paused_now is False:
        return outcome
    if outcome.status is OutcomeStatus.FAILED:
        return outcome  # it answered that it did not pause
    if unfit:
        paused = replace(outcome, status=OutcomeStatus.FAILED) if outcome.ok else outcome
        return paused.noting(f"not resumed though {culprit} did not pause: it is quarantined")
    try:
        await engines.server(client, target, timeout_s=timeout_s).resume()
    except SkyctlError as error:
        still = "may still be paused" if progress.paused_now is None else "is still paused"
        status = OutcomeStatus.FAILED if outcome.ok else outcome.status
        failed = replace(outcome, status=status, value=True)
        return failed.noting(f"{still}; resuming it failed: {error.message}")
    if not outcome.ok:
        return outcome.noting("resumed again")
    return replace(
        outcome,
        status=OutcomeStatus.ROLLED_BACK,
        detail=f"paused, then resumed because {culprit} did not pause",
    )


async def _resolved(
    client: ControlClient,
    targets: Sequence[ServerTarget],
    outcomes: Sequence[Outcome[T]],
    read_back: _ReadBack,
    timeout_s: float,
    *,
    done: T | None = None,
) -> list[Outcome[T]]:
    """Settle every outcome. `done` is the value of a call that turns out to be done."""

    async def resolve(target: ServerTarget, outcome: Outcome[T]) -> Outcome[T]:
        return await _resolve_lost(client, target, outcome, read_back, timeout_s, done)

    return await _each(targets, outcomes, resolve)


async def _resolve_lost(
    client: ControlClient,
    target: ServerTarget,
    outcome: Outcome[T],
    read_back: _ReadBack,
    timeout_s: float,
    value: T | None = None,
) -> Outcome[T]:
    """Replace an outcome whose answer was lost by what the server's state shows."""
    if outcome.status not in _LOST:
        return outcome
    server = engines.server(client, target, timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            done, state = await read_back(server)
    except (TimeoutError, ServerError):
        return outcome.noting("state unknown")
    if not done:
        return outcome.noting(state)
    return replace(
        outcome,
        status=OutcomeStatus.OK,
        detail=f"{state}; the answer was lost, the state was read back",
        value=value,
    )


async def _each(
    targets: Sequence[ServerTarget],
    outcomes: Sequence[Outcome[T]],
    step: Callable[[ServerTarget, Outcome[T]], Awaitable[Outcome[T]]],
) -> list[Outcome[T]]:
    pairs = zip(targets, outcomes, strict=True)
    return list(await asyncio.gather(*(step(target, outcome) for target, outcome in pairs)))

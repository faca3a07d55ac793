"""Run one call against every server at once and return one outcome per server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from skyctl.errors import (
    DeadlineExceeded,
    PartialFailure,
    ServerError,
    ServerUnreachable,
    SkyctlError,
)
from skyctl.http.target import ServerTarget
from skyctl.units import count_of

T = TypeVar("T")


class OutcomeStatus(StrEnum):
    """How one server's call ended."""

    OK = "ok"
    FAILED = "failed"  # the server answered with an error
    TIMEOUT = "timeout"  # no answer within the deadline; state unknown
    UNREACHABLE = "unreachable"  # no connection, or it broke
    SKIPPED = "skipped"  # not asked; `detail` says why
    ROLLED_BACK = "rolled-back"  # it succeeded, and was undone because others failed


_NOT_FAILED = (OutcomeStatus.OK, OutcomeStatus.SKIPPED, OutcomeStatus.ROLLED_BACK)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of one server's call."""

    server: str
    """The server's name."""
    status: OutcomeStatus
    """How the call ended."""
    elapsed_ms: float
    """Wall time in milliseconds."""
    detail: str = ""
    """The reason, for people."""
    value: T | None = None
    """What the call returned, None unless it did."""

    @property
    def ok(self) -> bool:
        return self.status is OutcomeStatus.OK

    def noting(self, more: str) -> Outcome[T]:
        """The outcome with more detail."""
        return replace(self, detail=f"{self.detail}; {more}" if self.detail else more)

    def to_json(self) -> dict[str, Any]:
        """Keys: server, status, elapsed_ms, detail."""
        return {
            "server": self.server,
            "status": self.status.value,
            "elapsed_ms": round(self.elapsed_ms, 1),
            "detail": self.detail,
        }


async def fan_out(
    targets: Sequence[ServerTarget],
    call: Callable[[ServerTarget], Awaitable[T]],
    *,
    timeout_s: float,
) -> list[Outcome[T]]:
    """Call every target concurrently, all under one deadline of `timeout_s` seconds.

    Never raises for a server's failure: one server's error hides no other's result. Outcomes are
    in the order of `targets`.
    """
    began = time.perf_counter()

    def ended(
        target: ServerTarget, status: OutcomeStatus, detail: str = "", value: T | None = None
    ) -> Outcome[T]:
        elapsed_ms = (time.perf_counter() - began) * 1000
        # errors begin with the server's name, and so does every display of an outcome
        detail = detail.removeprefix(f"{target.name}: ")
        return Outcome(target.name, status, elapsed_ms, detail, value)

    async def outcome_of(target: ServerTarget) -> Outcome[T]:
        try:
            return ended(target, OutcomeStatus.OK, value=await call(target))
        except (TimeoutError, DeadlineExceeded):
            return ended(target, OutcomeStatus.TIMEOUT, late)
        except ServerUnreachable as error:
            return ended(target, OutcomeStatus.UNREACHABLE, error.message)
        except SkyctlError as error:
            return ended(target, OutcomeStatus.FAILED, error.message)

    late = f"no answer in {timeout_s:g} s"
    tasks = [asyncio.create_task(outcome_of(target)) for target in targets]
    pending = set(tasks)
    try:
        if tasks:  # one timer for all: one for each would cost as much as a tenth of its call
            _, pending = await asyncio.wait(tasks, timeout=timeout_s)
    finally:  # also if the caller was cancelled: nothing may go on unobserved
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
    return [
        ended(target, OutcomeStatus.TIMEOUT, late)
        if task in pending and task.cancelled()
        else task.result()
        for target, task in zip(targets, tasks, strict=True)
    ]


def require_all(outcomes: Sequence[Outcome[T]], verb: str) -> None:
    """Raise unless the call succeeded on every server (or was skipped).

    Raises:
        PartialFailure: some servers succeeded and some did not.
        ServerError: none did (DeadlineExceeded if all of them ran out of time).
    """
    error = failure(outcomes, verb)
    if error is not None:
        raise error


def failure(outcomes: Sequence[Outcome[T]], verb: str) -> SkyctlError | None:
    """The error that `require_all` raises for these outcomes; None without failures."""
    failed = [o for o in outcomes if o.status not in _NOT_FAILED]
    if not failed:
        return None
    first = failed[0]
    message = (
        f"{verb}: {len(failed)} of {count_of(len(outcomes), 'server')} failed "
        f"({first.server}: {first.detail or first.status.value})"
    )
    details = {"outcomes": [o.to_json() for o in outcomes]}
    hint = "what state each server is in: skyctl status"
    if len(failed) < len(outcomes):
        return PartialFailure(message, outcomes=outcomes, hint=hint, details=details)
    if all(o.status is OutcomeStatus.TIMEOUT for o in failed):
        return DeadlineExceeded(message, hint=hint, details=details)
    return ServerError(message, hint=hint, details=details)

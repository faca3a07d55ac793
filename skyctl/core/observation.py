"""What each server answers now, for the diagnosis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from skyctl import engines
from skyctl.core.health import sleep_level
from skyctl.errors import ServerError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import fan_out
from skyctl.http.target import ServerTarget
from skyctl.push.servers import ENGINE_TIMEOUT_S
from skyctl.states import ReplicaState

HTTP_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Observed:
    """One server as it answers now."""

    server: str
    """Its name."""
    state: ReplicaState | None = None
    """What its supervisor shows; None without one."""
    http: bool = True
    """Its front end answers."""
    engine: bool = True
    """Its engine core answers."""
    paused: bool = False
    """It says that it is paused."""
    sleep_level: int = 0
    """By its metrics, 0 awake: a sleeping server reports that it is paused as well, unless it was
    resumed meanwhile, which does not wake it."""
    version: str | None = None
    """The label it carries; None if it has none."""
    problem: str = ""
    """What did not answer."""
    version_problem: str = ""
    """Why the label is not known."""


async def observe(
    client: ControlClient,
    targets: Sequence[ServerTarget],
    *,
    engine_timeout_s: float = ENGINE_TIMEOUT_S,
) -> list[Observed]:
    """Ask all servers at once, for at most `engine_timeout_s` seconds."""

    async def ask(target: ServerTarget) -> Observed:
        near = engines.server(client, target, timeout_s=HTTP_TIMEOUT_S)
        patient = engines.server(client, target, timeout_s=engine_timeout_s)
        health, paused, version, level = await asyncio.gather(
            near.health(),
            patient.is_paused(),
            patient.weight_version(),
            # of one that is not paused, too: a resume that met a sleeping server has not woken it
            sleep_level(client, target, HTTP_TIMEOUT_S),
            return_exceptions=True,
        )
        # any answer, even the 503 of a dead engine, comes from its front end
        http = not isinstance(health, ServerError) or bool(health.status)
        if isinstance(paused, BaseException):
            return Observed(target.name, http=http, engine=False, problem=str(paused))
        label = version if isinstance(version, str) else None
        slept = level if isinstance(level, int) else 0
        unread = str(version) if isinstance(version, BaseException) else ""
        return Observed(
            target.name, paused=paused, sleep_level=slept, version=label, version_problem=unread
        )

    outcomes = await fan_out(targets, ask, timeout_s=engine_timeout_s + HTTP_TIMEOUT_S)
    return [
        outcome.value or Observed(outcome.server, http=False, engine=False, problem=outcome.detail)
        for outcome in outcomes
    ]

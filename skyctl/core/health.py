"""Health probes with deadlines, and the rule for which servers receive requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from skyctl import engines
from skyctl.errors import ServerError
from skyctl.fleetfile.sections import HealthPolicy
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.states import ReplicaState


async def probe_ready(client: ControlClient, target: ServerTarget, timeout_s: float) -> bool | None:
    """Whether the server is paused, once it is ready; None while it is not.

    Ready: it passes the health check, serves models, and its engine answers.
    """
    server = engines.server(client, target, timeout_s=timeout_s)
    try:
        await server.health()
        await server.models()
        return await server.is_paused()
    except ServerError:
        return None


async def probe_alive(client: ControlClient, target: ServerTarget, timeout_s: float) -> bool:
    """Whether the server is paused. Raises ServerError if it does not answer in time."""
    return await engines.server(client, target, timeout_s=timeout_s).is_paused()


async def sleep_level(client: ControlClient, target: ServerTarget, timeout_s: float) -> int | None:
    """The level at which a server sleeps by its own metrics, 0 if it is awake; None if it does not
    say or does not answer.
    """
    try:
        return (await engines.server(client, target, timeout_s=timeout_s).metrics()).sleep_level
    except ServerError:
        return None


async def settled_sleep_level(
    client: ControlClient, target: ServerTarget, timeout_s: float
) -> int | None:
    """`sleep_level`, once the engine has answered: a sleep that was under way has ended then."""
    with suppress(ServerError):
        await engines.server(client, target, timeout_s=timeout_s).is_paused()
    return await sleep_level(client, target, timeout_s)


async def tokens_computed(client: ControlClient, target: ServerTarget, probe_s: float) -> int:
    """How many tokens a server has read and generated since its start; -1 if it does not say.

    For beside a probe with a deadline of `probe_s` seconds: it is asked once half of that is over,
    and a probe that is answered costs nothing more. The front end alone answers.
    """
    await asyncio.sleep(probe_s / 2)
    try:
        metrics = await engines.server(client, target, timeout_s=probe_s / 2).metrics()
    except ServerError:
        return -1
    return metrics.prompt_tokens + metrics.generation_tokens


@dataclass
class FailureCount:
    """Failed probes in a row. `failed` returns the verdict once there are too many."""

    policy: HealthPolicy
    count: int = 0
    tokens: int = -1
    """Computed by the time of the last failed probe; -1 if that is not known."""

    @property
    def next_decides(self) -> bool:
        """Whether one more failure is too many."""
        return self.count + 1 >= self.policy.failures

    def succeeded(self) -> None:
        self.count, self.tokens = 0, -1

    def failed(self, error: ServerError, tokens: int = -1) -> str:
        """Why the server counts as dead, or "" while it may still come back.

        An engine that has computed more tokens since the last failed probe is busy, and answers
        late: the count begins again.
        """
        before, self.tokens = self.tokens, tokens
        self.count = 0 if 0 <= before < tokens else self.count + 1
        if self.count < self.policy.failures:
            return ""
        return f"stopped by skyctl after {self.count} missed health probes: {error.message}"


def routable(states: Mapping[str, ReplicaState]) -> set[str]:
    """Names of the servers to route to, from each server's state.

    While any server is ready: the ready ones. If the whole fleet is frozen: the frozen ones, whose
    requests continue on resume. Asleep, quarantined and dead servers: never.
    """
    ready = {name for name, state in states.items() if state is ReplicaState.READY}
    return ready or {name for name, state in states.items() if state.queues}

"""Give a server back that a dead push froze or woke before it sent anything."""

from __future__ import annotations

from skyctl.engines.base import Refusal, Server
from skyctl.errors import ServerError
from skyctl.push.sleeping import DISCARDED, back_to_sleep
from skyctl.push.verify import weights_digest

_BEFORE_SESSIONS = ("wake", "pause", "init")
_NOTHING_SENT = (*_BEFORE_SESSIONS, "start")


async def give_back(
    server: Server,
    *,
    stage: str,
    thaw: bool,
    digest: str | None,
    timeout_s: float,
    label: str = "",
    slept: int = 0,
) -> None:
    """Close the session that a push left open at `stage`, and resume the server if `thaw`.

    `digest` is what its weights must come to, None where that is not known: then only a server to
    which nothing can have been sent is given back. `label` is the version they get, if they have
    not got it yet. `slept` is the level at which it slept before the push woke its weights, 0 when
    that did not happen: it sleeps again afterwards, unless that sleep had discarded its weights,
    which stay awake, and empty.

    Raises:
        ServerError: it does not answer, or is not known to hold what it held before: do not resume
            it.
    """
    name = server.target.name
    if not digest and stage not in _NOTHING_SENT:
        raise ServerError(f"{name}: nobody knows what its weights were before the push")
    if slept:  # the push may have died before it was done
        await server.wake(["weights"])
    # nothing would show that a push before this one has left a session open
    if stage not in _BEFORE_SESSIONS or not digest:
        try:
            await server.finish_weight_update(timeout_s=timeout_s)
        except ServerError as error:
            if error.refusal not in (Refusal.NO_SESSION, Refusal.NO_TRANSFER):
                raise
    if digest and slept != DISCARDED:
        found = (await weights_digest(server, timeout_s=timeout_s)).digest
        if found != digest:
            raise ServerError(
                f"{name}: its weights are not what they were (digest {found}, before {digest})"
            )
    if label:
        await server.set_weight_version(label)
    if slept:
        if slept != DISCARDED:
            await back_to_sleep(server, slept)
    elif thaw:
        await server.resume()

"""The router of a supervised fleet, for pushes: who leaves it and who rejoins."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from skyctl.errors import SkyctlError
from skyctl.supervisor.admission import refresh_all
from skyctl.supervisor.rollout import sync_router

if TYPE_CHECKING:
    from skyctl.supervisor.resident import Supervisor

_ASK_TIMEOUT_S = 5.0


class RouterRotation:
    """See weights.rotation.Rotation. Servers are held out by name, whatever their state."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def leave(
        self, names: Collection[str], *, others_serve: bool, closed: bool = False
    ) -> None:
        """Take these servers out; returns once the router lists none of them. `closed`: their
        guards refuse whoever asks them directly.

        Raises:
            SkyctlError: the router does not answer, or is not there; or nobody else would serve
                though `others_serve`. They are in it as before.
        """
        supervisor = self._supervisor
        router = supervisor.router
        if router is None or router.state != "ready":
            state = "not there" if router is None else router.state
            raise SkyctlError(f"the router is {state}", hint="skyctl status")
        await router.sync()  # who rejoined is in it before others leave
        out = supervisor.held_out | set(names)
        ready = [replica for replica in supervisor.replicas.values() if replica.state == "ready"]
        if others_serve and all(replica.name in out for replica in ready):
            raise SkyctlError("no other server is ready to serve meanwhile", hint="skyctl status")
        supervisor.held_out = out
        await router.sync()
        urls = {supervisor.replicas[name].spec.url for name in names}
        if left := urls & router.workers:
            raise SkyctlError(f"the router still sends requests to {', '.join(sorted(left))}")
        if closed:
            for name in names:
                supervisor.replicas[name].close()

    async def rejoin(self, names: Collection[str]) -> None:
        """Route to these servers again, as far as their states allow, which are asked now: what
        the last probe saw of a server may be its pause."""
        supervisor = self._supervisor
        replicas = [supervisor.replicas[name] for name in names if name in supervisor.replicas]
        for replica in replicas:
            replica.open_again()
        await refresh_all(replicas, supervisor.client, _ASK_TIMEOUT_S)
        supervisor.held_out -= set(names)
        await sync_router(supervisor)

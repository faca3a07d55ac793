"""The router child: its workers are kept right, beside what every front has."""

from __future__ import annotations

import asyncio

from skyctl import engines
from skyctl.core.plan import RouterSpec
from skyctl.supervisor.front import CALL_TIMEOUT_S, Front, FrontContext


class RouterChild(Front):
    """One router, which routes to the URLs of `desired()`."""

    role = "router"
    spec: RouterSpec

    def __init__(self, spec: RouterSpec, context: FrontContext) -> None:
        super().__init__(spec, context)
        self.workers: frozenset[str] = frozenset()  # URLs it routes to, as it last said
        self._routing = engines.routing(self.config.engine)
        self._client = self._routing.client(context.client, spec.url, CALL_TIMEOUT_S)
        self._syncing = asyncio.Lock()

    async def sync(self) -> None:
        """Make the router's workers what `desired()` says, now. A no-op while it is not ready.

        Raises:
            ServerError: the router did not do it.
        """
        if self.state != "ready":
            return
        async with self._syncing:
            wanted = set(self._desired().values())
            actual = set(await self._client.workers())
            self._heard = True  # adding a server that is dead takes long; that is not its fault
            for url in sorted(actual - wanted):
                await self._client.remove_worker(url)
            for url in sorted(wanted - actual):
                await self._client.add_worker(url)
            self._set_workers(frozenset(wanted))

    async def _tend(self) -> None:
        await self.sync()

    async def _first_answer(self) -> None:
        # answering is enough: its own health checks may lag behind ours
        self._set_workers(frozenset(await self._client.workers()))

    def _command(self) -> tuple[str, ...]:
        urls = sorted(self._desired().values())
        return (*self.spec.argv, *self._routing.workers(urls))

    def _after_end(self) -> None:
        self._set_workers(frozenset())

    def _set_workers(self, workers: frozenset[str]) -> None:
        if workers != self.workers:
            self.workers = workers
            self._changed()

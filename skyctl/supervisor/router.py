"""The router process: a front whose workers are kept up to date.

vllm-router removes workers while it runs. It adds them, too, unless it routes to pairs of prefill
and decode servers: then another process takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import get_args

from skyctl import engines
from skyctl.children import EVERY_ADDRESS, bypassing
from skyctl.core.plan import RouterSpec
from skyctl.errors import SkyctlError
from skyctl.fleetfile.sections import ServerRole
from skyctl.states import Phase
from skyctl.supervisor.front import FRONT_TIMEOUT_S, Front, FrontContext

_POLL_S = 0.05


class RouterChild(Front):
    """One router, which routes to the URLs of `desired()`; to none if a role is missing."""

    role = "router"
    spec: RouterSpec

    def __init__(self, spec: RouterSpec, context: FrontContext) -> None:
        super().__init__(spec, context)
        self.workers: frozenset[str] = frozenset()  # URLs it routes to, by its last answer
        self._routing = engines.routing(self.config.engine)
        self._client = self._routing.client(context.client, spec.url, FRONT_TIMEOUT_S)
        self._syncing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        self._pairs = self.config.pairs  # of its plan: another one has another router
        if self._pairs:
            self._desired = lambda: self._whole(context.desired())

    async def sync(self) -> None:
        """Bring the router's workers to `desired()` now. A no-op while it is not ready.

        Raises:
            ServerError: the router did not do it.
        """
        while True:
            try:
                if not self.renewing and not await self._lacks_workers():
                    return
            except SkyctlError:
                if not self.renewing:  # otherwise it is being stopped for that
                    raise
            await asyncio.wait([self._renewal()])

    @property
    def renewing(self) -> bool:
        """Whether another process is replacing this one, for workers that it does not take."""
        return self._renewing is not None

    def _renewal(self) -> asyncio.Task[None]:
        """Runs outside the task of a life, which ends with its process."""
        self._renewing = self._renewing or asyncio.create_task(self._renew())
        return self._renewing

    async def _lacks_workers(self) -> bool:
        """Update its workers; returns whether that takes another process."""
        if self.phase is not Phase.READY:
            return False
        async with self._syncing:
            actual = set(await self._client.workers())
            self._heard = True  # adding a dead server takes long; that is not its fault
            # at once: what is decided between the two would be in neither
            desired, undecided = set(self._entries()), self._context.undecided()
            kept = {entry for entry in actual if self._routing.worker(entry) in undecided}
            for url in sorted(actual - desired - kept):
                await self._client.remove_worker(url)
            if self._pairs and desired - actual:
                return True
            for url in sorted(desired - actual):
                await self._client.add_worker(url)
            self._set_workers(desired | kept)
            return False

    async def _renew(self) -> None:
        """Start another process with the current workers. This does not count as a restart: nothing
        went wrong. It is not waited for if a role goes missing meanwhile.
        """
        try:
            await super().stop()
            self.start()
            while self.phase is not Phase.WAITING or self._desired():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self.settled.wait()
                        return
        finally:
            self._renewing = None

    async def stop(self) -> None:
        """Stop its whole process tree and keep it stopped."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        await super().stop()

    def _whole(self, desired: Mapping[str, str]) -> Mapping[str, str]:
        roles = {self._context.role(name) for name in desired}
        return desired if len(roles) == len(get_args(ServerRole)) else {}

    async def _tend(self) -> None:
        if await self._lacks_workers():
            self._renewal()

    async def _first_answer(self) -> None:
        # an answer is enough: its own health checks may lag behind ours
        self._set_workers(await self._client.workers())

    def _command(self) -> tuple[str, ...]:
        urls: dict[str, list[str]] = {}
        for entry, name in self._entries().items():
            urls.setdefault(self._context.role(name), []).append(entry)
        return (*self.spec.argv, *self._routing.workers(urls, self.spec.argv))

    def _entries(self) -> dict[str, str]:
        """Its list of workers: the server behind each entry."""
        counts = self._context.entries()
        return {
            entry: name
            for name, url in sorted(self._desired().items())
            for entry in self._routing.entries(url, counts.get(name, 1))
        }

    def _variables(self) -> Mapping[str, str]:
        return bypassing(self.spec.env, EVERY_ADDRESS)  # servers may join it from anywhere

    def _after_end(self) -> None:
        self._set_workers(())

    def _set_workers(self, entries: Collection[str]) -> None:
        workers = frozenset(map(self._routing.worker, entries))
        if workers != self.workers:
            self.workers = workers
            self._context.changed()

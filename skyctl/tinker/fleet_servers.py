"""A fleet as sampling needs it: completions through the router, and adapters on every server.

Servers hold only so many adapters. The least recently used one makes room; those in use stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.core.tinker import LABEL_PREFIX
from skyctl.errors import (
    ConflictError,
    DeadlineExceeded,
    FleetDownError,
    NotFoundError,
    ServerError,
    SkyctlError,
)
from skyctl.generate.requests import COMPLETIONS, GenerationClient
from skyctl.service.endpoint import find_endpoint
from skyctl.tinker.sampling import AdapterGone
from skyctl.tinker.weights import ServedWeights, T, patiently

if TYPE_CHECKING:
    from skyctl.core.service import FleetService

_LOOK_S = 0.5


@dataclass(eq=False)
class _Adapter:
    """An adapter on the servers."""

    users: int = 0
    """Requests that use it."""


@dataclass(eq=False)
class FleetServers:
    """The servers of one fleet; made by `connected`."""

    fleet: FleetService
    """The fleet's verbs."""
    client: GenerationClient
    """Requests through the router."""
    base: str
    """The model name of requests to the base model."""
    context: int
    """The number of tokens that a server takes."""
    most: int
    """The most adapters that servers hold."""
    weights: ServedWeights
    """The weights that servers hold."""

    def __post_init__(self) -> None:
        self._loaded: dict[str, _Adapter] = {}  # by name; least recently used first
        self._unwanted: set[str] = set()  # on servers, perhaps only some of them: removed first
        self._changing = asyncio.Lock()
        self._freed = asyncio.Event()
        self._draining: str | None = None  # it takes no new users: another adapter gets its place

    async def complete(
        self, body: Mapping[str, Any], weights: str | None, session: str
    ) -> dict[str, Any]:
        """See `Servers`. If a server dies, sleeps or is paused, it waits instead of failing."""
        name = body["model"]
        adapter = self._loaded.get(name)

        async def ask() -> dict[str, Any]:
            try:
                return await self.client.ask(COMPLETIONS, body, session_id=session)
            except ServerError as error:
                if error.status != 404 or adapter is None:
                    raise
                if self._loaded.get(name) is adapter:  # else another request had it loaded again
                    del self._loaded[name]
                raise AdapterGone(error.message) from error

        return await self._awake(lambda: self.weights.answer(weights, ask))

    def leaving(self, directory: str) -> AbstractAsyncContextManager[None]:
        """See `Servers`."""
        return self.weights.leaving(directory)

    @asynccontextmanager
    async def using(self, name: str, directory: str) -> AsyncIterator[None]:
        """See `Servers`."""
        if name not in self._loaded or name == self._draining:
            async with self._changing:  # in order of arrival
                if name not in self._loaded:
                    # works without a supervisor, too: the next one takes the servers over
                    place = partial(self._place, name, directory)
                    await self._awake(lambda: patiently(place, ConflictError, FleetDownError))
                    self._unwanted.discard(name)
                    self._loaded[name] = _Adapter()
        adapter = self._loaded[name] = self._loaded.pop(name)
        adapter.users += 1
        try:
            yield
        finally:
            adapter.users -= 1
            current = self._loaded.get(name) is adapter  # else it went, and perhaps came again
            if name in self._unwanted and not adapter.users and current:
                del self._loaded[name]
            self._freed.set()

    async def unload(self, name: str) -> None:
        """See `Servers`. An adapter in use stays until its place is needed: unloading it would end
        running requests. So does an idle one while others change: nobody waits for them here.
        """
        adapter = self._loaded.get(name)
        if adapter is not None and not adapter.users and not self._changing.locked():
            async with self._changing:  # one that waited for it may come first
                if self._loaded.get(name) is adapter and not adapter.users:
                    del self._loaded[name]
                    await self._unload(name)
                    return
        if name in self._loaded:
            self._unwanted.add(name)

    async def adopt(self) -> None:
        """Count what an earlier process has loaded: names are never used twice."""
        for adapter in await self.fleet.adapters():
            if adapter.name.startswith(LABEL_PREFIX):
                self._loaded[adapter.name] = _Adapter()

    async def _awake(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`, repeated after a failure while servers slept: it waits for as long
        as a trainer needs their memory.
        """
        while True:
            try:
                return await ask()
            except AdapterGone:
                raise
            except SkyctlError as error:
                if getattr(error, "status", None) == 400 or not await self._slept():
                    raise

    async def _slept(self) -> bool:
        """Wait while servers sleep and none is ready; False if there was nothing to wait for."""
        slept = False
        while True:
            status = await patiently(self.fleet.status, FleetDownError, DeadlineExceeded)
            states = {replica.state for replica in status.replicas}
            if "asleep" not in states or "ready" in states:
                return slept
            slept = True
            await asyncio.sleep(_LOOK_S)

    async def _make_room(self) -> None:
        """Wait for a place. While none is idle, the adapter whose last request came first takes no
        more, so that a newcomer waits for one answer at most.
        """
        try:
            while True:
                for name in self._unwanted - self._loaded.keys():
                    await self._unload(name)
                others = [
                    a for a in await self.fleet.adapters() if not a.name.startswith(LABEL_PREFIX)
                ]
                if len(self._loaded) < max(1, self.most - len(others)):
                    return
                idle = [name for name, adapter in self._loaded.items() if not adapter.users]
                if idle:
                    name = next((name for name in idle if name in self._unwanted), idle[0])
                    del self._loaded[name]
                    await self._unload(name)
                    continue
                self._freed.clear()
                self._draining = next(iter(self._loaded))
                await self._freed.wait()
        finally:
            self._draining = None

    async def _place(self, name: str, directory: str) -> None:
        await self._make_room()
        # any base: the adapter names the base as this API does, not by the fleet's path to it
        request = LoadAdapter(name=name, directory=directory, new=None, any_base=True)
        try:
            await self.fleet.load_adapter(request)
        except ConflictError:
            raise  # nothing was sent
        except BaseException:
            self._unwanted.add(name)  # one that is given up may be carried out all the same
            raise

    async def _unload(self, name: str) -> None:
        self._unwanted.add(name)
        try:
            request = UnloadAdapter(name=name)
            await patiently(lambda: self.fleet.unload_adapter(request), ConflictError)
        except FleetDownError:  # a NotFoundError too, but about the fleet: it still has the adapter
            raise
        except NotFoundError:
            pass
        self._unwanted.discard(name)


@asynccontextmanager
async def connected(
    fleet: FleetService, weights: ServedWeights, *, context: int, most: int
) -> AsyncIterator[FleetServers]:
    """The servers of a running fleet. `most`: how many adapters they hold at once.

    Raises:
        FleetDownError: it does not run. SkyctlError: it cannot be asked.
    """
    endpoint = await find_endpoint(fleet)
    async with GenerationClient(endpoint) as client:
        servers = FleetServers(fleet, client, endpoint.model, context, most, weights)
        await servers.adopt()
        yield servers

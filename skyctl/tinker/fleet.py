"""A fleet as sampling needs it: completions through the router, adapters on every server.

Servers hold only so many adapters. The one that has not been used for longest makes room; those
that answer something now stay. They hold the weights of one model at a time: whoever samples from
one that was trained as a whole has them pushed, and waits until those who use others are done.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.adapters import LoadAdapter, UnloadAdapter
from skyctl.errors import ConflictError, FleetDownError, NotFoundError, SkyctlError
from skyctl.generate.requests import GenerationClient
from skyctl.push.request import PushRequest
from skyctl.service.ended import job_error
from skyctl.service.endpoint import find_endpoint
from skyctl.tinker.sampling import COMPLETIONS

if TYPE_CHECKING:
    from skyctl.core.service import FleetService

PREFIX = "tinker-"
_BUSY_S, _BUSY_TIMEOUT_S = 1.0, 600.0


@dataclass(frozen=True)
class Pushing:
    """Where weights are that may be pushed: the fleet's `model`, and those that were trained, each
    a directory below `trained`."""

    model: str
    trained: Path


class FleetServers:
    """The servers of one fleet; made by `connected`."""

    def __init__(
        self,
        fleet: FleetService,
        client: GenerationClient,
        base: str,
        context: int,
        most: int,
        pushing: Pushing | None = None,
    ) -> None:
        self._pushing = pushing
        self._one_at_a_time = OneAtATime()
        self._bringing = asyncio.Lock()
        self.base = base
        self.context = context
        self._fleet = fleet
        self._client = client
        self._most = most
        self._loaded: dict[str, int] = {}  # name → requests that use it; least recently used first
        self._unwanted: set[str] = set()  # on servers, perhaps on some of them: go first
        self._changing = asyncio.Lock()
        self._freed = asyncio.Event()

    async def complete(self, body: Mapping[str, Any], weights: str | None) -> dict[str, Any]:
        """See `Servers`. A server that dies or is paused makes it wait, not fail. What somebody
        else pushed over meanwhile is asked again."""
        if self._pushing is None:
            return await self._client.ask(COMPLETIONS, body)
        async with self._one_at_a_time.using(weights):
            while True:
                await self._bring(weights)
                answer = await self._client.ask(COMPLETIONS, body)
                if await self._held() == weights:
                    return answer

    async def _held(self) -> str | None:
        """The trained weights that servers have; None: the fleet's own, or what others pushed."""
        assert self._pushing is not None
        path = await self._fleet.model_path()
        return path if path and Path(path).parent == self._pushing.trained else None

    async def _bring(self, weights: str | None) -> None:
        assert self._pushing is not None
        async with self._bringing:
            if await self._held() != weights:
                checkpoint = weights or self._pushing.model
                await _when_free(lambda: self._push(checkpoint), FleetDownError)

    async def _push(self, checkpoint: str) -> None:
        job = await self._fleet.wait_job(
            await self._fleet.start_push(PushRequest(checkpoint=checkpoint))
        )
        if (error := job_error(job)) is not None:
            raise error

    @asynccontextmanager
    async def using(self, name: str, directory: str) -> AsyncIterator[None]:
        """See `Servers`."""
        if name not in self._loaded:
            async with self._changing:
                if name not in self._loaded:
                    # without a supervisor too: the next one takes the servers over
                    await _when_free(lambda: self._place(name, directory), FleetDownError)
                    self._unwanted.discard(name)
                    self._loaded[name] = 0
        self._loaded[name] = self._loaded.pop(name) + 1
        try:
            yield
        finally:
            self._loaded[name] -= 1
            if name in self._unwanted and not self._loaded[name]:
                del self._loaded[name]
            self._freed.set()

    async def unload(self, name: str, directory: str) -> None:
        """See `Servers`. An adapter that answers something now stays until its place is needed:
        whoever unloads it ends what is under way."""
        if self._pushing is not None and await self._held() == directory:
            async with self._one_at_a_time.using(None):
                await self._bring(None)
        async with self._changing:
            if self._loaded.get(name, 0):
                self._unwanted.add(name)
            elif self._loaded.pop(name, None) is not None:
                await self._unload(name)

    async def adopt(self) -> None:
        """Count what an earlier process has loaded: names are never used twice."""
        for adapter in await self._fleet.adapters():
            if adapter.name.startswith(PREFIX):
                self._loaded[adapter.name] = 0

    async def _make_room(self) -> None:
        for name in self._unwanted - self._loaded.keys():
            await self._unload(name)
        while len(self._loaded) >= max(1, self._most - await self._others()):
            idle = [name for name, users in self._loaded.items() if users == 0]
            if idle:
                del self._loaded[idle[0]]
                await self._unload(idle[0])
                continue
            self._freed.clear()
            await self._freed.wait()

    async def _others(self) -> int:
        """Adapters of this fleet that are not ours."""
        return sum(not adapter.name.startswith(PREFIX) for adapter in await self._fleet.adapters())

    async def _place(self, name: str, directory: str) -> None:
        await self._make_room()
        # any base: it says the base's name in this API, which is not the fleet's path to it
        asked = LoadAdapter(name=name, directory=directory, new=None, any_base=True)
        await self._fleet.load_adapter(asked)

    async def _unload(self, name: str) -> None:
        self._unwanted.add(name)
        try:
            await _when_free(lambda: self._fleet.unload_adapter(UnloadAdapter(name=name)))
        except FleetDownError:  # a NotFoundError too, but of the fleet: it still has the adapter
            raise
        except NotFoundError:
            pass
        self._unwanted.discard(name)


class OneAtATime:
    """One value at a time, used by any number of those who want it; others in order of arrival."""

    def __init__(self) -> None:
        self._value: str | None = None
        self._users = 0
        self._waiting: deque[tuple[str | None, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def using(self, value: str | None) -> AsyncIterator[None]:
        """Inside, nobody uses another value."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((value, turn))
        if not self._users or (len(self._waiting) == 1 and value == self._value):
            self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._admit()

    def _admit(self) -> None:
        """Let in whoever has waited longest, and all that want the same."""
        waiting = [entry for entry in self._waiting if not entry[1].done()]
        self._waiting.clear()
        for value, turn in waiting:
            if not self._users:
                self._value = value
            if value == self._value:
                self._users += 1
                turn.set_result(None)
            else:
                self._waiting.append((value, turn))


async def _when_free(change: Any, *passing: type[SkyctlError]) -> None:
    """Once nobody else has the fleet to themselves (a push, a recovery); `passing` errors too are
    waited out."""
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            await change()
            return
        except SkyctlError as error:
            if not isinstance(error, (ConflictError, *passing)):
                raise
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_BUSY_S)


@asynccontextmanager
async def connected(
    fleet: FleetService, *, context: int, most: int, pushing: Pushing | None
) -> AsyncIterator[FleetServers]:
    """The servers of a fleet that runs. `most`: adapters that they hold at once. Without `pushing`
    they keep their weights.

    Raises:
        FleetDownError: it does not run. SkyctlError: it cannot be asked.
    """
    endpoint = await find_endpoint(fleet)
    async with GenerationClient(endpoint) as client:
        servers = FleetServers(fleet, client, endpoint.model, context, most, pushing)
        await servers.adopt()
        yield servers

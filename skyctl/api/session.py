"""The connections of one fleet in one event loop: opened on first use, closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from skyctl.core.registry import FleetRef, RemoteRef
from skyctl.generate.requests import GenerationClient
from skyctl.service import FleetService, connect
from skyctl.service.endpoint import find_endpoint

if TYPE_CHECKING:
    from skyctl.service import FleetService


class Session:
    """Shared by all tasks of a loop. `users` counts the `async with` blocks that are open."""

    def __init__(self, ref: FleetRef | RemoteRef) -> None:
        self._ref = ref
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._connected: FleetService | None = None
        self._generation: dict[str | None, GenerationClient] = {}
        self.users = 0

    async def connected(self) -> FleetService:
        """The fleet's operations."""
        async with self._opening:
            if self._connected is None:
                self._connected = await self._stack.enter_async_context(connect(self._ref))
            return self._connected

    async def generation(self, server: str | None = None) -> GenerationClient:
        """The data plane: through the router, or straight to one server.

        Raises:
            FleetDownError, NotFoundError, ServerError: there is nothing to send requests to.
        """
        fleet = await self.connected()
        async with self._opening:
            if server not in self._generation:
                client = GenerationClient(await find_endpoint(fleet, server=server))
                self._generation[server] = await self._stack.enter_async_context(client)
            return self._generation[server]

    def forget_endpoints(self) -> None:
        """Look the endpoints up again at the next request: the fleet may have changed."""
        self._generation.clear()

    async def close(self) -> None:
        """Close every connection."""
        await self._stack.aclose()


class SessionHolder:
    """A fleet without connections, and one session per event loop that entered it.

    Pickling keeps the fleet only.
    """

    def __init__(self, ref: FleetRef | RemoteRef) -> None:
        self._ref = ref
        self._sessions: MutableMapping[asyncio.AbstractEventLoop, Session] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._ref,)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = Session(self._ref)
        self._sessions[loop].users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        session = self._sessions[loop]
        session.users -= 1
        if not session.users:
            del self._sessions[loop]
            await session.close()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        """The loop's session, or one for this call only."""
        async with self:
            yield self._sessions[asyncio.get_running_loop()]

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[FleetService]:
        async with self._session() as session:
            yield await session.connected()

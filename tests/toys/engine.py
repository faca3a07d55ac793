"""The toy server as an engine: no router, no sleep, no pushes."""

from __future__ import annotations

from typing import Any

from skyctl.engines.base import Engine, ServerMetrics, Variables
from skyctl.engines.launches import Command, ServerLaunch
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.states import PauseMode


class ToyServer:
    """The control routes of one toy server."""

    def __init__(self, client: ControlClient, target: ServerTarget, timeout_s: float) -> None:
        self.target = target
        self._client = client
        self._timeout_s = timeout_s

    async def health(self) -> None:
        await self._told()

    async def models(self) -> list[str]:
        return [(await self._told())["model"]]

    async def is_paused(self) -> bool:
        return bool((await self._told())["held"])

    async def metrics(self) -> ServerMetrics:
        return ServerMetrics(sleep_level=0)

    async def weight_version(self) -> None:
        return None

    async def pause(
        self,
        mode: PauseMode = "abort",
        *,
        clear_cache: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        await self._call("POST", "/toy/hold")

    async def resume(self) -> None:
        await self._call("POST", "/toy/go")

    async def _told(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("GET", "/toy")
        return answer

    async def _call(self, method: str, path: str) -> Any:
        return await self._client.call(self.target, method, path, timeout_s=self._timeout_s)


def command(launch: ServerLaunch) -> Command:
    name = launch.model.name
    argv = (launch.python, "-m", "tests.toys.server", str(launch.port), name)
    return Command(argv, dict(launch.env))


TOY = Engine(
    name="toy",
    title="toy",
    supports=frozenset(),
    server=ToyServer,  # type: ignore[arg-type] # what its features do not need is left out
    server_command=command,
    modules=lambda device, router, backend, pairs: {},
    variables=Variables(key="TOY_KEY", closed="TOY_CLOSED"),
)

"""The Tinker API's process (`skyctl/tinker/__main__.py`) as a front of the fleet."""

from __future__ import annotations

from skyctl.core.plan import FrontSpec
from skyctl.http.target import ServerTarget
from skyctl.supervisor.front import CALL_TIMEOUT_S, Front, FrontContext


class TinkerChild(Front):
    """One API process, with the training process below it."""

    role = "tinker"

    def __init__(self, spec: FrontSpec, context: FrontContext) -> None:
        super().__init__(spec, context)
        self._client = context.client
        self._target = ServerTarget(self.name, spec.url)

    async def _first_answer(self) -> None:
        await self._client.call(self._target, "GET", "/api/v1/healthz", timeout_s=CALL_TIMEOUT_S)

    async def _tend(self) -> None:
        await self._first_answer()
        self._heard = True

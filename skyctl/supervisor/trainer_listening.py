"""Where the fleet URL listens (`supervisor/trainer_api.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import uvicorn

from skyctl.core.urls import access, api_key, control_token
from skyctl.supervisor.listening import ListensAsPlanned, Settings
from skyctl.supervisor.trainer_api import TrainerApi

if TYPE_CHECKING:
    from skyctl.core.plan import FleetPlan


class TrainerListening(ListensAsPlanned):
    """The fleet URL; off without a section `trainer:`."""

    title = "the fleet URL"
    most_connections = 1024  # of rollouts, too
    _api: TrainerApi | None = None

    def _settings(self, plan: FleetPlan) -> Settings | None:
        trainer = plan.config.trainer
        if trainer is None:
            return None
        where = access(plan.config, self._supervisor.paths)
        return trainer.host, trainer.port, (where, api_key(where))

    async def _config(self, plan: FleetPlan, options: dict[str, Any]) -> uvicorn.Config:
        where = access(plan.config, self._supervisor.paths)
        token = control_token(where) if plan.config.auth != "none" else None
        self._api = TrainerApi(self._supervisor, token=token, key=api_key(where))
        return uvicorn.Config(self._api.app(), **options)

    async def close(self) -> None:
        """Stop listening; an update that is open is undone."""
        if self._api is not None:
            await self._api.close()
            self._api = None
        await super().close()

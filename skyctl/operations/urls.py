"""Where a fleet is reached: the router for generation, every server for control and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FleetUrls:
    """URLs without a trailing slash. `model` is the name to put into requests, None when it is not
    known; `router_metrics` is where the router's Prometheus page is."""

    name: str
    model: str | None
    router: str | None
    servers: Mapping[str, str]
    router_metrics: str | None = None
    api_key_env: str | None = None

    @property
    def entry(self) -> str | None:
        """Where requests go: the router, or the first server of a fleet without one."""
        return self.router or next(iter(self.servers.values()), None)

    def to_json(self) -> dict[str, Any]:
        """What `skyctl urls --json` prints."""
        return {"model": self.model, "router": self.router, "servers": dict(self.servers)}

"""Inference engines: `base` defines one; each has a package with all that skyctl knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.errors import UsageError
from skyctl.plugins import Plugins

if TYPE_CHECKING:
    from skyctl.engines.base import Engine, Feature, Router, Routing, Server
    from skyctl.http.client import ControlClient
    from skyctl.http.target import ServerTarget

__all__ = ["DEFAULT", "ENGINES", "require", "router", "routing", "server"]

DEFAULT = "vllm"
ENGINES: Plugins[Engine] = Plugins(
    "engine",
    "skyctl.engines",
    {DEFAULT: "skyctl.engines.vllm.engine:VLLM", "sglang": "skyctl.engines.sglang.engine:SGLANG"},
)
"""By the fleet file's `engine:`. Other packages add theirs as entry points of `skyctl.engines`."""


def server(client: ControlClient, target: ServerTarget, *, timeout_s: float = 30.0) -> Server:
    """The control routes of one server, by its target's engine."""
    return ENGINES[target.engine].server(client, target, timeout_s)


def router(client: ControlClient, name: str, url: str, *, timeout_s: float = 10.0) -> Router:
    """The routes of a router of the named engine."""
    return routing(name).client(client, url, timeout_s)


def routing(name: str) -> Routing:
    """How the named engine is routed. Raises UsageError if skyctl knows no router for it."""
    engine_routing = ENGINES[name].routing
    if engine_routing is None:
        raise UsageError(
            f"skyctl knows no router for {ENGINES[name].title} servers",
            hint="set `router: {enabled: false}`",
        )
    return engine_routing


def require(name: str, feature: Feature) -> None:
    """Raise UsageError if the named engine lacks a feature."""
    if feature not in ENGINES[name].supports:
        raise UsageError(f"{ENGINES[name].title} servers have no {feature.value}")

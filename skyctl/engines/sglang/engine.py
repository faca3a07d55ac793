"""SGLang 0.5.14, with vllm-router, as an `Engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.engines.base import Engine, Feature
from skyctl.engines.inside.guard import HELD_VARIABLE
from skyctl.engines.sglang import command
from skyctl.engines.sglang.tensors import dialect_for
from skyctl.engines.vllm.engine import VLLM_ROUTER

if TYPE_CHECKING:
    from skyctl.engines.base import Server
    from skyctl.http.client import ControlClient
    from skyctl.http.target import ServerTarget


def _server(client: ControlClient, target: ServerTarget, timeout_s: float) -> Server:
    from skyctl.engines.sglang.server import SGLangServer

    return SGLangServer(client, target, timeout_s)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    supports=frozenset({Feature.SLEEP, Feature.PUSH}),
    packages=("sglang",),
    key_variable=command.KEY_VARIABLE,
    closed_variable=HELD_VARIABLE,
    reserved=command.RESERVED,
    server=_server,
    server_command=command.server_command,
    backend=command.backend,
    dialect=dialect_for,
    modules=command.modules,
    warnings=command.warnings,
    sizes=command.sizes,
    routing=VLLM_ROUTER,
)

"""Where a fleet's generation requests go, and the model name they use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from skyctl import engines
from skyctl.core.urls import api_key, control_token
from skyctl.errors import ServerError, UsageError, no_server
from skyctl.generate.requests import Endpoint
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget

if TYPE_CHECKING:
    from skyctl.service import FleetService


async def without_token_route(fleet: FleetService, client: ControlClient) -> list[str]:
    """Servers that do not accept token ids, which SkyRL's rollouts send. Servers that do not answer
    are left out.

    Raises:
        FleetDownError: the fleet is not running.
    """
    urls = await fleet.urls()
    key = control_token(urls.access)
    servers = [ServerTarget(name, url, key, urls.engine) for name, url in urls.servers.items()]
    asked = (
        engines.server(client, server, timeout_s=5.0).generates_from_tokens() for server in servers
    )
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
            raise answer
    return [s.name for s, answer in zip(servers, answers, strict=True) if answer is False]


async def find_endpoint(fleet: FleetService, *, server: str | None = None) -> Endpoint:
    """The router's URL, or that of the server named `server`, and the model it serves.

    Raises:
        NotFoundError: there is no such server. FleetDownError: the fleet is not running.
        UsageError: the fleet has several servers and no router.
        ServerError: it does not answer, or serves no model.
    """
    urls = await fleet.urls()
    if server is not None and server not in urls.servers:
        raise no_server(urls.name, server, urls.servers)
    if server is None and urls.router is None and len(urls.servers) == 1:
        (server,) = urls.servers
    url = urls.servers[server] if server else urls.router
    if url is None:
        raise UsageError(
            f"fleet {urls.name} has no router",
            hint=f"choose a server: --server {next(iter(urls.servers))}",
        )
    key = api_key(urls.access)
    async with ControlClient() as control:
        target = ServerTarget(server or "router", url, key, urls.engine)
        models = await engines.server(control, target).models()
    if not models:
        raise ServerError(f"{url} serves no model")
    # the router drops the key on its way to /detokenize: the servers are asked directly
    return Endpoint(url, models[0], key, server_urls=tuple(urls.servers.values()))

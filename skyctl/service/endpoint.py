"""Where a fleet's generation requests go, and the model name they use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl import engines
from skyctl.core.urls import api_key, control_token
from skyctl.errors import DeadlineExceeded, ServerError, SkyctlError, UsageError, no_server
from skyctl.generate.requests import Endpoint
from skyctl.http.client import WHICH_TAKE_REQUESTS, ControlClient
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
    request = (
        engines.server(client, server, timeout_s=5.0).generates_from_tokens() for server in servers
    )
    answers = await asyncio.gather(*request, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
            raise answer
    return [s.name for s, answer in zip(servers, answers, strict=True) if answer is False]


async def find_endpoint(
    fleet: FleetService, *, server: str | None = None, timeout_s: float | None = None
) -> Endpoint:
    """The router's URL, or that of the server named `server`, and the model it serves, within
    `timeout_s` seconds. No server is asked for a model that the fleet's file or plan names.

    Raises:
        NotFoundError: there is no such server. FleetDownError: the fleet is not running.
        UsageError: the fleet has several servers and no router.
        ServerError: no server takes requests, or none of those asked names a model.
        DeadlineExceeded: that took too long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _find_endpoint(fleet, server)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"where requests go was not known after {timeout_s:g} s", hint="look: skyctl status"
        ) from error


async def _find_endpoint(fleet: FleetService, server: str | None) -> Endpoint:
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
    if server is None and urls.routed is False:
        raise ServerError(
            f"no server of fleet {urls.name} takes requests", hint=WHICH_TAKE_REQUESTS
        )
    key = api_key(urls.access)
    # whichever answers first: the router alone would ask one of them, which may hang
    candidates = {server: url} if server else {**urls.servers, "router": url}
    targets = [ServerTarget(name, at, key, urls.engine) for name, at in candidates.items()]
    model = urls.model or await _served_model(targets)
    # the router drops the key on its way to /detokenize: the servers are asked directly
    return Endpoint(url, model, key, server_urls=tuple(urls.servers.values()))


async def _served_model(targets: Sequence[ServerTarget]) -> str:
    """The model that the first server to answer names. Raises the first failure if none does."""
    failure: SkyctlError | None = None
    async with ControlClient() as client:
        answers = [
            asyncio.create_task(engines.server(client, target).models()) for target in targets
        ]
        try:
            for answer in asyncio.as_completed(answers):
                try:
                    if models := await answer:
                        return models[0]
                except SkyctlError as error:
                    failure = failure or error
        finally:
            for task in answers:
                task.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
    names = ", ".join(target.name for target in targets)
    raise failure or ServerError(f"no model is served: {names}")

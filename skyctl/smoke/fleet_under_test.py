"""The fleet that a smoke test runs against, and how its steps generate tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl import engines
from skyctl.core.registry import FleetRef
from skyctl.core.urls import api_key
from skyctl.errors import ServerError, SkyctlError
from skyctl.generate.prompts import GenerationRequest
from skyctl.generate.requests import Endpoint, GenerationClient, GenerationResult, RetryPolicy
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget

if TYPE_CHECKING:
    from skyctl.service import FleetService

PROMPT = "The fleet is up and"
TOKENS = 24
ASK_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SmokeOptions:
    """What was asked for. `checkpoint` is another one to push; `reuse` tests a fleet that runs,
    and leaves it up. All steps together take at most `timeout_s` seconds, but for `down`."""

    checkpoint: str | None = None
    reuse: bool = False
    timeout_s: float = 900.0
    keep_logs: Path | None = None


@dataclass
class FleetUnderTest:
    """One run. Filled in by the steps as they go.

    `answers` are the greedy tokens of each server before anything was pushed, `checkpoint` what
    they computed with (None when unknown); `pids` all processes that were seen.
    """

    ref: FleetRef
    options: SmokeOptions
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    longest: int = 512
    answers: dict[str, list[int]] = field(default_factory=dict)
    checkpoint: str | None = None
    pids: set[int] = field(default_factory=set)

    async def find_endpoints(self, fleet: FleetService) -> None:
        """Every server and the router, and the model they serve.

        Raises:
            ServerError: a server serves no model.
        """
        urls = await fleet.urls()
        key = api_key(urls.access)
        async with ControlClient() as client:
            for name, url in urls.servers.items():
                target = ServerTarget(name, url, key, self.ref.config.engine)
                server = engines.server(client, target, timeout_s=ASK_TIMEOUT_S)
                models = await server.models()
                if not models:
                    raise ServerError(f"{name} serves no model")
                self.endpoints[name] = Endpoint(url, models[0], key, server_urls=(url,))
                self.longest = await server.longest_context() or self.longest
        if urls.router:
            model = next(iter(self.endpoints.values())).model
            servers = tuple(urls.servers.values())
            self.endpoints["router"] = Endpoint(urls.router, model, key, server_urls=servers)

    @property
    def servers(self) -> list[str]:
        return [name for name in self.endpoints if name != "router"]

    @property
    def entry(self) -> Endpoint:
        """The router, or the only server there is to talk to."""
        return self.endpoints.get("router") or self.endpoints[self.servers[0]]

    async def ask(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Greedy tokens of the same prompt from each of these, side by side.

        Raises:
            SkyctlError: one of them did not answer with all tokens.
        """
        results = await asyncio.gather(*(self._ask(self.endpoints[name]) for name in names))
        for name, result in zip(names, results, strict=True):
            if result.error:
                raise SkyctlError(f"{name} did not answer a prompt: {result.error}")
            if len(result.token_ids) != TOKENS:
                raise SkyctlError(
                    f"{name} answered {len(result.token_ids)} tokens, {TOKENS} were asked for"
                )
        return {name: r.token_ids for name, r in zip(names, results, strict=True)}

    async def _ask(self, endpoint: Endpoint) -> GenerationResult:
        # no retries: a fleet that needs them does not pass
        async with GenerationClient(endpoint, retry=RetryPolicy(max_retries=0)) as client:
            return await client.generate_one(greedy(TOKENS), timeout_s=ANSWER_TIMEOUT_S)


def greedy(max_tokens: int) -> GenerationRequest:
    """The test's prompt, answered with exactly so many tokens, always the same ones."""
    body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return GenerationRequest("smoke", body, prompt=PROMPT)

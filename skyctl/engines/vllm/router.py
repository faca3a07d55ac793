"""vllm-router 0.1.17 as a `Routing`: its command line, its routes and its metrics. Control calls to
servers never go through it. Every command loads this module with the fleet file; few call a router.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skyctl.engines.base import RouterMetrics, Routing
from skyctl.engines.launches import RouterLaunch
from skyctl.engines.vllm.command import router_flags
from skyctl.errors import DeadlineExceeded, ServerError
from skyctl.http.target import ServerTarget

if TYPE_CHECKING:
    from skyctl.http.client import ControlClient

_MODULE = "vllm_router.launch_router"
_POLL_S = 0.05

# It answers no request before all its servers have answered, and by default asks again after 30 s.
# One that has died since may never answer.
_PAIRING = {
    "vllm-pd-disaggregation": True,
    "worker-startup-timeout-secs": 30,
    "worker-startup-check-interval": 1,
}


def router_command(launch: RouterLaunch) -> tuple[str, ...]:
    """The router, but for its workers."""
    arguments = {
        "host": launch.host,
        "port": launch.port,
        "policy": launch.policy,
        "prometheus-host": launch.host,
        "prometheus-port": launch.metrics_port,
        "health-check-interval-secs": launch.health_interval_s,
        "request-timeout-secs": launch.request_timeout_s,
        **(_PAIRING if launch.pairs else {}),
        **launch.args,
    }
    return (launch.python, "-m", _MODULE, *router_flags(arguments))


def router_workers(urls: Mapping[str, Sequence[str]], argv: Sequence[str] = ()) -> list[str]:
    """Its workers on the command line `argv`, by role.

    With `power_of_two` the router refuses to start with one worker, though it serves with one that
    is left and takes others. It counts the URLs, and keeps one that is there twice once.
    """
    if "power_of_two" in argv:
        urls = {role: [*own, *own] if len(own) == 1 else own for role, own in urls.items()}
    if "" in urls:
        return ["--worker-urls", *urls[""]]
    return router_flags({role: list(workers) for role, workers in urls.items()})


def router_entries(url: str, count: int) -> list[str]:
    """The router has no weights, and keeps a URL that is there twice once. It does not normalise
    ports, while its HTTP client does: `:08000` is another worker at port 8000.
    """
    host, _, port = url.rstrip("/").rpartition(":")
    return [f"{host}:{'0' * zeros}{port}" for zeros in range(count)]


def router_worker(entry: str) -> str:
    """Inverse of `router_entries`."""
    host, _, port = entry.rstrip("/").rpartition(":")
    return f"{host}:{port.lstrip('0')}"


class RouterClient:
    """One vllm-router. `timeout_s` bounds each method as a whole, in seconds."""

    def __init__(self, client: ControlClient, url: str, timeout_s: float = 10.0) -> None:
        self._client = client
        self._target = ServerTarget("router", url.rstrip("/"))
        self._timeout_s = timeout_s

    @property
    def url(self) -> str:
        return self._target.url

    async def workers(self) -> list[str]:
        return await self._workers(self._timeout_s)

    async def add_worker(self, url: str) -> None:
        """As `Router.add_worker`. The router probes `url` first, and blocks until that ends.

        Raises:
            DeadlineExceeded: `url` does not answer the probe, or is not listed in time.
            ServerError: the router refused it.
        """
        await self._change("/add_worker", url, listed=True)

    async def remove_worker(self, url: str) -> None:
        """As `Router.remove_worker`. The router answers 200 for URLs it never knew, so the list is
        read back.
        """
        await self._change("/remove_worker", url, listed=False)

    async def _change(self, path: str, url: str, *, listed: bool) -> None:
        import asyncio

        url = url.rstrip("/")
        ends = time.monotonic() + self._timeout_s
        if (url in await self._workers(self._timeout_s)) is listed:
            return
        await self._client.text(
            self._target, path, method="POST", params={"url": url}, timeout_s=_remaining_s(ends)
        )
        while (url in await self._workers(_remaining_s(ends))) is not listed:
            if time.monotonic() + _POLL_S >= ends:
                verb = "list" if listed else "drop"
                raise DeadlineExceeded(f"router: {self.url} did not {verb} worker {url} in time")
            await asyncio.sleep(_POLL_S)

    async def _workers(self, timeout_s: float) -> list[str]:
        answer = await self._client.call(self._target, "GET", "/list_workers", timeout_s=timeout_s)
        urls = answer.get("urls") if isinstance(answer, dict) else answer
        if not isinstance(urls, list):
            raise ServerError(f"router: {self.url}/list_workers answered {answer!r:.100}")
        return [str(url).rstrip("/") for url in urls]


async def router_metrics(client: ControlClient, url: str, timeout_s: float) -> RouterMetrics:
    """Ask the router's metrics port, at `url`. Raises as every call does."""
    page = await client.text(ServerTarget("router", url), "/metrics", timeout_s=timeout_s)
    return parse_router_metrics(page)


def parse_router_metrics(text: str) -> RouterMetrics:
    """Read the metrics page of vllm-router 0.1.17. Missing counters count as zero."""
    from skyctl.engines.prometheus import samples, totals

    total = totals(samples(text, "vllm_router_"))
    return RouterMetrics(
        requests=total("vllm_router_requests_total"),
        errors=total("vllm_router_request_errors_total"),
        retries=total("vllm_router_retries_total"),
    )


def _remaining_s(ends: float) -> float:
    """Seconds until `ends` on the monotonic clock, never zero."""
    return max(ends - time.monotonic(), 0.001)


VLLM_ROUTER = Routing(
    command=router_command,
    workers=router_workers,
    client=RouterClient,
    metrics=router_metrics,
    removal=lambda router, url: f"curl -X POST '{router}/remove_worker?url={url}'",
    entries=router_entries,
    worker=router_worker,
    counting_policies=frozenset({"round_robin", "random"}),
)

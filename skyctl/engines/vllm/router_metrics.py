"""The few numbers of vllm-router's Prometheus page that skyctl shows (vllm-router 0.1.17)."""

from __future__ import annotations

from dataclasses import dataclass

from skyctl.engines.vllm.metrics import samples, whole


@dataclass(frozen=True)
class RouterMetrics:
    """Counters since the router started, over all routes.

    `errors` counts requests it answered with an error, `retries` attempts beyond the first.
    `healthy_workers` is None where the page does not say.
    """

    requests: int = 0
    errors: int = 0
    retries: int = 0
    healthy_workers: int | None = None


def parse_router_metrics(text: str) -> RouterMetrics:
    """Read the page of the router's metrics port. Counters that are absent count as zero."""
    sums: dict[str, float] = {}
    healthy: list[float] = []
    for name, _labels, value in samples(text, "vllm_router_"):
        if name == "vllm_router_worker_health":
            healthy.append(value)
        else:
            sums[name] = sums.get(name, 0.0) + value

    def total(name: str) -> int:
        return whole(sums.get(f"vllm_router_{name}", 0))

    return RouterMetrics(
        requests=total("requests_total"),
        errors=total("request_errors_total"),
        retries=total("retries_total"),
        healthy_workers=sum(value > 0 for value in healthy) if healthy else None,
    )

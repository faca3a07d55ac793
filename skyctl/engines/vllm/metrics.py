"""The few numbers of vLLM's and its router's Prometheus pages that skyctl shows or waits for."""

from __future__ import annotations

from skyctl.engines.base import RouterMetrics, ServerMetrics
from skyctl.engines.prometheus import samples, totals

# the metrics that are read; every server has the first from its start
METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:engine_sleep_state",
)


def parse_metrics(text: str) -> ServerMetrics:
    """Read vLLM's `/metrics` page. Missing metrics count as zero."""
    found = list(samples(text, "vllm:"))
    total = totals("vllm:", found)
    kv_usage = [value for name, _, value in found if name == "vllm:kv_cache_usage_perc"]
    sleep_states: dict[str, float] = {}
    for name, labels, value in found:
        if name == "vllm:engine_sleep_state":
            state = labels.get("sleep_state", "")
            sleep_states[state] = max(value, sleep_states.get(state, 0.0))
    return ServerMetrics(
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        kv_usage=sum(kv_usage) / len(kv_usage) if kv_usage else 0.0,
        prompt_tokens=total("prompt_tokens_total"),
        generation_tokens=total("generation_tokens_total"),
        prefix_cache_queries=total("prefix_cache_queries_total"),
        prefix_cache_hits=total("prefix_cache_hits_total"),
        sleep_level=_sleep_level(sleep_states),
    )


def parse_router_metrics(text: str) -> RouterMetrics:
    """Read the metrics page of vllm-router 0.1.17. Missing counters count as zero."""
    total = totals("vllm_router_", samples(text, "vllm_router_"))
    return RouterMetrics(
        requests=total("requests_total"),
        errors=total("request_errors_total"),
        retries=total("retries_total"),
    )


def _sleep_level(states: dict[str, float]) -> int | None:
    if not states:
        return None
    if states.get("discard_all"):
        return 2
    return 1 if states.get("weights_offloaded") else 0

"""The few numbers of vLLM's and its router's Prometheus pages that skyctl shows or waits for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from skyctl.engines.base import RouterMetrics, ServerMetrics

# What is read of the page. Every server has the first, from its start on.
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
_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)(?:\s+-?\d+)?$"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> ServerMetrics:
    """Read vLLM's `/metrics` page. Metrics that are absent count as zero."""
    samples = list(_samples(text, "vllm:"))
    total = _totals("vllm:", samples)
    kv_usage = [value for name, _, value in samples if name == "vllm:kv_cache_usage_perc"]
    sleep_states: dict[str, float] = {}
    for name, labels, value in samples:
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
    """Read the metrics page of vllm-router 0.1.17. Counters that are absent count as zero."""
    total = _totals("vllm_router_", _samples(text, "vllm_router_"))
    return RouterMetrics(
        requests=total("requests_total"),
        errors=total("request_errors_total"),
        retries=total("retries_total"),
    )


def _totals(prefix: str, samples: Iterable[tuple[str, object, float]]) -> Callable[[str], int]:
    """Sums over all labels, by name without the prefix."""
    sums: dict[str, float] = {}
    for name, _, value in samples:
        sums[name] = sums.get(name, 0.0) + value
    return lambda name: _whole(sums.get(prefix + name, 0.0))


def _whole(value: float) -> int:
    """A sum of counters as a number to show; infinity, which sums can reach, is a large one."""
    return int(max(0.0, min(value, 2.0**63)))


def _sleep_level(states: dict[str, float]) -> int | None:
    if not states:
        return None
    if states.get("discard_all"):
        return 2
    return 1 if states.get("weights_offloaded") else 0


def _samples(text: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of finite samples whose name starts with `prefix`."""
    for line in text.splitlines():
        if not line.startswith(prefix):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if value == value and abs(value) != float("inf"):
            yield match["name"], dict(_LABEL.findall(match["labels"] or "")), value

"""The few numbers of vLLM's Prometheus page that skyctl shows or waits for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

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


@dataclass(frozen=True)
class ServerMetrics:
    """One server's load, summed over its engines.

    `kv_usage` is the mean over engines, 0..1. The token and query fields are counters since the
    server started. `sleep_level` is 0 awake, 1 or 2 asleep, None where the server does not say;
    unlike `/is_sleeping` it is not confused by a pause.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    sleep_level: int | None = None

    def load(self) -> dict[str, Any]:
        """All fields but `sleep_level`, as a ReplicaStatus takes them."""
        fields = asdict(self)
        del fields["sleep_level"]
        return fields

    @property
    def in_flight(self) -> int:
        """Requests that are running or waiting: zero means drained."""
        return self.running + self.waiting

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Hits per queried token, 0..1; None before the first query."""
        if not self.prefix_cache_queries:
            return None
        return self.prefix_cache_hits / self.prefix_cache_queries


def parse_metrics(text: str) -> ServerMetrics:
    """Read vLLM's `/metrics` page. Metrics that are absent count as zero."""
    sums: dict[str, float] = {}
    kv_usage: list[float] = []
    sleep_states: dict[str, float] = {}
    for name, labels, value in samples(text, "vllm:"):
        if name == "vllm:kv_cache_usage_perc":
            kv_usage.append(value)
        elif name == "vllm:engine_sleep_state":
            state = labels.get("sleep_state", "")
            sleep_states[state] = max(value, sleep_states.get(state, 0.0))
        else:
            sums[name] = sums.get(name, 0.0) + value

    def total(name: str) -> int:
        return whole(sums.get(f"vllm:{name}", 0))

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


def whole(value: float) -> int:
    """A sum of counters as a number to show; infinity, which sums can reach, is a large one."""
    return int(max(0.0, min(value, 2.0**63)))


def _sleep_level(states: dict[str, float]) -> int | None:
    if not states:
        return None
    if states.get("discard_all"):
        return 2
    return 1 if states.get("weights_offloaded") else 0


def samples(text: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
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

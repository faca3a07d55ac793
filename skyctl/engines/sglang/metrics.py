"""The few numbers of SGLang's Prometheus page that skyctl shows or waits for."""

from __future__ import annotations

from skyctl.engines.base import ServerMetrics
from skyctl.engines.prometheus import samples, totals

PREFIX = "sglang:"


def parse_metrics(text: str, sleep_level: int | None) -> ServerMetrics:
    """Read SGLang's `/metrics` page, which has no sleep level. Missing metrics count as zero; the
    prefix cache counts tokens.
    """
    found = list(samples(text, PREFIX))
    total = totals(PREFIX, found)
    usage = [value for name, _, value in found if name == "sglang:token_usage"]
    return ServerMetrics(
        running=total("num_running_reqs"),
        waiting=total("num_queue_reqs"),
        kv_usage=sum(usage) / len(usage) if usage else 0.0,
        prompt_tokens=total("prompt_tokens_total"),
        generation_tokens=total("generation_tokens_total"),
        prefix_cache_queries=total("prompt_tokens_total"),
        prefix_cache_hits=total("cached_tokens_total"),
        sleep_level=sleep_level,
    )

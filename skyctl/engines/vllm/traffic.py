"""What a vLLM server has answered, from its metrics page."""

from __future__ import annotations

from skyctl.engines.http_server import ignoring_status
from skyctl.engines.inside.guard import VLLM
from skyctl.engines.prometheus import histogram, samples
from skyctl.engines.traffic import ServerTraffic
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget

_ANSWERS = "http_requests_total"
_HISTOGRAMS = {
    "first_token_s": "vllm:time_to_first_token_seconds",
    "latency_s": "vllm:e2e_request_latency_seconds",
    "output_tokens": "vllm:request_generation_tokens",
}
_NAMES = (
    _ANSWERS,
    *(f"{name}_{part}" for name in _HISTOGRAMS.values() for part in ("bucket", "count")),
)


async def traffic(client: ControlClient, target: ServerTarget, timeout_s: float) -> ServerTraffic:
    """Read now, as few metrics as possible (`VLLMServer.metrics`). Raises ServerError."""
    page = ""
    with ignoring_status():
        page = await client.text(
            target, "/metrics/", params={"name[]": _NAMES}, timeout_s=timeout_s
        )
    if _NAMES[-1] not in page:
        page = await client.text(target, "/metrics", timeout_s=timeout_s)
    return parse_traffic(page)


def parse_traffic(text: str) -> ServerTraffic:
    """Read vLLM's `/metrics` page. Missing metrics count as zero."""
    answered = [
        (labels.get("status", ""), int(value))
        for name, labels, value in samples(text, _ANSWERS)
        if name == _ANSWERS
        and labels.get("method") == "POST"
        and labels.get("handler", "") in VLLM.data
    ]
    measured = list(samples(text, "vllm:"))
    return ServerTraffic(
        requests=sum(count for _, count in answered),
        errors=sum(count for status, count in answered if status.startswith("5")),
        **{field: histogram(measured, name) for field, name in _HISTOGRAMS.items()},
    )

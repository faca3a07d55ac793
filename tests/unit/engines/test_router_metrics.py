"""What is read from vllm-router's Prometheus page (0.1.17, copied from a running one)."""

from __future__ import annotations

from skyctl.engines.base import RouterMetrics
from skyctl.engines.vllm.router import parse_router_metrics

PAGE = """
# TYPE vllm_router_requests_total counter
vllm_router_requests_total{route="/v1/completions"} 11
vllm_router_requests_total{route="/v1/chat/completions"} 4
vllm_router_request_errors_total{route="/v1/completions",error_type="non_retryable_error"} 2
vllm_router_retries_total{route="/v1/completions"} 5
vllm_router_processed_requests_total{worker="http://127.0.0.1:30665"} 6
vllm_router_worker_health{worker="http://127.0.0.1:30665"} 1
vllm_router_worker_health{worker="http://127.0.0.1:31597"} 0
vllm_router_generate_duration_seconds_bucket{le="0.001"} 0
"""


def test_requests_errors_and_retries_are_summed_over_routes() -> None:
    metrics = parse_router_metrics(PAGE)
    assert metrics == RouterMetrics(requests=15, errors=2, retries=5)


def test_a_router_that_served_nothing_yet_counts_zero() -> None:
    assert parse_router_metrics("") == RouterMetrics(0, 0, 0)

"""What is read from vLLM's Prometheus page."""

from __future__ import annotations

from skyctl.engines.vllm.server import parse_metrics

PAGE = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a}b \\"c\\""} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1.5e+03
vllm:generation_tokens_total{engine="0",model_name="tiny"} 17.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 200.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 50.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 24.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 10.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="discard_all"} 1.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="tiny"} NaN
process_resident_memory_bytes 1.0e+09
"""


def test_requests_and_tokens_are_summed_and_kv_use_averaged_over_engines() -> None:
    metrics = parse_metrics(PAGE)
    assert (metrics.running, metrics.waiting, metrics.in_flight) == (5, 1, 6)
    assert metrics.kv_usage == 0.5
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (1500, 17)
    assert (metrics.prefix_cache_hits, metrics.prefix_cache_queries) == (50, 200)
    assert (metrics.accepted_tokens, metrics.draft_tokens) == (24, 30)
    assert metrics.sleep_level == 2


def test_a_page_without_our_metrics_is_all_zero_and_knows_no_sleep_state() -> None:
    metrics = parse_metrics("# nothing here\nvllm:odd{ 1\nvllm:num_requests_running{} +Inf\n")
    assert (metrics.in_flight, metrics.kv_usage) == (0, 0.0)
    assert metrics.sleep_level is None

"""What a canary may be, the shares of the router's list, and rules."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.canary import (
    Rule,
    compared,
    entries,
    parse_share,
    refuse_plan,
    servers_for,
    verdict,
)
from skyctl.core.jobs import record_result
from skyctl.engines.traffic import Histogram, ServerTraffic
from skyctl.engines.vllm.router import router_entries, router_worker
from skyctl.engines.vllm.traffic import parse_traffic
from skyctl.errors import UsageError
from skyctl.push.request import PushRequest, PushResult, ServerPush
from skyctl.store.fleet_weights import Canary, CanaryStage, FleetWeights
from skyctl.store.state import FleetState
from skyctl.supervisor.canary import push_ended
from tests.unit.supervisor.fleets import fleet_plan, stub_router, stub_server

SERVING = Canary(FleetWeights("step-2", "/two"), ("a",), 0.1, CanaryStage.SERVING, 100.0)


@pytest.mark.parametrize("servers", [2, 3, 5, 10])
def test_each_share_is_met_within_a_fiftieth_of_itself(servers: int) -> None:
    names = [f"st-{number}" for number in range(servers)]
    for percent in range(1, 100):
        canaries = servers_for(percent / 100, 0, names)
        listed = entries(replace(SERVING, servers=canaries, share=percent / 100), names)
        seen = 100 * sum(listed[name] for name in canaries) / sum(listed.values())
        assert seen == pytest.approx(percent, abs=0.015 * min(percent, 100 - percent))
        assert sum(listed.values()) <= 300


def test_the_list_is_short_where_the_share_allows_it() -> None:
    for share, names, mine, theirs in (
        (0.5, "ab", 1, 1),
        (0.1, "abcdefghij", 1, 1),
        (0.1, "ab", 1, 9),
        (0.9, "ab", 9, 1),
    ):
        listed = entries(replace(SERVING, share=share), names)
        assert listed == {name: mine if name == "a" else theirs for name in names}


def test_a_server_that_is_not_routed_counts_for_nothing() -> None:
    assert entries(SERVING, ["a", "b", "c", "d"]) == {"a": 1, "b": 3, "c": 3, "d": 3}
    assert entries(SERVING, ["a", "b"]) == {"a": 1, "b": 9}
    assert entries(SERVING, ["b", "c"]) == entries(SERVING, ["a"]) == {}


def test_spellings_of_a_url_lead_back_to_it() -> None:
    for url in ("http://127.0.0.1:8000", "http://[::1]:30000", "http://gpu-1"):
        spellings = router_entries(url, 12)
        assert len(set(spellings)) == 12
        assert {router_worker(spelling) for spelling in spellings} == {url}


@pytest.mark.parametrize(
    ("share", "replicas", "names"),
    [(0.1, 0, "a"), (0.1, 2, "ab"), (0.5, 0, "ab"), (0.99, 0, "abc"), (0.01, 0, "a")],
)
def test_a_canary_has_as_many_servers_as_its_share_is_of_them(
    share: float, replicas: int, names: str
) -> None:
    assert servers_for(share, replicas, list("abcd")) == tuple(names)


@pytest.mark.parametrize(
    ("share", "replicas", "names", "message"),
    [
        (0.0, 0, "ab", "1% to 99%"),
        (1.0, 0, "ab", "1% to 99%"),
        (0.1, 2, "ab", "leaves none of 2 servers"),
        (0.1, 0, "a", "leaves none of 1 server"),
        (0.99, 1, "abcdefghij", "cannot be given to 1 of 10 servers"),
    ],
)
def test_a_share_that_cannot_be_met_is_refused(
    share: float, replicas: int, names: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        servers_for(share, replicas, list(names))


def test_only_a_router_that_counts_requests_gives_shares() -> None:
    servers, counting = [stub_server("a"), stub_server("b")], {"round_robin"}
    plan = fleet_plan(servers, stub_router())
    with pytest.raises(UsageError, match="policy cache_aware gives servers requests by load"):
        refuse_plan(plan, None, counting)
    with pytest.raises(UsageError, match="no router"):
        refuse_plan(fleet_plan(servers), None, counting)
    refuse_plan(plan, SERVING, {"cache_aware"})
    for left in (["a"], ["b"]):
        fewer = fleet_plan([stub_server(name) for name in left], stub_router())
        with pytest.raises(UsageError, match="the canary needs a and another server"):
            refuse_plan(fewer, SERVING, {"cache_aware"})


def traffic(requests: int, errors: int = 0, **seconds: float) -> ServerTraffic:
    """All requests took as long."""
    spread = {
        name: Histogram(requests, {value / 2: 0, value: requests})
        for name, value in seconds.items()
    }
    return ServerTraffic(requests, errors, **spread)


@pytest.mark.parametrize(
    ("rule", "counted", "broken"),
    [
        ("errors>1%", traffic(100, 1), ""),
        ("errors>1%", traffic(100, 2), "errors 2% (2 of 100) > 1%"),
        ("errors > 0.01", traffic(100, 2), "errors 2% (2 of 100) > 1%"),
        ("errors>1%", traffic(19, 19), ""),  # too few to say
        ("ttft_p95>2s", traffic(50, first_token_s=2.0), ""),
        ("ttft_p95>2s", traffic(50, first_token_s=4.0), "ttft_p95 3.9 s > 2 s"),
        ("latency_p95>1m", traffic(50, latency_s=100.0), "latency_p95 97.5 s > 60 s"),
        ("latency_p95>1m", traffic(50), ""),
    ],
)
def test_a_rule_is_broken_above_its_limit(rule: str, counted: ServerTraffic, broken: str) -> None:
    assert Rule.parsed(rule).broken_by(counted) == broken


@pytest.mark.parametrize("text", ["", "errors", "errors>", "errors>200%", "speed>1s", "ttft_p95>2"])
def test_what_is_not_a_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a rule"):
        Rule.parsed(text)


@pytest.mark.parametrize(
    ("changes", "counted", "now", "ready", "action"),
    [
        ({}, traffic(100, 100), 1000.0, True, None),
        ({"rollback_if": ("errors>1%",)}, traffic(100, 2), 100.0, False, "rollback"),
        ({"rollback_if": ("errors>1%",)}, None, 1000.0, True, None),
        ({"promote_after_s": 60.0}, traffic(100), 159.0, True, None),
        ({"promote_after_s": 60.0}, traffic(100), 160.0, True, "promote"),
        ({"promote_after_s": 60.0}, traffic(100), 160.0, False, None),
        ({"promote_after_s": 60.0}, traffic(0), 160.0, True, None),  # nothing was tried
        ({"promote_after_s": 60.0}, None, 160.0, True, None),
        ({"promote_after_s": 60.0, "stage": CanaryStage.ENDING}, traffic(99), 160.0, True, None),
        (
            {"promote_after_s": 60.0, "rollback_if": ("errors>1%",)},
            traffic(100, 2), 160.0, True, "rollback",
        ),
        (  # its servers do not count times
            {"promote_after_s": 60.0, "rollback_if": ("errors>1%", "ttft_p95>2s")},
            traffic(100), 160.0, True, None,
        ),
        (
            {"promote_after_s": 60.0, "rollback_if": ("errors>1%", "ttft_p95>2s")},
            traffic(100, first_token_s=1.0), 160.0, True, "promote",
        ),
    ],
)  # fmt: skip
def test_rules_promote_only_what_was_seen_to_work(
    changes: dict[str, Any],
    counted: ServerTraffic | None,
    now: float,
    ready: bool,
    action: str | None,
) -> None:
    assert verdict(replace(SERVING, **changes), counted, now, ready=ready)[0] == action


def test_both_versions_are_compared_side_by_side() -> None:
    counted = {"a": traffic(10, 1, latency_s=2.0), "b": traffic(50), "c": traffic(40)}
    canary, fleet = compared(SERVING, None, counted)
    assert (canary.version, canary.servers, canary.seen) == ("step-2", ("a",), 0.1)
    assert (canary.requests, canary.errors, canary.latency_s) == (10, 1, (1.5, 1.95))
    assert (fleet.version, fleet.servers, fleet.requests) == ("base", ("b", "c"), 90)
    assert (fleet.share, fleet.latency_s) == (0.9, None)


def test_what_was_counted_before_is_subtracted() -> None:
    before = traffic(10, 1, latency_s=2.0)
    after = before.combined(traffic(5, latency_s=8.0))
    assert ServerTraffic.from_json(asdict(before)) == before
    since = after.combined(before, -1)
    assert (since.requests, since.errors, since.latency_s.quantile(0.5)) == (5, 0, 6.0)


def test_what_a_server_answered_is_read_from_its_page() -> None:
    page = """
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 8.0
http_requests_total{handler="/v1/chat/completions",method="POST",status="5xx"} 2.0
http_requests_total{handler="/v1/models",method="GET",status="2xx"} 99.0
http_requests_total{handler="/pause",method="POST",status="2xx"} 99.0
http_requests_created{handler="/v1/completions",method="POST",status="2xx"} 1.7e9
vllm:e2e_request_latency_seconds_bucket{engine="0",le="1.0"} 2.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="2.0"} 6.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf"} 8.0
vllm:e2e_request_latency_seconds_count{engine="0"} 8.0
vllm:e2e_request_latency_seconds_sum{engine="0"} 11.0
"""
    read = parse_traffic(page)
    assert (read.requests, read.errors) == (10, 2)
    assert read.latency_s == Histogram(8, {1.0: 2, 2.0: 6})
    assert [read.latency_s.quantile(q) for q in (0.25, 0.5, 1.0)] == [1.0, 1.5, 2.0]
    assert read.first_token_s.quantile(0.5) is None


def test_shares_are_written_as_people_do() -> None:
    assert [parse_share(text) for text in ("10%", "0.1", "2.5%", "1")] == [0.1, 0.1, 0.025, 1.0]
    for text in ("", "ten", "110%", "-1%", "nan"):
        with pytest.raises(ValueError):
            parse_share(text)


def test_the_record_says_which_weights_each_server_must_have(tmp_path: Path) -> None:
    with FleetState(tmp_path / "state.db") as state:
        fleet = FleetWeights("step-1", "/one")
        state.set_weights(fleet)
        for stage in CanaryStage:
            state.set_canary(replace(SERVING, stage=stage, counted={"a": {"instance": "1@2"}}))
            assert state.canary() == replace(
                SERVING, stage=stage, counted={"a": {"instance": "1@2"}}
            )
            serves = stage is CanaryStage.SERVING
            assert state.weights_of("a") == (SERVING.weights if serves else fleet)
            assert state.weights_of("b") == fleet
            assert state.checkpoints() == {"/one", "/two"}
        state.set_weights(FleetWeights("step-3", "/three"))  # another version for all
        assert state.canary() is None
        state.set_canary(SERVING)
        state.forget_run()
        assert state.canary() is None


@pytest.mark.parametrize("servers", [(), ("a",)])
@pytest.mark.parametrize("stage", [None, *CanaryStage])
def test_a_push_that_ends_decides_about_a_canary_only_if_it_is_its_own(
    tmp_path: Path, servers: tuple[str, ...], stage: CanaryStage | None
) -> None:
    request, fleet = PushRequest("/three", servers=servers), FleetWeights("step-1", "/one")
    pushed = [ServerPush("a", True, "ready", "step-3", "")]
    result = PushResult("step-3", "/three", "id", "shm", 1, 1, 0.1, 0.1, 0.1, {}, pushed)
    canary = replace(SERVING, stage=stage) if stage else None
    with FleetState(tmp_path / "state.db") as state:
        state.set_weights(fleet)
        state.set_canary(canary)
        job = state.journal.begin("push", request.to_json())
        ends = bool(servers) and stage is CanaryStage.STARTING
        push_ended(state, job)
        assert state.canary() == (replace(SERVING, stage=CanaryStage.ENDING) if ends else canary)
        state.set_canary(canary)
        record_result(state, job.id, request, result)
        recorded = state.canary()
        if not servers:
            assert (state.weights().version, recorded) == ("step-3", None)
            return
        assert state.weights() == fleet
        assert recorded == canary or (ends and recorded and recorded.weights.version == "step-3")

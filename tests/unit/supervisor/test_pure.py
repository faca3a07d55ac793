"""The pure rules: when to restart, whom to route to, what to change, what a log says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.core.health import routable
from skyctl.core.plan import FrontSpec
from skyctl.engines.logs import (
    is_mark,
    latest_message,
    mark_start,
    message,
    tail,
    telling_line,
    this_run,
    why_it_died,
)
from skyctl.fleetfile.arguments import PlanWarning
from skyctl.fleetfile.sections import RestartPolicy
from skyctl.http.connections import KeptConnections
from skyctl.states import ReplicaState
from skyctl.supervisor import wire
from skyctl.supervisor.interface import Reconcile, SupervisorClient
from skyctl.supervisor.reconcile import compare
from skyctl.supervisor.restarts import decide
from skyctl.supervisor.wire import adapter, spec_hash
from tests.unit.supervisor.fleets import fleet_plan, stub_router, stub_server

POLICY = RestartPolicy(max_restarts=4, window_s=100, backoff_s=1, backoff_max_s=5)


def test_the_wait_before_a_restart_doubles_up_to_its_cap() -> None:
    policy = POLICY.model_copy(update={"max_restarts": 10})
    waits = [decide(policy, [0.0] * count, now=1.0).wait_s for count in range(5)]
    assert waits == [1, 2, 4, 5, 5]


def test_a_replica_that_died_too_often_within_the_window_is_given_up() -> None:
    decision = decide(POLICY, [1.0, 2.0, 3.0, 4.0], now=50.0)
    assert not decision.restart
    assert "4 times within 1m40s" in decision.reason


def test_restarts_older_than_the_window_are_forgiven() -> None:
    decision = decide(POLICY, [1.0, 2.0, 3.0, 4.0], now=103.5)
    assert decision.restart
    assert decision.wait_s == 2.0  # only the one at 4.0 still counts


def test_the_policy_never_restarts_nothing() -> None:
    assert not decide(POLICY.model_copy(update={"policy": "never"}), [], now=0.0).restart


def test_a_thousand_restarts_do_not_overflow_the_backoff() -> None:
    policy = POLICY.model_copy(update={"max_restarts": 10_000})
    assert decide(policy, [0.0] * 5000, now=1.0).wait_s == 5


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"a": "ready", "b": "ready"}, {"a", "b"}),
        ({"a": "ready", "b": "paused"}, {"a"}),
        ({"a": "ready", "b": "asleep", "c": "quarantined"}, {"a"}),
        ({"a": "paused", "b": "paused"}, {"a", "b"}),
        ({"a": "updating", "b": "paused", "c": "quarantined"}, {"a", "b"}),
        ({"a": "asleep", "b": "starting"}, set()),
        ({}, set()),
    ],
)
def test_routed_are_the_ready_ones_or_a_fleet_that_is_frozen_as_a_whole(
    states: dict[str, str], expected: set[str]
) -> None:
    shown = {name: ReplicaState(state) for name, state in states.items()}
    assert routable(shown) == expected


def test_a_plan_is_compared_replica_by_replica() -> None:
    plan = fleet_plan([stub_server("a"), stub_server("b"), stub_server("c")], stub_router())
    a, b, c = (spec_hash(spec) for spec in plan.servers)
    assert plan.router is not None
    router = spec_hash(plan.router)
    given_up = None
    running = {"a": a, "b": "differs", "c": given_up, "gone": "x"}
    changes = compare(plan, running, router)
    assert (changes.start, changes.restart, changes.stop) == (("c",), ("b",), ("gone",))
    assert not changes.router
    same = {"a": a, "b": b, "c": c}
    assert not compare(plan, same, router)
    assert compare(plan, same, None).router
    api = FrontSpec(("api",), {}, "127.0.0.1", 8790)
    with_api, runs = replace(plan, tinker=api), spec_hash(api)
    assert not compare(with_api, same, router, runs)
    for found in (None, "differs", given_up):
        assert str(compare(with_api, same, router, found)) == "tinker"
    assert compare(plan, same, router, runs).tinker


def test_how_cores_are_shared_out_does_not_make_a_server_another() -> None:
    spec = stub_server("a")
    moved = replace(spec, env={**spec.env, "VLLM_CPU_OMP_THREADS_BIND": "0-3"})
    other = replace(spec, env={**spec.env, "VLLM_USE": "1"})
    assert spec_hash(spec) == spec_hash(moved) != spec_hash(other)


def test_only_the_tinker_api_is_another_for_another_skyctls_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = (stub_server("a"), stub_router(), FrontSpec(("api",), {}, "127.0.0.1", 8790))
    before = [spec_hash(spec) for spec in specs]
    monkeypatch.setattr(wire, "PROTOCOL", wire.PROTOCOL + 1)
    server, router, api = (spec_hash(spec) == old for spec, old in zip(specs, before, strict=True))
    assert server and router and not api


def test_a_plan_survives_the_wire() -> None:
    plan = fleet_plan([stub_server("a", VLLM_API_KEY="secret")], stub_router())
    client = SupervisorClient("stubs", KeptConnections())
    warned = replace(plan, warnings=(PlanWarning("for the user alone"),))
    found = adapter(Reconcile).validate_json(client._encoded(Reconcile(warned))).plan
    assert found == plan
    assert found.config.model_fields_set == plan.config.model_fields_set


VLLM_FAILURE = """
(EngineCore pid=7) ERROR 11-20 23:00:00 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-20 23:00:00 [core.py:9]     raise ValueError("x")
(EngineCore pid=7) ERROR 11-20 23:00:00 [core.py:9] ValueError: no memory for the KV cache
(APIServer pid=5) Traceback (most recent call last):
(APIServer pid=5)   File "x.py", line 3, in <module>
(APIServer pid=5)     raise RuntimeError(
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.
""".strip().splitlines()


def test_the_telling_line_is_the_cause_and_not_its_consequence() -> None:
    assert telling_line(VLLM_FAILURE) == "ValueError: no memory for the KV cache"
    assert telling_line(VLLM_FAILURE[3:]).startswith("RuntimeError: Engine core")
    assert telling_line(["INFO all is well", "Errors: none"]) == ""


def test_a_process_did_not_die_of_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert why_it_died(log) == ""
    mark_start(log, "a", 0.0)
    with log.open("a") as file:
        file.write("ValueError: the first")  # it died amid the line
    assert why_it_died(log) == "ValueError: the first"
    mark_start(log, "a", 1.0)
    assert why_it_died(log) == "" and latest_message(this_run(tail(log, 9))) == ""
    with log.open("a") as file:
        file.write("started\nOSError: the second\n")
    assert why_it_died(log) == "OSError: the second"
    shown = tail(log, 9)
    assert [is_mark(line) for line in shown] == [True, False, True, False, False]
    assert this_run(shown) == ["started", "OSError: the second"]
    log.write_text("KeyError: 1\n")  # it was rotated, and its start with it
    assert why_it_died(log) == "KeyError: 1"


def test_a_log_line_loses_its_prefix() -> None:
    line = "(EngineCore pid=7) INFO 11-20 23:00:00 [core.py:9] Loading weights took 0.1 seconds"
    assert message(line) == "Loading weights took 0.1 seconds"


def test_what_a_server_does_now_is_where_its_last_message_begins() -> None:
    first = "(EngineCore pid=7) INFO 11-20 23:00:00 [core.py:1] Loading"
    prefix = "(EngineCore pid=7) INFO 11-20 23:00:00 [cpu.py:9] "
    lines = [first, f"{prefix}Threads are bound:", f"{prefix}reserved=[]"]
    assert latest_message(lines) == "Threads are bound:"
    assert latest_message(["no prefix", "at all"]) == "at all"
    assert latest_message([]) == ""


def test_the_tail_of_a_log_has_whole_lines_without_escapes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"\x1b[32mline {n}\x1b[0m\n" for n in range(50_000)) + "50%\r100%\n")
    assert tail(log, 2) == ["line 49999", "100%"]
    assert tail(log, 0) == []
    assert len(tail(log, 100_000)) == 50_001
    assert tail(tmp_path / "none", 5) == []


def test_answered_probes_are_left_out_of_a_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    probe = 'INFO: 127.0.0.1:1 - "GET /is_paused HTTP/1.1" 200 OK\n'
    failed = 'INFO: 127.0.0.1:1 - "GET /is_paused HTTP/1.1" 500\n'
    log.write_text("first\n" + probe * 20_000 + failed + probe)
    assert tail(log, 2) == ["first", failed.rstrip()]
    assert tail(log, 2, probes=True) == [failed.rstrip(), probe.rstrip()]

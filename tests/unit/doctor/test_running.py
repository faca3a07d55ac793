"""The running fleet's checks: status, router and weights against what was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.core.diagnosis import assess, drift, from_intent, unsupervised
from skyctl.core.findings import Severity
from skyctl.core.status import FleetStatus, ReplicaStatus, RouterStatus
from skyctl.doctor.check_line import CheckLine, count
from skyctl.doctor.running import LONG_PAUSE_S, RunningFacts, check_running
from skyctl.states import ReplicaState
from skyctl.store.journal import PushRecord
from skyctl.store.state import ServerRow


def replica(number: int, **fields: Any) -> ReplicaStatus:
    state = ReplicaState(fields.pop("state", "ready"))
    defaults: dict[str, Any] = {"weight_version": "v1"}
    return ReplicaStatus(f"f-{number}", state, f"http://h:{number}", **{**defaults, **fields})


def facts(*replicas: ReplicaStatus, supervised: bool | None = True, **more: Any) -> RunningFacts:
    """A fleet of these replicas (two sound ones by default) whose router lists what it should."""
    replicas = replicas or (replica(0), replica(1))
    router = RouterStatus(ReplicaState.READY, "http://h:9")
    health, reasons = assess(replicas, router)
    if supervised is False:
        reasons += unsupervised(["f-0"], going_down=False, stale=False, problem="")
    status = FleetStatus(
        "f", health, replicas, router, reasons, supervised, supervisor_pid=7, weight_version="v1"
    )
    listed = [r.url for r in replicas if r.state == "ready"]
    defaults: dict[str, Any] = {
        "vllm": {r.name: "0.32.0" for r in replicas},
        "workers": listed,
    }
    return RunningFacts(status, **{**defaults, **more})


def wrong(given: RunningFacts) -> list[CheckLine]:
    findings = [f for f in check_running(given) if f.severity is not Severity.OK]
    assert all(finding.section == "running" and finding.fix for finding in findings)
    return findings


def names(given: RunningFacts) -> list[tuple[str, str]]:
    return [(f.severity.value, f.check) for f in wrong(given)]


def test_a_sound_fleet_has_nothing_to_fix() -> None:
    assert wrong(facts()) == []
    assert count(check_running(facts()), Severity.OK) >= 4


def test_a_fleet_that_is_down_is_one_ok_line() -> None:
    [finding] = check_running(RunningFacts(FleetStatus("f", "down", (), None)))
    assert finding.severity is Severity.OK and "not running" in finding.message


def test_a_dead_supervisor_is_an_error_of_its_own() -> None:
    assert ("error", "supervisor") in names(facts(supervised=False))
    assert ("error", "supervisor") not in names(facts(supervised=None))


@pytest.mark.parametrize(
    ("state", "severity"),
    [("dead", "error"), ("failed", "error"), ("starting", "warning"), ("restarting", "warning")],
)
def test_replicas_that_do_not_serve_are_found(state: str, severity: str) -> None:
    checks = names(facts(replica(0), replica(1, state=state)))
    assert (severity, "replicas") in checks


def test_a_replica_that_died_often_is_worth_a_look() -> None:
    assert names(facts(replica(0, restarts=3), replica(1))) == [("warning", "restarts")]
    [finding] = wrong(facts(replica(0, restarts=1)))
    assert finding.message == "f-0 was started again 1 time"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(LONG_PAUSE_S + 1, [("warning", "paused")]), (LONG_PAUSE_S - 1, []), (None, [])],
)
def test_a_forgotten_pause_is_found(seconds: float | None, expected: list[tuple[str, str]]) -> None:
    assert names(facts(replica(0, state="paused", state_s=seconds), replica(1))) == expected


def test_drift_is_passed_on_with_its_hint() -> None:
    [finding] = wrong(facts(drift=[drift("f-0", "is not in the file", "skyctl up")]))
    assert (finding.check, finding.message, finding.fix) == (
        "drift",
        "f-0 is not in the file",
        "skyctl up",
    )


def test_a_server_that_status_reports_is_not_reported_again_as_drift() -> None:
    dead = replica(1, state="dead")
    [finding] = wrong(facts(replica(0), dead, drift=from_intent([dead], [])))
    assert finding.check == "replicas" and "f-1 is dead" in finding.message


def test_mixed_vllm_versions_are_an_error() -> None:
    [finding] = wrong(facts(vllm={"f-0": "0.26.0", "f-1": "0.32.0"}))
    assert finding.check == "vllm-versions" and "f-0 0.26.0" in finding.message


def test_mixed_weight_versions_are_one_error_and_not_two() -> None:
    assert names(facts(replica(0), replica(1, weight_version="v2"))) == [
        ("error", "weight-versions")
    ]


def test_a_server_that_reports_another_version_than_was_pushed_is_found() -> None:
    [finding] = wrong(facts(replica(0), replica(1, reported_version="elsewhere")))
    assert finding.check == "weight-versions" and "holds elsewhere" in finding.message
    assert wrong(facts(replica(0, reported_version="v1"), replica(1))) == []


def test_digests_recorded_by_pushes_must_agree_within_a_version() -> None:
    def rows(*digests: tuple[str, str]) -> list[ServerRow]:
        return [
            ServerRow(f"f-{n}", weight_version=version, weights_digest=digest)
            for n, (version, digest) in enumerate(digests)
        ]

    assert wrong(facts(rows=rows(("v1", "aa"), ("v1", "aa")))) == []
    assert wrong(facts(rows=rows(("v1", "aa"), ("v2", "bb")))) == []
    assert wrong(facts(rows=rows(("v1", "aa"), ("v1", "bb:tp2")))) == []
    [finding] = wrong(facts(rows=rows(("v1", "aa"), ("v1", "bb"))))
    assert finding.check == "weight-digests" and "f-0 aa; f-1 bb" in finding.message


@pytest.mark.parametrize(
    ("agree", "as_recorded", "expected"),
    [
        (True, True, []),
        (True, False, ["error"]),
        (False, None, ["error"]),
        (None, None, ["warning"]),
    ],
)
def test_a_verification_made_now_counts_more_than_the_records(
    agree: bool | None, as_recorded: bool | None, expected: list[str]
) -> None:
    rows = [ServerRow("f-0", False, 0, "v1", None, None, digest) for digest in ("aa", "bb")]
    server = {"server": "f-0", "digest": "aa", "detail": "labelled x", "as_recorded": as_recorded}
    report = {"servers": [server], "agree": agree}
    findings = wrong(facts(rows=rows, verification=report))
    assert [f.severity.value for f in findings] == expected


@pytest.mark.parametrize(
    ("second", "workers", "expected"),
    [
        ({"state": "ready"}, ["http://h:0"], "does not list it"),
        ({"state": "asleep"}, ["http://h:0", "http://h:1/"], "is asleep, and the router lists it"),
        ({"state": "paused"}, ["http://h:0", "http://h:1"], "requests that wait"),
        ({}, ["http://h:0", "http://h:1", "http://x:5"], "not a server of this fleet"),
    ],
)
def test_a_router_out_of_step_is_found(
    second: dict[str, Any], workers: list[str], expected: str
) -> None:
    findings = wrong(facts(replica(0), replica(1, **second), workers=workers))
    assert [f.check for f in findings] == ["router"]
    assert expected in findings[0].message


def test_a_wholly_frozen_fleet_stays_routed_and_that_is_right() -> None:
    both = (replica(0, state="paused"), replica(1, state="paused"))
    assert wrong(facts(*both, workers=["http://h:0", "http://h:1"])) == []
    assert wrong(facts(workers=None)) == []


def test_a_failed_push_is_worth_a_look() -> None:
    failed = PushRecord("push-3", 0.0, False, None, "c", None, {"error": "f-1: no answer"})
    [finding] = wrong(facts(pushes=[failed]))
    assert (finding.check, finding.fix) == ("last-push", "look: skyctl jobs show push-3")
    went_well = PushRecord("push-4", 0.0, True, "v2", "c", None, {"freeze_window_s": 0.06})
    messages = [f.message for f in check_running(facts(pushes=[went_well, failed]))]
    assert "push-4 went well: v2, frozen for 60 ms" in messages


def test_a_server_whose_control_routes_are_open_is_named_with_what_closes_them() -> None:
    sound = facts(asks_token={"f-0": True, "f-1": True})
    assert wrong(sound) == []
    assert any(f.check == "control-tokens" for f in check_running(sound))
    (ours,) = wrong(facts(asks_token={"f-0": True, "f-1": False}))
    assert (ours.check, ours.severity) == ("control-tokens", Severity.WARNING)
    assert "f-1" in ours.message and "f-0" not in ours.message and "skyctl up" in ours.fix
    (theirs,) = wrong(facts(supervised=None, asks_token={"f-0": False}))
    assert "every client that reaches" in theirs.message

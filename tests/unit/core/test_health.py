"""The fleet's health is what its users meet, and the reasons say what ends it."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.core.diagnosis import assess
from skyctl.core.health import FailureCount
from skyctl.core.status import (
    FrontStatus,
    Health,
    OperationKind,
    ReplicaStatus,
    RouterStatus,
)
from skyctl.errors import ExitCode, ServerError
from skyctl.fleetfile.sections import HealthPolicy
from skyctl.states import ReplicaState


def replicas(*states: str, **fields: Any) -> list[ReplicaStatus]:
    return [
        ReplicaStatus(f"f-{number}", ReplicaState(state), f"http://h:{number}", **fields)
        for number, state in enumerate(states)
    ]


ROUTER = RouterStatus(ReplicaState.READY, "http://h:9")
DIED = {"restart_reason": "killed by signal 9", "restarts": 1}


@pytest.mark.parametrize(
    ("states", "more", "health"),
    [
        (("ready", "ready"), {}, Health.HEALTHY),
        (("ready", "paused"), {}, Health.PARTIAL),
        (("ready", "starting"), {}, Health.PARTIAL),
        (("ready", "updating"), {"pushing": True}, Health.PARTIAL),
        (("ready", "stopped"), {"operation": OperationKind.RESTART}, Health.PARTIAL),
        (("ready", "stopped"), {}, Health.DEGRADED),
        (("ready", "restarting"), {}, Health.DEGRADED),
        (("ready", "quarantined"), {}, Health.DEGRADED),
        (("starting", "starting"), {}, Health.STARTING),
        (("starting", "paused"), {}, Health.STARTING),
        (("updating", "updating"), {}, Health.STARTING),
        (("updating", "updating"), {"pushing": True}, Health.UPDATING),
        (("updating", "paused"), {"pushing": True}, Health.UPDATING),
        (("paused", "paused"), {}, Health.PAUSED),
        (("paused", "asleep"), {}, Health.PAUSED),
        (("asleep", "asleep"), {}, Health.ASLEEP),
        (
            ("stopping", "ready"),
            {"operation": OperationKind.DOWN, "routed": False},
            Health.STOPPING,
        ),
        (("paused", "dead"), {}, Health.UNAVAILABLE),
        (("quarantined", "quarantined"), {}, Health.UNAVAILABLE),
        (("ready", "ready"), {"routed": False}, Health.UNAVAILABLE),
        (("stopped", "dead"), {}, Health.DOWN),
        ((), {}, Health.DOWN),
    ],
)
def test_the_health_says_what_users_meet(
    states: tuple[str, ...], more: dict[str, Any], health: Health
) -> None:
    asked = dict(more)
    routed = {"routed": asked.pop("routed", None)}
    verdict, reasons = assess(replicas(*states, **routed), ROUTER, **asked)
    assert verdict == health
    assert bool(reasons) == (health is not Health.HEALTHY and states != ())
    faulty = {"restarting", "quarantined", "dead"} & set(states)
    unserved = health in (Health.DEGRADED, Health.UNAVAILABLE)
    assert any(reason.fault for reason in reasons) == bool(faulty or unserved)


@pytest.mark.parametrize(
    ("front", "health"),
    [
        (RouterStatus(ReplicaState.STARTING, "http://h:9"), Health.STARTING),
        (RouterStatus(ReplicaState.FAILED, "http://h:9"), Health.UNAVAILABLE),
        (
            RouterStatus(ReplicaState.STARTING, "http://h:9", restart_reason="exit 1"),
            Health.UNAVAILABLE,
        ),
        (FrontStatus(ReplicaState.STARTING, "http://h:8"), Health.PARTIAL),
        (FrontStatus(ReplicaState.FAILED, "http://h:8"), Health.DEGRADED),
    ],
)
def test_users_reach_no_server_without_the_router(front: FrontStatus, health: Health) -> None:
    is_router = isinstance(front, RouterStatus)
    verdict, _ = assess(
        replicas("ready"), front if is_router else ROUTER, None if is_router else front
    )
    assert verdict == health


def test_a_tinker_api_that_cannot_train_is_a_fault_and_keeps_no_user_out() -> None:
    api = FrontStatus(ReplicaState.READY, "http://h:8", reason="the training worker did not start")
    verdict, (reason,) = assess(replicas("ready"), ROUTER, api)
    assert (verdict, reason.fault) == (Health.DEGRADED, True)
    assert reason.message == "the Tinker API reports: the training worker did not start"
    assert assess(replicas("ready"), ROUTER, FrontStatus(ReplicaState.READY, "http://h:8"))[1] == ()


def test_a_server_that_died_is_no_ordinary_start() -> None:
    verdict, (reason,) = assess(replicas("starting", **DIED), ROUTER)
    assert verdict == Health.UNAVAILABLE
    assert reason.fault and reason.message == "f-0 is starting: killed by signal 9"


def test_prefill_alone_answers_nobody() -> None:
    prefill, decode = replicas("ready", role="prefill"), replicas("paused", role="decode")
    assert assess([*prefill, *decode], ROUTER)[0] == Health.PAUSED
    assert assess([*prefill, *replicas("ready", role="decode")], ROUTER)[0] == Health.HEALTHY


@pytest.mark.parametrize(
    ("states", "hint"),
    [
        (("paused", "paused"), "skyctl resume"),
        (("asleep", "asleep"), "skyctl wake"),
        (("ready", "paused"), "skyctl resume f-1"),
        (("asleep", "ready", "asleep"), "skyctl wake f-0 f-2"),
    ],
)
def test_what_was_requested_names_what_ends_it(states: tuple[str, ...], hint: str) -> None:
    _, (reason,) = assess(replicas(*states), ROUTER)
    assert not reason.fault and reason.hint == hint


def test_a_fleet_of_which_one_sleeps_and_the_rest_is_paused_is_not_called_paused() -> None:
    verdict, (paused, asleep) = assess(replicas("paused", "asleep"), ROUTER)
    assert verdict == Health.PAUSED
    assert (paused.message, paused.hint) == ("f-0 is paused: requests wait", "skyctl resume f-0")
    assert (asleep.message, asleep.hint) == ("f-1 is asleep", "skyctl wake f-1")


@pytest.mark.parametrize("health", Health)
def test_the_exit_code_is_0_while_users_are_served(health: Health) -> None:
    served = health in (Health.HEALTHY, Health.PARTIAL, Health.UPDATING)
    down = ExitCode.NOT_FOUND if health is Health.DOWN else ExitCode.FAILED
    assert health.exit_code == (ExitCode.OK if served else down)


def test_an_engine_that_computes_tokens_is_late_and_not_dead() -> None:
    late = ServerError("no answer in 10 s")
    busy, stuck, silent = (FailureCount(HealthPolicy(failures=3)) for _ in range(3))
    assert not any(busy.failed(late, tokens) for tokens in range(100))
    assert [bool(stuck.failed(late, 7)) for _ in range(3)] == [False, False, True]
    assert [bool(silent.failed(late)) for _ in range(3)] == [False, False, True]
    assert [bool(busy.failed(late, 99)) for _ in range(3)] == [False, False, True]  # by now it is

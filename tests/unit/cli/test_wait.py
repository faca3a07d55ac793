"""What `wait` waits for, and when it stops waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyctl.cli import wait as waiting
from skyctl.cli.wait import Condition, wait_for
from skyctl.core.status import (
    FleetStatus,
    Operation,
    OperationKind,
    ReplicaStatus,
    RouterStatus,
    TinkerStatus,
)
from skyctl.errors import (
    DeadlineExceeded,
    FleetDownError,
    NotFoundError,
    SkyctlError,
    UsageError,
)
from skyctl.states import ReplicaState


def replica(name: str, **fields: Any) -> ReplicaStatus:
    state = ReplicaState(fields.pop("state", "ready"))
    return ReplicaStatus(name, state, "http://h:1", **fields)


def status(*replicas: ReplicaStatus, router: str = "ready", tinker: str = "ready") -> FleetStatus:
    if not replicas:
        return FleetStatus("tiny", "down", (), None)
    made = RouterStatus(ReplicaState(router), "http://h:2")
    api = TinkerStatus(ReplicaState(tinker), "http://h:3")
    return FleetStatus("tiny", "healthy", replicas, made, tinker=api)


class Fleet:
    def __init__(self, *statuses: FleetStatus | SkyctlError) -> None:
        self.statuses = list(statuses)

    async def status(self) -> FleetStatus:
        answer = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(answer, SkyctlError):
            raise answer
        return answer


async def wait(fleet: Fleet, text: str, timeout_s: float = 5.0, **options: Any) -> FleetStatus:
    condition = Condition.parse(text)
    return await wait_for(fleet, condition, timeout_s=timeout_s, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_S", 0.0)


@pytest.mark.parametrize("text", ["", "up", "version", "version=", "ready=1", "Ready"])
def test_an_unknown_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="nothing to wait for"):
        Condition.parse(text)


@pytest.mark.parametrize(
    ("text", "met", "unmet"),
    [
        ("ready", {"state": "ready"}, {"state": "paused"}),
        ("ready", {"state": "ready", "routed": True}, {"state": "ready", "routed": False}),
        ("paused", {"state": "paused"}, {"state": "ready"}),
        ("awake", {"state": "paused"}, {"state": "asleep"}),
        ("awake", {"state": "ready"}, {"state": "starting"}),
        ("version=v2", {"weight_version": "v2"}, {"weight_version": "v1"}),
        ("version=v2", {"weight_version": "v2@1f"}, {"weight_version": "v2-1@1f"}),
        ("version=base", {}, {"weight_version": "v1"}),
    ],
)
def test_each_condition_is_met_by_what_it_says(
    text: str, met: dict[str, Any], unmet: dict[str, Any]
) -> None:
    condition = Condition.parse(text)
    assert condition.met_by(replica("a", **met))
    assert not condition.met_by(replica("a", **unmet))


async def test_it_ends_when_the_last_server_and_the_fronts_are_there() -> None:
    fleet = Fleet(
        status(),
        status(replica("a", state="starting"), replica("b")),
        status(replica("a"), replica("b"), router="starting"),
        status(replica("a"), replica("b"), tinker="starting"),
        status(replica("a"), replica("b")),
    )
    heard: list[str] = []
    await wait(fleet, "ready", on_pending=lambda pending: heard.append("; ".join(pending)))
    fronts = ["router is starting", "tinker is starting"]
    assert heard == ["fleet tiny is down", "a is starting", *fronts]


async def test_only_the_named_servers_are_waited_for() -> None:
    fleet = Fleet(status(replica("a", state="paused"), replica("b"), router="starting"))
    await wait(fleet, "paused", names=["a"])
    await wait(fleet, "ready", names=["b"])
    with pytest.raises(NotFoundError, match="'c'"):
        await wait(fleet, "ready", names=["c"])


async def test_the_deadline_says_what_is_missing() -> None:
    fleet = Fleet(status(replica("a", state="starting")))
    with pytest.raises(DeadlineExceeded, match="not ready after 0 s: a is starting"):
        await wait(fleet, "ready", timeout_s=0)


async def test_a_supervisor_that_does_not_answer_yet_is_waited_for() -> None:
    silent = (FleetDownError("no supervisor answers", hint="is it up?"), DeadlineExceeded("late"))
    ready = status(replica("a"))
    heard: list[str] = []
    fleet = Fleet(*silent, ready)
    assert await wait(fleet, "ready", on_pending=lambda p: heard.extend(p)) is ready
    assert heard == ["no supervisor answers", "late"]
    with pytest.raises(DeadlineExceeded, match="after 0 s: no supervisor answers") as raised:
        await wait(Fleet(silent[0]), "ready", timeout_s=0)
    assert raised.value.hint == "is it up?"
    with pytest.raises(UsageError, match="not trusted"):
        await wait(Fleet(UsageError("its certificate is not trusted")), "ready", timeout_s=1e9)


async def test_a_server_that_was_given_up_ends_the_wait_at_once() -> None:
    fleet = Fleet(status(replica("a", state="failed", reason="exited with code 3"), replica("b")))
    with pytest.raises(SkyctlError, match="a is failed and will not be ready: exited") as raised:
        await wait(fleet, "ready", timeout_s=1e9)
    assert "skyctl restart a" in raised.value.hint
    assert await wait(fleet, "ready", names=["b"]) is fleet.statuses[0]


async def test_a_server_that_is_being_repaired_is_waited_for() -> None:
    out = status(replica("a", state="quarantined", reason="the trainer died"))
    repair = Operation(1, OperationKind.RECOVER, "after push-1", began_at=1.0)
    repaired = replace(out, operation=replace(repair, ended_at=2.0, error="nothing helped"))
    under_way = [replace(out, job="push-1"), replace(out, operation=repair)]
    ready = status(replica("a"))
    assert await wait(Fleet(*under_way, ready), "ready") is ready
    with pytest.raises(SkyctlError, match="a is quarantined and will not be ready"):
        await wait(Fleet(*under_way, repaired), "ready", timeout_s=1e9)

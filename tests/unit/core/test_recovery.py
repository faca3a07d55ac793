"""What recovery tries, and in which order, with hands that only remember."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.core.diagnosis import Finding
from skyctl.core.recovery import Recovered, interrupted_request, needed, recover, settle
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import SkyctlError, StateUnwritable, WeightsGone
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.push.verify import weights_digest
from skyctl.store.in_doubt import InDoubt, doubt, in_doubt
from skyctl.store.journal import Job, Told
from skyctl.store.state import FleetState
from tests.stub.app import StubServer
from tests.stub.inprocess import StubTransport


class Hands:
    """Two stubs, `stub-0` and `stub-1`; pushes and restarts go as told."""

    def __init__(self, state: FleetState) -> None:
        self.stubs = [StubServer(), StubServer()]
        transport = StubTransport(self.stubs)
        self.state = state
        self.client = ControlClient(transport=transport)
        self.control_timeout_s = 5.0
        self.targets: dict[str, ServerTarget] = {t.name: t for t in transport.targets}
        self.done: list[str] = []
        self.push_error = self.bring_error = self.restart_error = ""
        self.replacing = self.most_at_once = 0
        self.gone = self.full = False

    async def push(self, request: PushRequest, servers: Collection[str]) -> Job:
        self.done.append(f"push {request.checkpoint}")
        self.pushed = list(servers)
        self._need_room()
        job = self.state.journal.begin("push", request.to_json())
        if self.push_error:
            self.state.journal.end(job.id, "failed", error={"message": self.push_error})
        else:
            for name in in_doubt(self.state):
                settle(self.state, name)
            self.state.journal.end(job.id, "succeeded")
        return self.state.journal.job(job.id)

    async def bring(self, name: str) -> None:
        self.done.append(f"bring {name}")
        self._need_room()
        if self.gone:
            raise WeightsGone("/fleet was overwritten since it was pushed as v1")
        if self.bring_error:
            raise SkyctlError(self.bring_error)

    def _need_room(self) -> None:
        if self.full:
            raise StateUnwritable("cannot write it: disk is full", hint="free space at /home")

    async def replace(self, name: str, why: str) -> str:
        self.done.append(f"replace {name}: {why}")
        self.replacing += 1
        self.most_at_once = max(self.most_at_once, self.replacing)
        await asyncio.sleep(0)
        self.replacing -= 1
        return self.restart_error

    def waits(self, name: str, reason: str) -> None:
        self.done.append(f"wait {name}: {reason}")


@pytest.fixture
async def hands(tmp_path: Path) -> AsyncIterator[Hands]:
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        hands = Hands(state)
        yield hands
        await hands.client.aclose()


def leave(hands: Hands, *names: str, half: bool, checkpoint: str = "/new") -> list[Finding]:
    """Findings of servers that a push to `checkpoint` left."""
    job = hands.state.journal.begin("push", PushRequest(checkpoint).to_json())
    pushed = {"checkpoint": checkpoint, "checkpoint_digest": "of these files"}
    hands.state.journal.tell(job.id, Told("prepared", pushed))
    hands.state.journal.end(job.id, "interrupted")
    stage = "update" if half else "pause"
    doubt(hands.state, {name: InDoubt(name, job.id, stage, half, True) for name in names})
    found, action = ("half-updated", "push") if half else ("frozen", "resume")
    return [Finding(name, found, "", action) for name in names]  # type: ignore[arg-type]


def outcomes(recovered: list[Recovered]) -> list[tuple[str, bool]]:
    return [(one.action, one.ok) for one in recovered]


async def test_a_frozen_server_is_resumed_and_nothing_is_pushed(hands: Hands) -> None:
    findings = leave(hands, "stub-0", half=False)
    await hands.stubs[0].engine.pause("keep")
    assert outcomes(await recover(findings, hands)) == [("resume", True)]
    assert not hands.stubs[0].engine.paused and hands.done == []
    assert in_doubt(hands.state) == {} and hands.state.server("stub-0").quarantine is None


@pytest.mark.parametrize(("found", "at_once"), [("stuck", 2), ("wrong-version", 1)])
async def test_servers_that_serve_nobody_are_restarted_at_once(
    hands: Hands, found: str, at_once: int
) -> None:
    findings = [Finding(f"stub-{n}", found, "", "restart") for n in range(2)]  # type: ignore[arg-type]
    assert outcomes(await recover(findings, hands)) == [("restart", True)] * 2
    assert hands.most_at_once == at_once


@pytest.mark.parametrize(("level", "awake"), [(1, set()), (2, {"stub-0"})])
async def test_one_whose_weights_were_woken_sleeps_again(
    hands: Hands, level: int, awake: set[str]
) -> None:
    job = hands.state.journal.begin("push", PushRequest("/new", colocated=True).to_json())
    hands.state.journal.end(job.id, "interrupted")
    hands.state.update_server("stub-0", sleep_level=level)
    doubt(hands.state, {"stub-0": InDoubt("stub-0", job.id, "wake", False, True, woken=True)})
    engine = hands.stubs[0].engine
    await engine.sleep(level, "abort")
    await engine.wake(["weights"])
    findings = [Finding("stub-0", "woken", "", "sleep")]
    assert outcomes(await recover(findings, hands)) == [("sleep", True)]
    assert ("weights" in engine.asleep) == (level == 1) and "kv_cache" in engine.asleep
    assert hands.state.weights_awake() == awake and in_doubt(hands.state) == {}
    assert hands.state.server("stub-0").quarantine is None and hands.done == []


async def test_one_that_somebody_paused_by_skyctl_stays_so(hands: Hands) -> None:
    findings = leave(hands, "stub-0", half=False)
    hands.state.update_server("stub-0", paused=True)
    await hands.stubs[0].engine.pause("keep")
    await recover(findings, hands)
    assert hands.stubs[0].engine.paused


async def test_a_frozen_server_that_holds_something_else_is_pushed_to(hands: Hands) -> None:
    findings = leave(hands, "stub-0", half=False)
    hands.state.update_server("stub-0", weights_digest="what it had")
    await hands.stubs[0].engine.pause("keep")
    assert outcomes(await recover(findings, hands)) == [("push", True)]
    assert hands.done == ["push /new"]


@pytest.mark.parametrize("held", ["the same", "something else"])
async def test_what_the_push_saw_before_it_froze_a_server_is_compared(
    hands: Hands, held: str
) -> None:
    server = VLLMServer(hands.client, hands.targets["stub-0"])
    before = (await weights_digest(server, timeout_s=5)).digest
    findings = leave(hands, "stub-0", half=False)
    doubt(hands.state, {"stub-0": replace(in_doubt(hands.state)["stub-0"], digest=before)})
    engine = hands.stubs[0].engine
    await engine.pause("keep")
    if held == "something else":
        engine.digest = held
    assert outcomes(await recover(findings, hands)) == [
        ("resume" if held == "the same" else "push", True)
    ]
    assert engine.paused == (held == "something else")  # the push of these hands thaws nobody


async def test_half_updated_servers_get_the_push_that_was_on_its_way(hands: Hands) -> None:
    leave(hands, "stub-0", half=True, checkpoint="/older")
    findings = leave(hands, "stub-0", "stub-1", half=True)
    assert needed(hands.state) == {"/new"}
    assert outcomes(await recover(findings, hands)) == [("push", True)] * 2
    assert hands.done == ["push /new"]
    assert needed(hands.state) == set()


async def test_a_push_that_was_on_its_way_reaches_all_but_those_that_are_replaced(
    hands: Hands,
) -> None:
    """Nobody whom recovery leaves as it is may stay behind at older weights."""
    findings = leave(hands, "stub-0", half=True)
    findings += [Finding("stub-1", "healthy"), Finding("stub-2", "stuck", "", "quarantine")]
    await recover(findings, hands)
    assert hands.pushed == ["stub-0", "stub-1"]


async def test_a_fleet_that_moved_on_does_not_go_back_to_a_push_that_broke_off(
    hands: Hands,
) -> None:
    findings = leave(hands, "stub-0", half=True)
    job = hands.state.journal.begin("push", {})
    hands.state.journal.record_push(
        job.id, ok=True, version="v9", checkpoint="/v9", checkpoint_digest="d", result={}
    )
    assert outcomes(await recover(findings, hands)) == [("push", True)]
    assert hands.done == ["bring stub-0"]


async def test_when_that_cannot_be_had_they_get_the_fleets_weights(hands: Hands) -> None:
    findings = leave(hands, "stub-0", "stub-1", half=True)
    hands.push_error = "/new is gone"
    assert outcomes(await recover(findings, hands)) == [("push", True)] * 2
    assert hands.done == ["push /new", "bring stub-0", "bring stub-1"]
    assert in_doubt(hands.state) == {}


async def test_and_are_restarted_when_that_fails_too(hands: Hands) -> None:
    findings = leave(hands, "stub-0", half=True)
    hands.push_error = hands.bring_error = "no room"
    assert outcomes(await recover(findings, hands)) == [("restart", True)]
    assert hands.done[-1] == "replace stub-0: no room"


async def test_what_could_not_be_put_right_says_why(hands: Hands) -> None:
    hands.restart_error = "it does not start"
    findings = [Finding("stub-0", "stuck", "no answer", "restart"), Finding("stub-1", "healthy")]
    recovered = await recover(findings, hands)
    assert outcomes(recovered) == [("restart", False), ("nothing", True)]
    assert recovered[0].detail == "it does not start"


async def test_a_request_that_nobody_can_read_any_more_is_no_request(hands: Hands) -> None:
    findings = leave(hands, "stub-0", half=True)
    hands.state._database.write('UPDATE jobs SET request = \'{"from": "the future"}\'')
    assert outcomes(await recover(findings, hands)) == [("push", True)]
    assert hands.done == ["bring stub-0"]


async def test_servers_whose_weights_are_gone_wait_for_the_next_push(hands: Hands) -> None:
    """A directory that is overwritten at every step: a restarted server could not have them."""
    findings = leave(hands, "stub-0", half=True)
    hands.push_error, hands.gone = "/new was written anew", True
    [report] = await recover(findings, hands)
    assert not report.ok and "written anew" not in report.detail
    assert hands.done[:2] == ["push /new", "bring stub-0"]
    assert hands.done[2:] == [f"wait stub-0: {report.detail}"]
    assert report.detail.endswith("push again: skyctl sync-weights CKPT")


@pytest.mark.parametrize("readable", [True, False])
async def test_on_a_full_disk_what_is_frozen_is_resumed_and_what_needs_a_push_waits(
    hands: Hands, readable: bool
) -> None:
    """Nothing is touched that a death would leave unknown, and nothing is restarted for it."""
    frozen = leave(hands, "stub-0", half=False)
    half = leave(hands, "stub-1", half=True)
    await hands.stubs[0].engine.pause("keep")
    if not readable:  # no push can be made again
        hands.state._database.write("UPDATE jobs SET request = '{}'")
    hands.full = True
    reports = await recover([*frozen, *half], hands)
    assert outcomes(reports) == [("resume", True), ("push", False)]
    assert not hands.stubs[0].engine.paused
    why = "cannot write it: disk is full; free space at /home; then type: skyctl recover"
    first = "push /new" if readable else "bring stub-1"
    assert hands.done == [first, f"wait stub-1: {why}"] and reports[1].detail == why


async def test_what_is_pushed_again_are_the_files_that_the_dead_push_had(hands: Hands) -> None:
    leave(hands, "stub-0", half=True)
    request = interrupted_request(hands.state)
    assert request is not None and request.expected_digest == "of these files"


async def test_a_push_that_failed_puts_right_nobody_who_was_in_no_doubt(hands: Hands) -> None:
    findings = leave(hands, "stub-0", half=True)
    findings.append(Finding("stub-1", "wrong-version", "", "push"))
    hands.push_error = "/new is gone"
    await recover(findings, hands)
    assert hands.done == ["push /new", "bring stub-0", "bring stub-1"]

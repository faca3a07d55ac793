"""What recovery tries, and in which order, with actions that only remember."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.core.findings import Action, Condition, Finding
from skyctl.core.recovery import Recovered, clear, recover
from skyctl.core.repeated import interrupted_request, needed, published
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import SkyctlError, StateUnwritable, WeightsGone
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.push.source import read_content
from skyctl.push.verify import weights_digest
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.identity import own_identity
from skyctl.store.in_doubt import InDoubt, close_sender, in_doubt, open_sender, put_in_doubt
from skyctl.store.journal import Job, JobEvent
from skyctl.store.state import FleetState
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport
from tests.unit.push.checkpoints import rewrite_unseen, tiny_tensors, write_checkpoint


class Actions:
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
                clear(self.state, name)
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
async def actions(tmp_path: Path) -> AsyncIterator[Actions]:
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        actions = Actions(state)
        yield actions
        await actions.client.aclose()


def leave(actions: Actions, *names: str, half: bool, checkpoint: str = "/new") -> list[Finding]:
    """Findings of servers that a push to `checkpoint` left."""
    job = actions.state.journal.begin("push", PushRequest(checkpoint).to_json())
    pushed = {"checkpoint": checkpoint, "checkpoint_digest": "of these files"}
    actions.state.journal.add_events(job.id, JobEvent.now("prepared", **pushed))
    actions.state.journal.end(job.id, "interrupted")
    stage = "update" if half else "pause"
    put_in_doubt(actions.state, {name: InDoubt(name, job.id, stage, half, True) for name in names})
    found = Condition.HALF_UPDATED if half else Condition.FROZEN
    action = Action.PUSH if half else Action.RESUME
    return [Finding(name, found, "", action) for name in names]


def outcomes(recovered: list[Recovered]) -> list[tuple[str, bool]]:
    return [(one.action, one.ok) for one in recovered]


async def test_a_frozen_server_is_resumed_and_nothing_is_pushed(actions: Actions) -> None:
    findings = leave(actions, "stub-0", half=False)
    await actions.stubs[0].engine.pause("keep")
    assert outcomes(await recover(findings, actions)) == [("resume", True)]
    assert not actions.stubs[0].engine.paused and actions.done == []
    assert in_doubt(actions.state) == {} and actions.state.server("stub-0").quarantine is None


@pytest.mark.parametrize(("found", "at_once"), [("stuck", 2), ("wrong-version", 1)])
async def test_servers_that_serve_nobody_are_restarted_at_once(
    actions: Actions, found: str, at_once: int
) -> None:
    findings = [Finding(f"stub-{n}", Condition(found), "", Action.RESTART) for n in range(2)]
    assert outcomes(await recover(findings, actions)) == [("restart", True)] * 2
    assert actions.most_at_once == at_once


@pytest.mark.parametrize(("level", "awake"), [(1, set()), (2, {"stub-0"})])
async def test_one_whose_weights_were_woken_sleeps_again(
    actions: Actions, level: int, awake: set[str]
) -> None:
    job = actions.state.journal.begin("push", PushRequest("/new", colocated=True).to_json())
    actions.state.journal.end(job.id, "interrupted")
    actions.state.update_server("stub-0", sleep_level=level)
    put_in_doubt(
        actions.state, {"stub-0": InDoubt("stub-0", job.id, "wake", False, True, woken=True)}
    )
    engine = actions.stubs[0].engine
    await engine.sleep(level, "abort")
    await engine.wake(["weights"])
    findings = [Finding("stub-0", Condition.WOKEN, "", Action.SLEEP)]
    assert outcomes(await recover(findings, actions)) == [("sleep", True)]
    assert ("weights" in engine.asleep) == (level == 1) and "kv_cache" in engine.asleep
    assert {row.name for row in actions.state.servers() if row.weights_awake} == awake
    assert in_doubt(actions.state) == {}
    assert actions.state.server("stub-0").quarantine is None and actions.done == []


async def test_one_that_somebody_paused_by_skyctl_stays_so(actions: Actions) -> None:
    findings = leave(actions, "stub-0", half=False)
    actions.state.update_server("stub-0", paused=True)
    await actions.stubs[0].engine.pause("keep")
    await recover(findings, actions)
    assert actions.stubs[0].engine.paused


async def test_one_that_sleeps_is_not_resumed_although_its_sleep_is_not_on_record(
    actions: Actions,
) -> None:
    """It would run without its memory."""
    findings = leave(actions, "stub-0", half=False)
    await actions.stubs[0].engine.sleep(1, "abort")
    assert outcomes(await recover(findings, actions)) == [("resume", True)]
    assert "resume" not in actions.stubs[0].engine.log
    assert actions.state.server("stub-0").sleep_level == 1


@pytest.mark.parametrize("stage", ["pause", "start"])
async def test_weights_that_sleep_are_not_looked_at_before_they_are_woken(
    actions: Actions, stage: str
) -> None:
    """Their memory is unmapped: an engine that reads it dies."""
    server = VLLMServer(actions.client, actions.targets["stub-0"])
    digest = (await weights_digest(server, timeout_s=5)).digest
    findings = leave(actions, "stub-0", half=False)
    left = replace(in_doubt(actions.state)["stub-0"], digest=digest, stage=stage)
    put_in_doubt(actions.state, {"stub-0": left})
    engine, asgi = actions.stubs[0].engine, actions.stubs[0].asgi
    await engine.sleep(1, "abort")
    looked = asgi.calls["/collective_rpc"]
    assert outcomes(await recover(findings, actions)) == [("resume", True)]
    woken = "wake weights" in engine.log
    assert woken == (asgi.calls["/collective_rpc"] > looked) == (stage == "start")
    assert engine.asleep == {"weights", "kv_cache"} and engine.served == []
    assert actions.state.server("stub-0").sleep_level == 1


@pytest.mark.parametrize(
    ("recorded", "woken", "level", "thawed"),
    [(1, False, 0, True), (1, True, 1, False), (0, True, 1, False), (2, False, 2, False)],
)
async def test_the_weights_of_one_that_is_awake_are_not_woken(
    actions: Actions, recorded: int, woken: bool, level: int, thawed: bool
) -> None:
    """Its record says that it sleeps: that of its last wake was lost, or it was started again.
    Waking a part would thaw it before its session is closed and its label right. What a sleep
    discarded may be empty still.
    """
    server = VLLMServer(actions.client, actions.targets["stub-0"])
    digest = (await weights_digest(server, timeout_s=5)).digest
    findings = leave(actions, "stub-0", half=False)
    left = replace(in_doubt(actions.state)["stub-0"], digest=digest, stage="start", woken=woken)
    put_in_doubt(actions.state, {"stub-0": left})
    actions.state.update_server("stub-0", sleep_level=recorded)
    engine = actions.stubs[0].engine
    await engine.pause("keep")
    assert outcomes(await recover(findings, actions)) == [("resume", True)]
    assert "wake weights" not in engine.log
    assert actions.state.server("stub-0").sleep_level == level
    assert (not engine.paused) == thawed


@pytest.mark.parametrize(
    ("stage", "known", "action"),
    [("start", False, "resume"), ("recover", False, "push"), ("recover", True, "resume")],
)
async def test_a_server_with_a_session_of_another_program_is_resumed_only_by_its_digest(
    actions: Actions, stage: str, known: bool, action: str
) -> None:
    server = VLLMServer(actions.client, actions.targets["stub-0"])
    digest = (await weights_digest(server, timeout_s=5)).digest if known else ""
    findings = leave(actions, "stub-0", half=False)
    left = replace(in_doubt(actions.state)["stub-0"], digest=digest, stage=stage)
    put_in_doubt(actions.state, {"stub-0": left})
    await actions.stubs[0].engine.pause("keep")
    assert outcomes(await recover(findings, actions)) == [(action, True)]
    assert actions.stubs[0].engine.paused == (action == "push")


async def test_a_frozen_server_that_holds_something_else_is_pushed_to(actions: Actions) -> None:
    findings = leave(actions, "stub-0", half=False)
    actions.state.update_server("stub-0", weights_digest="what it had")
    await actions.stubs[0].engine.pause("keep")
    assert outcomes(await recover(findings, actions)) == [("push", True)]
    assert actions.done == ["push /new"]


@pytest.mark.parametrize("held", ["the same", "something else"])
async def test_what_the_push_saw_before_it_froze_a_server_is_compared(
    actions: Actions, held: str
) -> None:
    server = VLLMServer(actions.client, actions.targets["stub-0"])
    before = (await weights_digest(server, timeout_s=5)).digest
    findings = leave(actions, "stub-0", half=False)
    put_in_doubt(
        actions.state, {"stub-0": replace(in_doubt(actions.state)["stub-0"], digest=before)}
    )
    engine = actions.stubs[0].engine
    await engine.pause("keep")
    if held == "something else":
        engine.digest = held
    assert outcomes(await recover(findings, actions)) == [
        ("resume" if held == "the same" else "push", True)
    ]
    assert engine.paused == (held == "something else")  # the push of these actions thaws nobody


@pytest.mark.parametrize("why", ["half-updated", "other-weights", "label-of-others"])
async def test_a_server_that_must_not_serve_is_frozen_where_nothing_can_be_pushed(
    actions: Actions, why: str
) -> None:
    findings = leave(actions, "stub-0", half=why == "half-updated")
    owed = "v2" if why == "label-of-others" else ""  # and the fleet has moved on
    findings = [replace(findings[0], action=Action.PUSH)] if owed else findings
    actions.state.update_server("stub-0", weights_digest="what it had")
    record = in_doubt(actions.state)["stub-0"]
    put_in_doubt(actions.state, {"stub-0": replace(record, thaw=False, version=owed)})
    actions.push_error, actions.gone = "overwritten", True
    assert not actions.stubs[0].engine.paused  # another program has thawed it
    assert outcomes(await recover(findings, actions)) == [("push", False)]
    assert actions.stubs[0].engine.paused and not actions.stubs[1].engine.paused
    assert in_doubt(actions.state)["stub-0"].thaw


@pytest.mark.parametrize("action", [Action.PUSH, Action.QUARANTINE])
async def test_a_half_updated_server_whose_engine_is_stuck_freezes_once_it_goes_on(
    actions: Actions, action: Action
) -> None:
    """It may have been thawed: the pause waits in the engine."""
    findings = leave(actions, "stub-0", half=True)
    stuck = StubServer(faults={"/is_paused": Fault("hang")})
    actions.client = ControlClient(transport=StubTransport([stuck]))
    actions.control_timeout_s, actions.gone = 0.1, True
    await recover([replace(findings[0], action=action)], actions)
    assert stuck.engine.paused


async def test_half_updated_servers_get_the_push_that_was_on_its_way(actions: Actions) -> None:
    leave(actions, "stub-0", half=True, checkpoint="/older")
    findings = leave(actions, "stub-0", "stub-1", half=True)
    assert needed(actions.state) == {"/new"}
    assert outcomes(await recover(findings, actions)) == [("push", True)] * 2
    assert actions.done == ["push /new"]
    assert needed(actions.state) == set()


async def test_a_push_that_was_on_its_way_reaches_all_but_those_that_are_replaced(
    actions: Actions,
) -> None:
    """Nobody whom recovery leaves as it is may stay behind at older weights."""
    findings = leave(actions, "stub-0", half=True)
    findings += [
        Finding("stub-1", Condition.HEALTHY),
        Finding("stub-2", Condition.STUCK, "", Action.QUARANTINE),
    ]
    await recover(findings, actions)
    assert actions.pushed == ["stub-0", "stub-1"]


@pytest.mark.parametrize("clock", ["steady", "set back meanwhile"])
async def test_a_fleet_that_moved_on_does_not_go_back_to_a_push_that_broke_off(
    actions: Actions, clock: str
) -> None:
    findings = leave(actions, "stub-0", half=True)
    if clock != "steady":
        actions.state.write("UPDATE jobs SET created_at = created_at + 3600")
    job = actions.state.journal.begin("push", {})
    actions.state.journal.record_push(
        job.id, ok=True, version="v9", checkpoint="/v9", checkpoint_digest="d", result={}
    )
    assert outcomes(await recover(findings, actions)) == [("push", True)]
    assert actions.done == ["bring stub-0"]


@pytest.mark.parametrize("how", ["it says so", "it dies"])
async def test_servers_to_which_a_live_trainer_may_send_wait_until_it_has_ended(
    actions: Actions, how: str
) -> None:
    findings = leave(actions, "stub-0", half=True)
    findings += [Finding("stub-1", Condition.STUCK, "", Action.RESTART)]
    job = in_doubt(actions.state)["stub-0"].job
    open_sender(actions.state, job, own_identity())
    left, other = await recover(findings, actions)
    assert (left.action, left.ok, other.action) == ("quarantine", False, "restart")
    assert f"(pid {os.getpid()}) lives" in left.detail and left.detail.endswith("skyctl recover")
    assert actions.done == [f"wait stub-0: {left.detail}", "replace stub-1: "]
    if how == "it says so":
        close_sender(actions.state, "push-99")
        assert not (await recover(findings[:1], actions))[0].ok
        close_sender(actions.state, job)
    else:
        open_sender(actions.state, job, replace(own_identity(), create_time=1.0))
    assert outcomes(await recover(findings[:1], actions)) == [("push", True)]


async def test_when_that_cannot_be_had_they_get_the_fleets_weights(actions: Actions) -> None:
    findings = leave(actions, "stub-0", "stub-1", half=True)
    actions.push_error = "/new is gone"
    assert outcomes(await recover(findings, actions)) == [("push", True)] * 2
    assert actions.done == ["push /new", "bring stub-0", "bring stub-1"]
    assert in_doubt(actions.state) == {}


async def test_and_are_restarted_when_that_fails_too(actions: Actions) -> None:
    findings = leave(actions, "stub-0", half=True)
    actions.push_error, actions.bring_error = "/new was overwritten", "no room"
    assert outcomes(await recover(findings, actions)) == [("restart", True)]
    assert actions.done[-1] == "replace stub-0: no room"


async def test_what_could_not_be_put_right_says_why(actions: Actions) -> None:
    actions.restart_error = "it does not start"
    findings = [
        Finding("stub-0", Condition.STUCK, "no answer", Action.RESTART),
        Finding("stub-1", Condition.HEALTHY),
    ]
    recovered = await recover(findings, actions)
    assert outcomes(recovered) == [("restart", False), ("nothing", True)]
    assert recovered[0].detail == "it does not start"


async def test_a_request_that_nobody_can_read_any_more_is_no_request(actions: Actions) -> None:
    findings = leave(actions, "stub-0", half=True)
    actions.state.write('UPDATE jobs SET request = \'{"from": "the future"}\'')
    assert outcomes(await recover(findings, actions)) == [("push", True)]
    assert actions.done == ["bring stub-0"]


async def test_servers_whose_weights_are_gone_wait_for_the_next_push(actions: Actions) -> None:
    """A directory that is overwritten at every step: a restarted server could not have them."""
    findings = leave(actions, "stub-0", half=True)
    actions.push_error, actions.gone = "/new was written anew", True
    [report] = await recover(findings, actions)
    assert not report.ok and "written anew" not in report.detail
    assert actions.done[:2] == ["push /new", "bring stub-0"]
    assert actions.done[2:] == [f"wait stub-0: {report.detail}"]
    assert report.detail.endswith("push or update again: skyctl sync-weights CKPT")


async def test_one_that_has_them_whole_is_resumed_at_their_label(actions: Actions) -> None:
    """A push had verified them and died before it labelled the server; the next one broke off."""
    findings = leave(actions, "stub-0", half=True)
    actions.push_error, actions.gone = "/new was written anew", True
    server = VLLMServer(actions.client, actions.targets["stub-0"])
    digest = (await weights_digest(server, timeout_s=5)).digest
    actions.state.update_server("stub-0", weight_version="v1", weights_digest=digest)
    actions.state.set_weights(FleetWeights("v1", "/fleet"))
    engine = actions.stubs[0].engine
    await engine.pause("keep")
    assert outcomes(await recover(findings, actions)) == [("resume", True)]
    assert (engine.weight_version, engine.paused) == ("v1", False)


@pytest.mark.parametrize("slept", [0, 2])
async def test_one_that_was_restarted_before_the_push_is_not_taken_for_whole(
    actions: Actions, slept: int
) -> None:
    """Another program started it anew; the push that then froze it saw what it holds since."""
    findings = leave(actions, "stub-0", half=False)
    actions.gone = True
    server = VLLMServer(actions.client, actions.targets["stub-0"])
    seen = "" if slept else (await weights_digest(server, timeout_s=5)).digest
    put_in_doubt(actions.state, {"stub-0": replace(in_doubt(actions.state)["stub-0"], digest=seen)})
    held = {"weight_version": "v1", "weights_digest": "of v1"}
    actions.state.update_server("stub-0", sleep_level=slept, **held)
    actions.state.set_weights(FleetWeights("v1", None))
    engine = actions.stubs[0].engine
    await engine.pause("keep")
    findings = [replace(findings[0], condition=Condition.WRONG_VERSION, action=Action.PUSH)]
    assert outcomes(await recover(findings, actions)) == [("push", False)]
    assert engine.paused


@pytest.mark.parametrize("readable", [True, False])
async def test_on_a_full_disk_what_is_frozen_is_resumed_and_what_needs_a_push_waits(
    actions: Actions, readable: bool
) -> None:
    """Nothing is touched that a death would leave unknown, and nothing is restarted for it."""
    frozen = leave(actions, "stub-0", half=False)
    half = leave(actions, "stub-1", half=True)
    await actions.stubs[0].engine.pause("keep")
    if not readable:  # no push can be made again
        actions.state.write("UPDATE jobs SET request = '{}'")
    actions.full = True
    reports = await recover([*frozen, *half], actions)
    assert outcomes(reports) == [("resume", True), ("push", False)]
    assert not actions.stubs[0].engine.paused
    why = "cannot write it: disk is full; free space at /home; then type: skyctl recover"
    first = "push /new" if readable else "bring stub-1"
    assert actions.done == [first, f"wait stub-1: {why}"] and reports[1].detail == why


async def test_what_is_pushed_again_are_the_files_that_the_dead_push_had(actions: Actions) -> None:
    leave(actions, "stub-0", half=True)
    request = interrupted_request(actions.state)
    assert request is not None and request.expected_digest == "of these files"


def test_the_fleets_weights_are_asked_for_by_the_files_that_were_looked_at(tmp_path: Path) -> None:
    """A trainer may overwrite them before the push reads them."""
    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "step")))
    draft = read_checkpoint(str(write_checkpoint(tmp_path / "draft", tiny_tensors(70))))
    weights = FleetWeights(
        "v1",
        str(checkpoint.path),
        checkpoint.identity_digest,
        draft=str(draft.path),
        draft_digest=draft.identity_digest,
    )
    again = published(weights)
    assert (again.expected_digest, again.draft) == (checkpoint.identity_digest, str(draft.path))
    assert again.expected_draft == draft.identity_digest
    os.utime(draft.shards[0].path, ns=(1, 1))
    with pytest.raises(WeightsGone, match=r"the draft model .* was overwritten"):
        published(weights)
    Path(draft.shards[0].path).unlink()
    with pytest.raises(WeightsGone, match="the draft model of v1 is gone"):
        published(weights)
    os.utime(checkpoint.shards[0].path, ns=(1, 1))
    with pytest.raises(WeightsGone, match="step was overwritten"):
        published(replace(weights, draft=""))


def test_files_that_were_only_touched_are_the_fleets_weights_and_other_bytes_are_not(
    tmp_path: Path,
) -> None:
    directory = write_checkpoint(tmp_path / "step")
    checkpoint = read_checkpoint(str(directory))
    weights = FleetWeights(
        "v1",
        str(directory),
        checkpoint.identity_digest,
        content_digest=read_content(checkpoint),
    )
    os.utime(checkpoint.shards[0].path, ns=(1, 1))
    now = read_checkpoint(str(directory)).identity_digest
    assert published(weights).expected_digest == now != checkpoint.identity_digest
    rewrite_unseen(directory, tiny_tensors(9))
    with pytest.raises(WeightsGone, match="was overwritten"):
        published(weights)


async def test_a_push_that_failed_puts_right_nobody_who_was_in_no_doubt(actions: Actions) -> None:
    findings = leave(actions, "stub-0", half=True)
    findings.append(Finding("stub-1", Condition.WRONG_VERSION, "", Action.PUSH))
    actions.push_error = "/new is gone"
    await recover(findings, actions)
    assert actions.done == ["push /new", "bring stub-0", "bring stub-1"]

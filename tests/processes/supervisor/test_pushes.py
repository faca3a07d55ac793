"""A whole supervisor, whose pushes are played: who may push, and whom the router gets after it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from skyctl.core import arbiter
from skyctl.core.arbiter import Turn, hung_up
from skyctl.core.findings import Finding
from skyctl.core.jobs import open_push
from skyctl.core.requests import Pause, Restart, Resume, Sleep, Wake
from skyctl.core.status import Operation, OperationKind
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ConflictError, PushError
from skyctl.launch.local.process import ManagedProcess
from skyctl.push.request import PushRequest, ServerPush
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.in_doubt import InDoubt, in_doubt, put_in_doubt
from skyctl.supervisor import admission, healing, replica
from skyctl.supervisor.fleet import report
from skyctl.supervisor.interface import Adopt
from skyctl.supervisor.pushes import RouterRotation
from skyctl.supervisor.resident import Supervisor
from skyctl.supervisor.weights import push_alone
from tests.processes.supervisor.played import FakeCheckpoint, FakePush, push_ended
from tests.processes.supervisor.supervising import (
    bring_up,
    ended,
    pid_of,
    routed,
    states,
    supervising,
)
from tests.unit.supervisor.fleets import (
    command_server,
    eventually,
    fleet_plan,
    stub_router,
    stub_server,
)


def overwrite(checkpoint: type[FakeCheckpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let /ckpt hold other weights from now on."""
    monkeypatch.setattr(checkpoint, "identity_digest", "other")
    monkeypatch.setattr(checkpoint, "layout_digest", "other")


async def test_a_push_waits_until_its_fleet_is_taken_over_and_for_nothing_else(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        supervisor.operation = Operation(7, OperationKind.ADOPT, "", time.time())
        begun = asyncio.create_task(supervisor.start_push(PushRequest("/ckpt")))
        assert not (await asyncio.wait({begun}, timeout=0.2))[0]
        supervisor.taken_over = True
        assert (await begun).startswith("push-")
        await eventually(lambda: supervisor.push_job is None)
        supervisor.operation = Operation(8, OperationKind.SCALE, "", time.time())
        with pytest.raises(ConflictError, match="busy: scale"):
            await supervisor.start_push(PushRequest("/ckpt"))


async def test_a_push_whose_asker_has_hung_up_meanwhile_is_not_begun(
    tmp_path: Path, push: FakePush
) -> None:
    async def gone() -> bool:
        return True

    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        listening = hung_up.set(gone)
        with pytest.raises(ConflictError, match="has gone meanwhile"):
            await supervisor.start_push(PushRequest("/ckpt"))
        hung_up.reset(listening)
        assert not supervisor.state.journal.jobs() and not supervisor.arbiter.holders()
        assert (await supervisor.start_push(PushRequest("/ckpt"))).startswith("push-")


async def test_a_second_push_is_refused_and_told_of_the_first(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        push.gate.clear()
        job = await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: states(supervisor)["a"] == "updating")
        with pytest.raises(ConflictError, match=job):
            await supervisor.start_push(PushRequest("/b"))
        for refused in (supervisor.recover, supervisor.restart):
            with pytest.raises(ConflictError, match=job):
                await refused()
        for verb in (Resume, Pause, Sleep, Wake):
            with pytest.raises(ConflictError, match=job):
                await supervisor.control(verb(timeout_s=5.0))
        push.gate.set()
        await eventually(lambda: supervisor.push_job is None)
        assert supervisor.state.journal.job(job).state == "succeeded"
        assert supervisor.state.weights() == FleetWeights("v1", "/ckpt", "same", "shm")
        assert states(supervisor)["a"] == "ready"
        assert supervisor.replicas["a"].row.weights_digest == "digest-v1"
        assert supervisor.state.locks.holders("turn") == []


async def test_what_a_dead_push_left_is_not_said_to_be_resumed_when_it_is_ready(
    tmp_path: Path,
) -> None:
    """Recovery leaves it paused if it was paused before that push."""
    async with supervising(tmp_path) as supervisor:
        supervisor.change_to(fleet_plan([command_server("a", "import time; time.sleep(600)")]))
        await eventually(lambda: states(supervisor).get("a") == "starting")
        supervisor.state.update_server("a", paused=True)
        supervisor.replicas["a"].reload_row()
        put_in_doubt(supervisor.state, {"a": InDoubt("a", "push-1", "update", True, False)})
        (outcome,) = await supervisor.control(Resume())
        assert outcome.detail.endswith("type: skyctl recover")
        assert supervisor.state.server("a").paused


async def test_a_fleet_that_was_taken_over_can_be_pushed_to_while_a_dead_server_starts(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        never = command_server("b", "import time; time.sleep(600)")
        await supervisor.adopt(Adopt(fleet_plan([stub_server("a"), never])))
        await eventually(lambda: states(supervisor).get("a") == "ready")
        with pytest.raises(ConflictError, match="busy: adopt"):
            await supervisor.restart()
        await push_ended(supervisor)
        assert push.calls == [("/ckpt", ["a"])]
        assert supervisor.operation is not None and supervisor.operation.ended_at is None


async def test_what_a_push_beside_an_adoption_left_is_repaired_when_that_ends(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        never = command_server("b", "import time; time.sleep(600)")
        health = {"interval_s": 0.1, "timeout_s": 1, "startup_timeout_s": 4}
        await supervisor.adopt(Adopt(fleet_plan([stub_server("a"), never], health=health)))
        await eventually(lambda: supervisor.taken_over and states(supervisor)["a"] == "ready")
        left = InDoubt("a", "push-1", "pause", half_updated=False, thaw=True)
        put_in_doubt(supervisor.state, {"a": left})
        assert "not ready" in await ended(supervisor)
        assert in_doubt(supervisor.state) == {}
        assert states(supervisor)["a"] == "ready"


async def test_a_replica_that_dies_takes_the_fleets_weights_before_it_is_routed(
    tmp_path: Path, push: FakePush, checkpoint: object
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await push_ended(supervisor)
        push.gate.clear()
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: len(push.calls) == 2)
        assert push.calls[1] == ("/ckpt", ["a"])
        assert routed(supervisor) == {"b"} and states(supervisor)["a"] == "updating"
        # nor when a push froze all others: it is not frozen, and at the weights it started from
        supervisor.replicas["b"].in_push = True
        assert supervisor.desired().keys() == {"b"}
        supervisor.replicas["b"].in_push = False
        push.gate.set()
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert supervisor.replicas["a"].row.weight_version == "v1"


async def test_a_replica_is_not_pushed_to_by_its_start_and_by_a_recovery_at_once(
    tmp_path: Path, push: FakePush, checkpoint: object
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        await push_ended(supervisor)
        push.gate.clear()
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: len(push.calls) == 2)
        again = asyncio.create_task(push_alone(supervisor.replicas["a"], supervisor))
        await asyncio.sleep(0.1)
        assert len(push.calls) == 2
        push.gate.set()
        await again
        assert len(push.calls) == 2, "the server has the fleet's weights by then"


async def test_a_replica_is_quarantined_when_the_checkpoint_changed(
    tmp_path: Path, push: FakePush, checkpoint: type[FakeCheckpoint], monkeypatch: Any
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await push_ended(supervisor)
        overwrite(checkpoint, monkeypatch)
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        assert routed(supervisor) == {"b"}
        assert "/ckpt was overwritten since" in (supervisor.replicas["a"].row.quarantine or "")
        outcomes = await supervisor.resume(Resume(timeout_s=5.0))
        assert [o.status for o in outcomes] == ["skipped", "ok"]


async def test_a_failed_push_quarantines_what_it_left_in_doubt(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        left = [
            ServerPush("a", True, "ready", "base"),
            ServerPush("b", False, "quarantined", None, detail="half updated"),
        ]
        push.error = PushError("b failed", details={"servers": [s.to_json() for s in left]})
        job = await push_ended(supervisor)
        assert supervisor.state.journal.job(job).state == "failed"
        assert states(supervisor) == {"a": "ready", "b": "quarantined"}
        assert supervisor.replicas["b"].row.quarantine == "half updated"
        await eventually(lambda: routed(supervisor) == {"a"})
        assert [record.ok for record in supervisor.state.journal.pushes()] == [False]


async def test_a_status_that_need_not_be_fresh_shows_others_pauses_with_the_next_probe(
    tmp_path: Path,
) -> None:
    plan = fleet_plan([stub_server("stubs-0")], health={"interval_s": 60, "startup_timeout_s": 15})
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, plan)
        await VLLMServer(supervisor.client, supervisor.replicas["stubs-0"].target).pause()
        assert (await report(supervisor, fresh=False)).replicas[0].state == "ready"
        found = (await report(supervisor)).replicas[0]
    assert found.state == "paused"
    assert found.state_s is not None and found.uptime_s is not None
    assert found.state_s <= found.uptime_s


async def test_a_push_that_cannot_even_begin_is_a_failed_job_and_frees_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("stubs-0")]))
        with monkeypatch.context() as broken:
            broken.delattr(admission, "push_fleet")
            job = await supervisor.start_push(PushRequest("nowhere"))
            await eventually(lambda: supervisor.push_job is None)
        found = supervisor.state.journal.job(job)
        assert found.state == "failed"
        assert found.error is not None and "never began" in found.error["message"]
        again = await supervisor.start_push(PushRequest("nowhere"))  # the lock is free
        await eventually(lambda: supervisor.push_job is None)
        assert supervisor.state.journal.job(again).ended


async def test_a_push_is_refused_while_a_verb_is_under_way_and_told_of_it(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb's rollback would thaw servers in the middle of the update."""
    monkeypatch.setattr(arbiter, "PATIENCE_S", 0.1)
    slow = stub_server("a", faults={"/pause": {"kind": "delay", "seconds": 1.0}})
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([slow]))
        verb = asyncio.create_task(supervisor.pause(Pause(mode="wait", timeout_s=5.0)))
        await eventually(lambda: supervisor.arbiter.holders() != [])
        with pytest.raises(ConflictError, match="busy: skyctl pause"):
            await supervisor.start_push(PushRequest("/ckpt"))
        assert (await verb)[0].status == "ok"
        await supervisor.start_push(PushRequest("/ckpt"))
        await eventually(lambda: supervisor.push_job is None)
        assert push.calls == [("/ckpt", ["a"])]


async def test_nobody_acts_beside_a_recovery(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, go_on = asyncio.Event(), asyncio.Event()

    async def find(_: Supervisor) -> list[Finding]:
        looking.set()
        await go_on.wait()
        return []

    monkeypatch.setattr(healing, "find", find)
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        recovery = asyncio.create_task(healing.heal_in_turn(supervisor, supervisor.pushes))
        await looking.wait()
        with pytest.raises(ConflictError, match="busy: recovery"):
            await supervisor.resume(Resume())
        with pytest.raises(ConflictError, match="busy: recovery"):
            await supervisor.start_push(PushRequest("/ckpt"))
        go_on.set()
        await recovery
        assert (await supervisor.resume(Resume()))[0].status == "ok" and push.calls == []


async def test_a_push_waits_while_the_fleet_is_put_right(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def find(_: Supervisor) -> list[Finding]:
        await go_on.wait()
        return []

    monkeypatch.setattr(healing, "find", find)
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        supervisor.begin_recovery()
        request = PushRequest("/committed")  # a recovery pushes, too
        supervisor.push_job = open_push(supervisor.state.journal, Turn(None), request)
        waiting = asyncio.create_task(supervisor.start_push(PushRequest("/ckpt")))
        await asyncio.sleep(0.01)
        with pytest.raises(ConflictError, match="busy: recover"):
            await supervisor.restart(Restart())
        assert not waiting.done() and push.calls == []
        supervisor.push_job = None
        go_on.set()
        await waiting
        await eventually(lambda: push.calls == [("/ckpt", ["a"])])


async def test_a_push_waits_for_the_end_of_one_that_is_over_for_whoever_asked_for_it(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = asyncio.Event()

    async def refresh_all(*_: object) -> dict[str, str]:
        await go_on.wait()
        return {}

    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        monkeypatch.setattr(admission, "refresh_all", refresh_all)
        first = await supervisor.start_push(PushRequest("/ckpt"))
        await eventually(lambda: supervisor.state.journal.job(first).ended)
        assert supervisor.push_job is not None
        waiting = asyncio.create_task(supervisor.start_push(PushRequest("/next")))
        await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        await waiting
        await eventually(lambda: [path for path, _ in push.calls] == ["/ckpt", "/next"])


async def test_a_label_that_meant_other_files_does_not_make_a_server_current(
    tmp_path: Path, push: FakePush, checkpoint: type[FakeCheckpoint]
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        await push_ended(supervisor, "latest")
        replica = supervisor.replicas["a"]
        assert admission.is_current(supervisor.state, replica)
        replica.update_row(checkpoint_digest="of the latest before")
        assert not admission.is_current(supervisor.state, replica)


async def test_a_server_that_waits_for_weights_takes_the_next_push(
    tmp_path: Path, push: FakePush, checkpoint: type[FakeCheckpoint], monkeypatch: Any
) -> None:
    """A directory that is overwritten at every step: who restarted between two has none to take."""
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await push_ended(supervisor)
        overwrite(checkpoint, monkeypatch)
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        await eventually(lambda: supervisor.replicas["a"].phase == "up")
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v2"))
        await eventually(lambda: states(supervisor) == {"a": "ready", "b": "ready"})
        assert push.calls[-1] == ("/ckpt", ["a", "b"])
        await eventually(lambda: routed(supervisor) == {"a", "b"})


KNOWS_ALL = {"/never": {"kind": "hang"}}  # the full stub: the light one has no labels


async def test_status_names_a_server_that_somebody_else_pushed_to(
    tmp_path: Path, push: FakePush
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a", faults=KNOWS_ALL)]))
        server = VLLMServer(supervisor.client, supervisor.replicas["a"].target)
        assert (await report(supervisor)).health == "healthy"
        await server.set_weight_version("b1")
        found = await report(supervisor)
        assert found.health == "degraded" and found.replicas[0].reported_version == "b1"
        assert (
            "b1" in found.reasons[0].message
            and "a program other than skyctl" in found.reasons[0].message
        )


async def test_an_error_as_a_push_ends_leaves_none_in_progress(
    tmp_path: Path, push: FakePush, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))

        def broken(self: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr("skyctl.supervisor.replica.Replica.reload_row", broken)
            await supervisor.start_push(PushRequest("/ckpt"))
            await eventually(lambda: supervisor.push_job is None)
        assert supervisor.arbiter.holders() == []
        await supervisor.start_push(PushRequest("/ckpt"))
        await eventually(lambda: supervisor.push_job is None)
        assert len(push.calls) == 2


async def test_a_server_with_a_canary_is_closed_until_it_rejoins(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        servers = [stub_server("a"), stub_server("b")]
        await bring_up(supervisor, fleet_plan(servers, stub_router()))
        rotation, held = RouterRotation(supervisor), supervisor.paths.hold_file("a")
        await rotation.take_out(["a"], others_serve=True, closed=True)
        supervisor.replicas["a"].reload_row()
        assert held.exists() and not supervisor.paths.hold_file("b").exists()
        await rotation.rejoin(["a"])
        assert not held.exists()


async def test_a_server_whose_machine_does_not_say_that_it_is_open_is_not_routed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = asyncio.Event()
    monkeypatch.setattr(replica, "_SETTLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(ManagedProcess, "settled", lambda process: heard.wait())
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a"), stub_server("b")], stub_router())
        await bring_up(supervisor, plan)  # which does not wait for it
        assert states(supervisor) == {"a": "unreachable", "b": "unreachable"}
        heard.set()
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        heard.clear()
        await RouterRotation(supervisor).rejoin(["a"])
        assert routed(supervisor) == {"b"}
        heard.set()
        await eventually(lambda: routed(supervisor) == {"a", "b"})

"""A whole supervisor in the test's loop, over stub servers in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest

from skyctl.core.requests import CancelJob, Down, Pause, Restart, Resume, StatusQuery
from skyctl.core.status import BY_CANCEL, INTERRUPTED, OperationKind
from skyctl.engines.vllm.router import RouterClient
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ConflictError, NotFoundError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.launch.local.host import port_holder
from skyctl.service.ended import operation_error
from skyctl.states import Phase
from skyctl.supervisor import admission, rollout
from skyctl.supervisor.fleet import report
from skyctl.supervisor.interface import Begun, Reconcile, Undo
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


async def test_up_starts_servers_and_then_the_router_on_them(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert routed(supervisor) == {"a", "b"}
        found = await report(supervisor)
        assert found.health == "healthy" and found.replicas[0].running == 0


async def test_a_paused_fleet_stays_in_its_router_whoever_is_seen_paused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = list[str]()

    async def remove(self: RouterClient, url: str) -> None:
        removed.append(url)

    probe = admission.probe_alive

    async def slow_for_b(client: ControlClient, target: ServerTarget, timeout_s: float) -> bool:
        await asyncio.sleep(0.2 if target.name == "b" else 0.0)
        return await probe(client, target, timeout_s)

    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan(
            [stub_server("a"), stub_server("b")], stub_router(), health={"interval_s": 60}
        )
        await bring_up(supervisor, plan)
        with monkeypatch.context() as patched:
            patched.setattr(RouterClient, "remove_worker", remove)
            patched.setattr(admission, "probe_alive", slow_for_b)
            await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
            assert states(supervisor) == {"a": "paused", "b": "paused"}
            await supervisor.resume(Resume(timeout_s=5.0))
            assert states(supervisor) == {"a": "ready", "b": "ready"}
            for replica in supervisor.replicas.values():  # somebody else does
                await VLLMServer(supervisor.client, replica.target, timeout_s=5.0).pause("keep")
            await report(supervisor)
            assert states(supervisor) == {"a": "paused", "b": "paused"}
        assert removed == []
        assert routed(supervisor) == {"a", "b"}


async def test_down_leaves_no_process_and_no_port_and_may_be_repeated(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a")], stub_router())
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        for _ in range(2):
            await supervisor.down(Down(0.0))
            assert not psutil.pid_exists(pid)
            assert plan.router is not None
            for port in (plan.servers[0].port, plan.router.port):
                assert port_holder("127.0.0.1", port) is None
            assert supervisor.state.processes() == []


async def test_up_again_with_the_same_plan_does_nothing(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a")], stub_router())
        await bring_up(supervisor, plan)
        pid = pid_of(supervisor, "a")
        assert supervisor.change_to(plan) == Begun(0)
        assert pid_of(supervisor, "a") == pid


async def test_of_two_ups_at_once_the_second_joins_the_first(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([stub_server("a")])
        first = supervisor.change_to(plan).operation
        assert supervisor.change_to(plan) == Begun(first, joined=True)
        with pytest.raises(ConflictError, match="busy: up"):
            supervisor.change_to(fleet_plan([stub_server("other")]))
        with pytest.raises(ConflictError, match="busy: up"):
            supervisor.change_to(fleet_plan([*plan.servers], drain_timeout_s=2))  # a policy
        assert await ended(supervisor) == ""


async def test_only_the_file_of_an_up_that_was_accepted_counts_as_applied(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        paths, a = supervisor.paths, stub_server("a")
        paths.fleet_file.write_text("first")
        supervisor.change_to(fleet_plan([a]))
        paths.fleet_file.write_text("refused")
        with pytest.raises(ConflictError, match="busy: up"):
            supervisor.change_to(fleet_plan([stub_server("other")]))
        assert await ended(supervisor) == ""
        assert paths.applied_file.read_text() == "first"
        supervisor.change_to(fleet_plan([a, stub_server("b")]), OperationKind.SCALE)
        assert await ended(supervisor) == ""
        assert paths.applied_file.read_text() == "first" and not paths.previous_file.exists()


async def test_a_changed_plan_touches_only_what_differs(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        a, b, c = stub_server("a"), stub_server("b"), stub_server("c")
        router = stub_router()
        await bring_up(supervisor, fleet_plan([a, b, c], router))
        pids = {name: pid_of(supervisor, name) for name in "abc"}
        changed = replace(b, env={**b.env, "CHANGED": "1"})
        await bring_up(supervisor, fleet_plan([a, changed, stub_server("d")], router))
        assert list(supervisor.replicas) == ["a", "b", "d"]
        assert pid_of(supervisor, "a") == pids["a"]
        assert pid_of(supervisor, "b") != pids["b"]
        assert not psutil.pid_exists(pids["c"])
        assert routed(supervisor) == {"a", "b", "d"}


async def test_changed_policies_apply_to_what_runs_on(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        server, router = stub_server("a"), stub_router()
        await bring_up(supervisor, fleet_plan([server], router))
        never = fleet_plan([server], router, restart={"policy": "never"})
        assert supervisor.change_to(never).operation == 0
        for kept in (supervisor.replicas["a"], supervisor.router):
            assert kept is not None and kept.process is not None
            os.kill(kept.process.pid, signal.SIGKILL)
            await eventually(lambda kept=kept: kept.phase == "dead")


@pytest.mark.parametrize("given_up", ["router", "server"])
async def test_an_up_does_not_wait_for_an_api_that_lost_what_it_waits_for(given_up: str) -> None:
    server = SimpleNamespace(phase=Phase.UP)
    router = SimpleNamespace(phase=Phase.READY, renewing=False)
    router.settled, settled = asyncio.Event(), asyncio.Event()
    router.settled.set()
    fleet: Any = SimpleNamespace(
        replicas={"a": server},
        router=router if given_up == "router" else None,
        tinker=SimpleNamespace(phase=Phase.WAITING, settled=settled),
        desired=lambda: {"a": "http://a"} if server.phase is Phase.UP else {},
    )
    router.sync = AsyncMock()
    waiting = asyncio.create_task(rollout.settle_fronts(fleet))
    await asyncio.sleep(0)
    if given_up == "router":
        router.phase = Phase.FAILED
        router.wake = lambda: None
    else:
        server.phase = Phase.FAILED
    async with asyncio.timeout(10):
        await waiting


async def test_one_that_exits_at_start_fails_the_up_and_the_others_run_on(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        broken = command_server("b", "raise ValueError('no such model')")
        supervisor.change_to(fleet_plan([stub_server("a"), broken], stub_router()))
        error = await ended(supervisor)
        assert error.startswith("b exited with code 1") and "ValueError: no such model" in error
        assert states(supervisor) == {"a": "ready", "b": "failed"}
        assert routed(supervisor) == {"a"}
        found = await report(supervisor)
        assert found.health == "degraded" and "skyctl restart b" in found.reasons[0].hint


async def test_one_that_is_never_ready_runs_into_its_deadline(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        health = {"interval_s": 0.1, "timeout_s": 1, "startup_timeout_s": 0.5}
        hung = command_server("a", "import time; time.sleep(600)")
        supervisor.change_to(fleet_plan([hung], stub_router(), health=health))
        assert "not ready after 500 ms" in await ended(supervisor)
        assert supervisor.replicas["a"].process is None


async def test_undo_stops_what_the_operation_started_and_nothing_else(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        a = stub_server("a")
        await bring_up(supervisor, fleet_plan([a]))
        hung = command_server("b", "import time; time.sleep(600)")
        supervisor.change_to(fleet_plan([a, hung]))
        await eventually(
            lambda: "b" in supervisor.replicas and states(supervisor)["b"] != "stopped"
        )
        await supervisor.undo_by(INTERRUPTED)
        assert states(supervisor) == {"a": "ready"}
        assert not supervisor.finished.is_set()


async def test_a_verb_routes_no_server_that_something_else_keeps_out(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await rollout.leave_router(supervisor, supervisor.replicas["a"])
        await supervisor.pause(Pause(mode="keep", servers=("a",)))
        await supervisor.resume(Resume())
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert routed(supervisor) == {"b"}


async def test_undo_of_a_request_that_began_nothing_touches_nothing(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        ready, fails = stub_server("a"), command_server("b", "raise MemoryError('GPU')")
        await supervisor.reconcile(Reconcile(fleet_plan([ready, fails]), request_id="first"))
        assert "b" in await ended(supervisor)
        await supervisor.undo(Undo("second"))
        assert states(supervisor)["a"] == "ready"
        with pytest.raises(ConflictError, match="interrupted before it began"):
            await supervisor.reconcile(Reconcile(fleet_plan([ready]), request_id="second"))
        await supervisor.restart(Restart(("a",)))
        await supervisor.undo(Undo("first"))
        assert await ended(supervisor) == ""
        assert states(supervisor)["a"] == "ready"


async def test_undo_of_the_last_request_removes_what_it_started(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        ready, fails = stub_server("a"), command_server("b", "raise MemoryError('GPU')")
        await bring_up(supervisor, fleet_plan([ready]))
        await supervisor.reconcile(Reconcile(fleet_plan([ready, fails]), request_id="more"))
        assert "b" in await ended(supervisor)
        await supervisor.undo(Undo("more"))
        assert states(supervisor) == {"a": "ready"}


async def test_a_cancel_that_comes_after_the_end_undoes_nothing(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        a, b = stub_server("a"), stub_server("b")
        await bring_up(supervisor, fleet_plan([a]))
        await bring_up(supervisor, fleet_plan([a, b]))
        await supervisor.undo_by(BY_CANCEL)
        assert states(supervisor) == {"a": "ready", "b": "ready"}


async def test_what_could_not_be_put_back_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervising(tmp_path) as supervisor:
        number = supervisor.change_to(
            fleet_plan([command_server("a", "import time; time.sleep(600)")])
        ).operation
        await eventually(lambda: "a" in supervisor.replicas)
        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "undo_by", AsyncMock(side_effect=OSError("disk is full")))
            await supervisor.cancel_job(CancelJob(f"up-{number}"))
            await eventually(
                lambda: (
                    f"up-{number} is not put back: OSError('disk is full')"
                    in [event.message for event in supervisor.state.events()]
                )
            )


async def test_an_up_that_down_ended_did_not_fail(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        plan = fleet_plan([command_server("a", "import time; time.sleep(600)")])
        number = supervisor.change_to(plan).operation
        await eventually(lambda: "a" in supervisor.replicas)
        await supervisor.down(Down(0.0))
        status = await supervisor.status(StatusQuery(fresh=False, operation=number))
        error = await operation_error(supervisor, status)
        assert error is not None and error.message == "up was stopped by `skyctl down`"
        assert error.hint == "start it again: skyctl up"


async def test_a_probe_that_answers_late_does_not_undo_what_was_seen_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw a push's own pause, and would take the server out of the router until the next one."""
    answered = asyncio.Event()

    async def sees_pause(*_: object) -> bool:
        await answered.wait()
        return True

    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        with monkeypatch.context() as patch:
            patch.setattr(admission, "probe_alive", sees_pause)
            servers = supervisor.replicas.values()
            late = asyncio.create_task(admission.refresh_all(servers, supervisor.client, 5.0))
            await asyncio.sleep(0)
        await supervisor.resume(Resume())
        answered.set()
        await late
        assert states(supervisor) == {"a": "ready"}


async def test_undo_of_a_first_up_ends_the_supervisor(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        supervisor.change_to(fleet_plan([command_server("a", "import time; time.sleep(600)")]))
        await eventually(lambda: "a" in supervisor.replicas)
        await supervisor.undo_by(INTERRUPTED)
        assert supervisor.finished.is_set() and supervisor.replicas == {}


async def test_a_router_of_pairs_is_started_anew_for_a_server_that_joins(tmp_path: Path) -> None:
    """It takes none while it runs. What freezes or leaves needs no other router."""
    servers = [
        replace(stub_server(name), role=role)
        for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode"))
    ]
    pairs = {"auth": "control", "replicas": [{"role": "prefill"}, {"role": "decode", "count": 2}]}
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan(servers, stub_router(), **pairs))
        assert supervisor.router is not None and supervisor.router.process is not None
        router, first = supervisor.router, supervisor.router.process.pid
        assert routed(supervisor) == {"p", "d", "e"}
        for verbs, expected in ((1, {"p", "d", "e"}), (0, {"p", "e"})):
            supervisor.verbs_under_way = verbs  # a probe may see one paused before the other
            supervisor.replicas["d"].observe(paused=True)
            assert set(supervisor.desired()) == expected
            supervisor.replicas["d"].observe(paused=False)
        await supervisor.pause(Pause(mode="keep"))
        assert routed(supervisor) == {"p", "d", "e"}
        await supervisor.resume(Resume())
        supervisor.replicas["d"].update_row(quarantine="for a while")
        await rollout.sync_router(supervisor)
        assert routed(supervisor) == {"p", "e"}
        assert supervisor.router.process.pid == first
        supervisor.replicas["d"].update_row(quarantine="")
        await rollout.sync_router(supervisor)
        assert routed(supervisor) == {"p", "d", "e"}
        assert supervisor.router.process.pid != first
        assert not supervisor.router.restarts
        # half a pair serves nobody
        supervisor.replicas["p"].update_row(quarantine="for a while")
        await rollout.sync_router(supervisor)
        assert routed(supervisor) == set()
        # nor is one waited for that goes meanwhile
        supervisor.replicas["p"].update_row(quarantine="")
        syncing = asyncio.create_task(rollout.sync_router(supervisor))
        async with asyncio.timeout(10):
            while not router.renewing:  # noqa: ASYNC110 - as soon as it is
                await asyncio.sleep(0)
        supervisor.replicas["p"].update_row(quarantine="for a while")
        async with asyncio.timeout(10):
            await syncing
        assert routed(supervisor) == set()


async def test_a_router_that_dies_is_restarted_with_its_workers(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        router = supervisor.router
        assert router is not None and router.process is not None and router.process.pid is not None
        os.kill(router.process.pid, signal.SIGKILL)
        await eventually(lambda: router.state != "ready")
        await eventually(lambda: router.state == "ready" and len(router.workers) == 2)
        assert len(router.restarts) == 1


async def test_one_paused_server_leaves_the_router_and_a_paused_fleet_stays(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        await supervisor.pause(Pause(mode="keep", servers=("a",), timeout_s=5.0))
        assert states(supervisor)["a"] == "paused" and routed(supervisor) == {"b"}
        await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        await supervisor.resume(Resume(timeout_s=5.0))
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert routed(supervisor) == {"a", "b"}


async def test_a_paused_server_that_dies_comes_back_paused(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: supervisor.replicas["a"].phase != "up")
        await eventually(lambda: supervisor.replicas["a"].phase == "up")
        assert states(supervisor) == {"a": "paused"}


async def test_a_replica_that_is_starting_is_paused_when_it_is_ready(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        slow = stub_server("b", faults={"startup_delay_s": 1})
        supervisor.change_to(fleet_plan([stub_server("a"), slow]))
        await eventually(lambda: states(supervisor).get("a") == "ready")
        outcomes = await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
        assert [o.status for o in outcomes] == ["ok", "skipped"]
        assert "will be paused" in outcomes[1].detail
        assert await ended(supervisor) == ""
        assert states(supervisor) == {"a": "paused", "b": "paused"}


async def test_an_unknown_replica_is_refused_with_the_known_names(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        with pytest.raises(NotFoundError, match="no server 'z'") as caught:
            await supervisor.restart(Restart(("z",)))
        assert "a" in caught.value.hint


async def test_a_replica_that_is_named_twice_is_changed_once(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")]))
        outcomes = await supervisor.pause(Pause(servers=("b", "b"), mode="keep", timeout_s=5.0))
        assert [outcome.server for outcome in outcomes] == ["b"]


async def test_a_rolling_restart_never_takes_out_two(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
        pids = [pid_of(supervisor, "a"), pid_of(supervisor, "b")]
        fewest = 2

        def done() -> bool:
            nonlocal fewest
            fewest = min(fewest, sum(state == "ready" for state in states(supervisor).values()))
            return supervisor.operation is not None and supervisor.operation.ended_at is not None

        await supervisor.restart()
        await eventually(done)
        assert fewest == 1
        assert routed(supervisor) == {"a", "b"}
        assert not set(pids) & {pid_of(supervisor, "a"), pid_of(supervisor, "b")}


async def test_servers_on_one_gpu_start_one_after_the_other(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        slow = {"startup_delay_s": 0.3}
        a = replace(stub_server("a", faults=slow), gpus=(0,))
        b = replace(stub_server("b", faults=slow), gpus=(0,))
        supervisor.change_to(fleet_plan([a, b]))
        together = False

        def ready() -> bool:
            nonlocal together
            phases = [replica.phase for replica in supervisor.replicas.values()]
            together = together or phases.count("starting") > 1
            return phases == ["up", "up"]

        await eventually(ready)
        assert not together


# --- weights -----------------------------------------------------------------------------------

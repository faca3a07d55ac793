"""A change of the plan: what comes first, where it stops, and what has its old settings again."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.core.plan import ServerSpec
from skyctl.core.requests import Restart
from skyctl.core.status import INTERRUPTED
from skyctl.launch.local.process import ManagedProcess
from skyctl.supervisor.reconcile import Changes
from skyctl.supervisor.steps import Order, Step, order_of
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

EXITS = ("import sys; sys.exit('no such argument')", "raise MemoryError('GPU')", "raise OSError")


def on(name: str, *gpus: int, port: int = 0) -> ServerSpec:
    return replace(command_server(name, ""), port=port, gpus=gpus)


ORDERS = {
    "one at a time, those that do not serve first": (
        Changes(start=("new",), restart=("a", "b"), stop=("c",)),
        [on("a"), on("b"), on("c")],
        [on("a"), on("b"), on("new")],
        1,
        Order(("new",), (Step(("b",), ("b",)), Step(("a",), ("a",))), ("c",)),
    ),
    "two at a time": (
        Changes(restart=("a", "b", "d")),
        [on("a"), on("b"), on("d")],
        [on("a"), on("b"), on("d")],
        2,
        Order((), (Step(("b", "d"), ("b", "d")), Step(("a",), ("a",))), ()),
    ),
    "a renamed server takes the GPU of the other": (
        Changes(start=("new",), stop=("a",)),
        [on("a", 0)],
        [on("new", 0)],
        1,
        Order((), (Step(("a",), ("new",)),), ()),
    ),
    "servers that exchange their ports restart together": (
        Changes(restart=("a", "b")),
        [on("a", port=1), on("b", port=2)],
        [on("a", port=2), on("b", port=1)],
        1,
        Order((), (Step(("b", "a"), ("b", "a")),), ()),
    ),
    "a server that grows waits for its neighbour's move": (
        Changes(restart=("a", "b")),
        [on("a", 0), on("b", 1)],
        [on("a", 0, 1), on("b", 2, 3)],
        1,
        Order((), (Step(("b",), ("b",)), Step(("a",), ("a",))), ()),
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_a_change(case: str) -> None:
    changes, running, planned, parallel, order = ORDERS[case]
    before = {spec.name: spec for spec in running}
    after = {spec.name: spec for spec in planned}
    assert order_of(changes, before, after, serving=["a"], parallel=parallel) == order


@pytest.mark.parametrize("script", EXITS)
async def test_a_wrong_change_touches_one_server_which_has_its_old_settings_again(
    tmp_path: Path, script: str
) -> None:
    async with supervising(tmp_path) as supervisor:
        servers, router = [stub_server(name) for name in "abc"], stub_router()
        good = fleet_plan(servers, router)
        await bring_up(supervisor, good)
        pids = {name: pid_of(supervisor, name) for name in "abc"}
        wrong = [replace(command_server(s.name, script), port=s.port) for s in servers]
        supervisor.change_to(fleet_plan(wrong, router))
        error = await ended(supervisor)
        assert error.startswith("a did not come back: exited with code 1")
        assert error.endswith("; with their old settings again: a; not touched: b, c")
        assert set(states(supervisor).values()) == {"ready"}
        assert {name: pid_of(supervisor, name) for name in "bc"} == {n: pids[n] for n in "bc"}
        assert supervisor.operation is not None and supervisor.operation.logs["a"]
        assert supervisor.plan is not None and supervisor.plan.servers == good.servers
        await eventually(lambda: routed(supervisor) == {"a", "b", "c"})
        assert supervisor.change_to(good).operation == 0


async def test_without_undo_the_failed_server_keeps_its_new_settings(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        servers, router = [stub_server(name) for name in "ab"], stub_router()
        await bring_up(supervisor, fleet_plan(servers, router))
        wrong = [replace(command_server(s.name, EXITS[0]), port=s.port) for s in servers]
        supervisor.change_to(fleet_plan(wrong, router), undo=False)
        assert (await ended(supervisor)).endswith("; not touched: b")
        assert states(supervisor) == {"a": "failed", "b": "ready"}
        supervisor.change_to(fleet_plan(servers, router))  # the file is put right
        assert await ended(supervisor) == ""
        assert set(states(supervisor).values()) == {"ready"}


async def test_nothing_that_runs_is_touched_while_a_missing_server_does_not_come_up(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        a, router = stub_server("a"), stub_router()
        await bring_up(supervisor, fleet_plan([a], router))
        pid = pid_of(supervisor, "a")
        other = replace(a, env={**a.env, "OTHER": "1"})
        supervisor.change_to(fleet_plan([other, command_server("b", EXITS[0])], router))
        assert (await ended(supervisor)).endswith("what runs was not touched")
        assert pid_of(supervisor, "a") == pid and states(supervisor)["a"] == "ready"


async def test_an_interrupted_change_gives_the_server_in_between_its_old_settings(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path) as supervisor:
        servers, router = [stub_server(name) for name in "ab"], stub_router()
        good = fleet_plan(servers, router)
        await bring_up(supervisor, good)
        hung = "import time; time.sleep(600)"
        slow = [replace(command_server(s.name, hung), port=s.port) for s in servers]
        supervisor.change_to(fleet_plan(slow, router))
        await eventually(lambda: states(supervisor)["a"] == "starting")
        await supervisor.undo_by(INTERRUPTED)
        assert states(supervisor) == {"a": "ready", "b": "ready"}
        assert supervisor.change_to(good).operation == 0


async def test_a_server_whose_end_an_interrupted_restart_cuts_short_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, calls = ManagedProcess.stop, 0

    async def slow_at_first(process: ManagedProcess, timeout_s: float) -> bool:
        nonlocal calls
        calls += 1
        await asyncio.sleep(600 if calls == 1 else 0)
        return await stop(process, timeout_s)

    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")]))
        pid = pid_of(supervisor, "a")
        supervisor.replicas["a"].update_row(quarantine="it waits for weights")  # it serves nobody
        monkeypatch.setattr(ManagedProcess, "stop", slow_at_first)
        await supervisor.restart(Restart())
        await eventually(lambda: calls == 1)
        await supervisor.undo_by(INTERRUPTED)
        await eventually(lambda: states(supervisor) == {"a": "ready"})
        assert pid_of(supervisor, "a") != pid


async def test_an_interrupted_change_gives_the_router_its_old_settings(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervisor:
        servers, router = [stub_server("a")], stub_router()
        good = fleet_plan(servers, router)
        await bring_up(supervisor, good)
        hung = replace(router, argv=(sys.executable, "-c", "import time; time.sleep(600)"))
        supervisor.change_to(fleet_plan(servers, hung))
        await eventually(lambda: getattr(supervisor.router, "planned", None) == hung)
        await supervisor.undo_by(INTERRUPTED)
        await eventually(lambda: routed(supervisor) == {"a"})
        assert supervisor.change_to(good).operation == 0

"""A supervisor whose state cannot be written: it ends no live server and keeps no dead one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from skyctl.core.requests import Pause, Resume
from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.launch.local.process import ManagedProcess
from skyctl.store import unrecorded
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from skyctl.supervisor.fleet import report
from skyctl.supervisor.resident import Supervisor
from tests.processes.supervisor.supervising import bring_up, pid_of, routed, states, supervising
from tests.unit.store.disks import FAULTS, FailingDisk
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_router, stub_server

QUICK = {"interval_s": 0.1}


class Unlucky(FleetState):
    """Every write about processes fails while `broken`; but for intents, unless those are too."""

    broken = intents_too = False

    def add_event(self, subject: str, message: str) -> None:
        self._fail(self.broken)
        super().add_event(subject, message)

    def mark_stale(self, name: str) -> None:
        self._fail(self.broken)
        super().mark_stale(name)

    def save_process(self, row: ProcessRow) -> None:
        self._fail(self.broken if row.phase == "running" else self.intents_too)
        super().save_process(row)

    def _fail(self, fails: bool) -> None:
        if fails:
            raise SkyctlError("cannot use the state file: database is locked")


async def kill_and_wait_for_another(supervisor: Supervisor) -> None:
    """Whatever runs as `a` is killed, and the router too: others take their place."""
    before = pid_of(supervisor, "a")
    os.kill(before, signal.SIGKILL)
    await eventually(lambda: states(supervisor)["a"] != "ready")
    await eventually(lambda: states(supervisor)["a"] == "ready" and routed(supervisor) == {"a"})
    assert pid_of(supervisor, "a") != before
    router = supervisor.router
    assert router is not None and router.process is not None
    before = router.process.pid or 0
    os.kill(before, signal.SIGKILL)
    await eventually(
        lambda: (
            router.process is not None
            and router.process.pid != before
            and routed(supervisor) == {"a"}
        )
    )


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_dies_while_the_disk_fails_is_started_again(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk()
    async with supervising(tmp_path, connect=disk.connect) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a")], stub_router(), health=QUICK))
        disk.fail(fault)
        await kill_and_wait_for_another(supervisor)
        await supervisor.pause(Pause(mode="keep", timeout_s=5.0))
        await supervisor.resume(Resume(timeout_s=5.0))
        assert states(supervisor) == {"a": "ready"}
        if fault != "full":  # small rows find their place on a full disk, too
            assert supervisor.state.unrecorded is not None
            reasons = (await report(supervisor)).reasons
            assert any("cannot be written" in reason.message for reason in reasons)
            with pytest.raises(StateUnwritable):
                supervisor.change_to(fleet_plan([stub_server("b")]))
            assert list(supervisor.replicas) == ["a"]
        disk.mend()
        assert supervisor.state.complete()
        record = supervisor.state.process("a")
        assert record is not None and record.identity is not None
        assert record.identity.pid == pid_of(supervisor, "a")
    assert unrecorded.LOST == []


async def test_what_dies_while_writes_are_refused_is_started_again_and_put_on_record_later(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path, Unlucky) as supervisor:
        state = supervisor.state
        assert isinstance(state, Unlucky)
        await bring_up(supervisor, fleet_plan([stub_server("a")], stub_router(), health=QUICK))
        state.broken = True
        await kill_and_wait_for_another(supervisor)
        state.broken = False

        def recorded() -> bool:
            found = state.process("a")
            identity = found.identity if found else None
            return identity is not None and identity.pid == pid_of(supervisor, "a")

        await eventually(recorded)


async def test_writes_that_are_refused_end_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if each probe saw another process below the server, which is to be put on record
    monkeypatch.setattr(ManagedProcess, "record_descendants", lambda process: True)
    async with supervising(tmp_path, Unlucky) as supervisor:
        state = supervisor.state
        assert isinstance(state, Unlucky)
        await bring_up(supervisor, fleet_plan([stub_server("a")], health=QUICK))
        pid = pid_of(supervisor, "a")
        state.broken = state.intents_too = True
        await asyncio.sleep(0.5)  # some probes
        assert states(supervisor) == {"a": "ready"} and pid_of(supervisor, "a") == pid
        state.broken = state.intents_too = False


async def test_a_dead_server_whose_successor_cannot_be_recorded_is_not_called_ready(
    tmp_path: Path,
) -> None:
    async with supervising(tmp_path, Unlucky) as supervisor:
        state = supervisor.state
        assert isinstance(state, Unlucky)
        restart = {"backoff_s": 0.1, "max_restarts": 1000}
        plan = fleet_plan([stub_server("a")], stub_router(), health=QUICK, restart=restart)
        await bring_up(supervisor, plan)
        state.broken = state.intents_too = True
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: routed(supervisor) == set())
        assert states(supervisor)["a"] != "ready"
        state.broken = state.intents_too = False
        await eventually(lambda: states(supervisor) == {"a": "ready"})

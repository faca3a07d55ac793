"""A state file on a full, read-only or failing disk: memory stands in, the file is completed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from skyctl.errors import StateUnwritable
from skyctl.states import FleetEvent
from skyctl.store import database, unrecorded
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.in_doubt import InDoubt, clear_doubt, in_doubt, put_in_doubt
from skyctl.store.state import FleetState
from tests.unit.store.disks import BIG, FAULTS, FailingDisk, disk_full, failing_disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet" / "state.sqlite"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return failing_disk(monkeypatch)


def everything(state: FleetState) -> list[object]:
    """Whatever a state file remembers of servers and history, without times."""
    events = [(event.subject, event.message) for event in state.events()]
    return [state.servers(), state.weights(), in_doubt(state), events]


def write_everything(state: FleetState) -> None:
    """Each kind of write, alone and in transactions, with something that needs room."""
    state.add_event("fleet", BIG)
    state.update_server("a-0", paused=True, quarantine=BIG)
    put_in_doubt(state, {"a-1": InDoubt("a-1", "push-1", "update", True, True)})
    with state.transaction():
        state.set_weights(FleetWeights("v2", "/c"))
        state.update_server("a-0", paused=False)
        state.update_server("a-2", weights_awake=True)
    clear_doubt(state, "a-1")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_failing_disk_refuses_is_in_memory_and_then_in_the_file(
    path: Path, disk: FailingDisk, fault: str
) -> None:
    said: list[str] = []
    with FleetState(path, connect=disk.connect, warn=said.append) as state:
        state.update_server("a-0", weight_version="v1")
        disk.fail(fault)
        write_everything(state)
        seen = everything(state)
        assert state.server("a-0").quarantine == BIG and state.server("a-0").weight_version == "v1"
        assert state.unrecorded is not None and state.unrecorded.writes > 3
        assert not state.complete()
        assert len(said) == 1 and str(path) in said[0]
        with FleetState(path) as other:
            assert other.server("a-0").quarantine is None
        disk.mend()
        assert state.complete() and state.unrecorded is None
        assert "complete" in said[1]
        assert everything(state) == seen
    with FleetState(path) as other:
        assert everything(other) == seen
    assert unrecorded.LOST == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transaction_whose_disk_fails_in_the_middle_is_whole(
    path: Path, disk: FailingDisk, fault: str
) -> None:
    with FleetState(path, connect=disk.connect) as state:
        with state.transaction():
            state.update_server("a-0", paused=True)
            disk.fail(fault)
            state.add_event("a-0", BIG)
        assert state.server("a-0").paused and len(state.events()) == 1
        disk.mend()
    with FleetState(path) as other:
        assert other.server("a-0").paused and len(other.events()) == 1


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_transaction_that_is_given_up_leaves_nothing_and_hides_no_cause(
    path: Path, disk: FailingDisk, fault: str
) -> None:
    with FleetState(path, connect=disk.connect) as state:
        with pytest.raises(ValueError, match="the cause"), state.transaction():
            state.update_server("a-0", paused=True)
            disk.fail(fault)
            state.add_event("a-0", BIG)
            raise ValueError("the cause")
        assert (state.servers(), state.events()) == ([], [])
        disk.mend()
        state.update_server("a-1", paused=True)
    with FleetState(path) as other:
        assert [row.name for row in other.servers()] == ["a-1"] and other.events() == []


def test_an_event_is_told_once_it_is_on_record(path: Path, disk: FailingDisk) -> None:
    told: list[str] = []
    with FleetState(path, connect=disk.connect) as state:
        state.on_event = lambda kind, event, details: told.append(event.message)
        with pytest.raises(StateUnwritable), state.durable():
            state.add_event("fleet", "lost", FleetEvent.PUSH_SUCCEEDED)
            disk.fail("commit")
        disk.mend()
        with state.transaction():
            with state.transaction():
                state.add_event("fleet", "kept", FleetEvent.PUSH_SUCCEEDED)
            assert told == []
        assert told == ["kept"]
        state.add_event("fleet", "alone", FleetEvent.PUSH_FAILED)
        assert told == ["kept", "alone"] == [event.message for event in state.events()]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("before", ["fails first", "in memory already"])
def test_an_intent_is_on_disk_or_refused(
    path: Path, disk: FailingDisk, fault: str, before: str
) -> None:
    with FleetState(path, connect=disk.connect) as state:
        disk.fail(fault)
        if before == "in memory already":
            state.add_event("fleet", BIG)
        with pytest.raises(StateUnwritable, match="cannot write") as refused, state.durable():
            state.add_event("fleet", "intent")
            state.set("intent", BIG)
        assert str(path) in refused.value.message and refused.value.hint
        assert state.get("intent") is None
        with pytest.raises(StateUnwritable):
            state.journal.begin("push", {"checkpoint": BIG})
        assert state.journal.jobs() == []
        disk.mend()
        with state.durable():
            state.set("intent", "kept")
        assert state.unrecorded is None
        with FleetState(path) as other:
            assert other.get("intent") == "kept"


@pytest.mark.parametrize("fault", FAULTS)
def test_an_intent_makes_the_transaction_around_it_one(
    path: Path, disk: FailingDisk, fault: str
) -> None:
    with FleetState(path, connect=disk.connect) as state:
        disk.fail(fault)
        with pytest.raises(StateUnwritable), state.transaction():
            with state.durable():
                state.set("intent", "small")
            state.add_event("fleet", BIG)
        assert state.get("intent") is None and state.events() == []


def test_an_intent_in_a_transaction_that_lives_in_memory_is_refused(
    path: Path, disk: FailingDisk
) -> None:
    with FleetState(path, connect=disk.connect) as state:
        disk.fail("read-only")
        with state.transaction():
            state.add_event("fleet", "kept in memory")
            with pytest.raises(StateUnwritable), state.durable():
                pytest.fail("nothing is begun")
        assert len(state.events()) == 1


def test_a_write_finds_by_itself_that_there_is_room_again(
    path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RETRY_S", -1.0)
    with FleetState(path, connect=disk.connect) as state:
        disk.fail("read-only")
        state.add_event("fleet", "first")
        state.add_event("fleet", "second")
        assert state.unrecorded is not None and state.unrecorded.writes == 2
        disk.mend()
        with state.transaction():
            state.add_event("fleet", "third")
        assert state.unrecorded is None
    with FleetState(path) as other:
        assert [event.message for event in other.events()] == ["first", "second", "third"]


@pytest.mark.parametrize("mended", [True, False])
def test_who_only_reads_hears_of_what_others_write_meanwhile(
    path: Path, disk: FailingDisk, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """A follower that opened the file while the disk was full must see its job end."""

    def full(path: Path) -> sqlite3.Connection:
        if disk.fault:
            raise disk_full()
        return disk.connect(path)

    monkeypatch.setattr(database, "RETRY_S", -1.0)
    with FleetState(path) as other:
        other.add_event("fleet", "before")
        disk.fail("full")
        with FleetState(path, connect=full) as state:
            other.add_event("fleet", "meanwhile")
            if mended:
                disk.mend()
            assert [event.message for event in state.events()] == ["before", "meanwhile"]
            state.add_event("fleet", "ours")
            other.add_event("fleet", "later")
            seen = [event.message for event in state.events()]
            # what it could not write itself is not given up for what others write
            assert seen[-1] == ("later" if mended else "ours")
            disk.mend()
        assert "ours" in [event.message for event in other.events()]


def test_what_others_wrote_meanwhile_stays(path: Path, disk: FailingDisk) -> None:
    with FleetState(path, connect=disk.connect) as state, FleetState(path) as other:
        state.update_server("a-0", weight_version="v1")
        disk.fail("read-only")
        state.add_event("fleet", "ours")
        state.update_server("a-0", paused=True)
        state.update_server("a-1", weights_awake=True)
        state.set("key", "ours")
        other.update_server("a-0", quarantine="theirs")
        other.update_server("a-2", weights_awake=True)
        other.add_event("fleet", "theirs")
        other.set("key", "theirs")
        put_in_doubt(other, {"a-1": InDoubt("a-1", "push-1", "update", True, True)})
        disk.mend()
        assert state.complete()
        assert [event.message for event in other.events()] == ["theirs", "ours"]
        assert other.get("key") == "ours"  # the last writer
        row = other.server("a-0")
        assert (row.paused, row.quarantine, row.weight_version) == (True, "theirs", "v1")
        assert {row.name for row in other.servers() if row.weights_awake} == {"a-1", "a-2"}
        assert set(in_doubt(other)) == {"a-1"}


def test_what_is_given_up_at_the_end_is_told(path: Path, disk: FailingDisk) -> None:
    with FleetState(path, connect=disk.connect) as state:
        disk.fail("full")
        state.add_event("fleet", BIG)
        state.add_event("fleet", "small")
    [lost] = unrecorded.LOST
    assert (lost.path, lost.writes) == (path, 2)
    assert str(lost).endswith(f"database or disk is full; free space at {path.parent}")


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc/home"])
def test_where_no_file_can_be_the_state_is_in_memory_from_the_start(
    home: str, disk: FailingDisk
) -> None:
    with FleetState(Path(home, "fleets", "a", "state.sqlite")) as state:
        state.update_server("a-0", paused=True)
        assert state.server("a-0").paused
        state.require_read()  # there was nothing to read
        assert state.unrecorded is not None
        with pytest.raises(StateUnwritable):
            state.journal.begin("push", {})
    assert len(unrecorded.LOST) == 1


def test_a_file_that_cannot_be_read_is_an_error_or_a_state_of_which_nothing_is_known(
    path: Path, disk: FailingDisk
) -> None:
    """A directory in its place can be neither opened nor copied."""
    path.mkdir(parents=True)
    with pytest.raises(StateUnwritable, match="cannot write"):
        FleetState(path)
    with FleetState(path, or_memory=True) as state:
        state.update_server("a-0", paused=True)
        assert state.server("a-0").paused
        with pytest.raises(StateUnwritable, match="cannot read"):
            state.require_read()
        path.rmdir()
        state.require_read()
    with FleetState(path) as state:
        assert state.server("a-0").paused


def in_memory_with_a_doubt(path: Path, disk: FailingDisk) -> FleetState:
    state = FleetState(path, connect=disk.connect)
    disk.fail("full")
    put_in_doubt(state, {"a-0": InDoubt("a-0", "push-1", BIG, half_updated=False, thaw=True)})
    assert state.unrecorded is not None
    return state


@pytest.mark.parametrize("mended", [True, False])
def test_whoever_gets_the_turn_knows_what_others_did_meanwhile(
    path: Path, disk: FailingDisk, mended: bool
) -> None:
    """What was kept before another push began is over: its records are the later ones."""
    with in_memory_with_a_doubt(path, disk) as state:
        with FleetState(path) as other:
            job = other.journal.begin("push", {"checkpoint": "/new"})
            left = InDoubt("a-0", job.id, "update", half_updated=True, thaw=True)
            put_in_doubt(other, {"a-0": left})
        if mended:
            disk.mend()
        turn = state.locks.take("turn", "skyctl recover")
        assert in_doubt(state) == {"a-0": left}
        turn.release()
    with FleetState(path) as other:
        assert in_doubt(other) == {"a-0": left}
    assert [lost.reason for lost in unrecorded.LOST] == ["another job began meanwhile"]


def test_what_is_kept_outlives_a_look_at_what_others_wrote(path: Path, disk: FailingDisk) -> None:
    with in_memory_with_a_doubt(path, disk) as state:
        with FleetState(path) as other:
            other.update_server("a-1", paused=True)
        turn = state.locks.take("turn", "skyctl recover")
        assert list(in_doubt(state)) == ["a-0"] and state.server("a-1").paused
        turn.release()
        disk.mend()
    with FleetState(path) as other:
        assert list(in_doubt(other)) == ["a-0"] and other.server("a-1").paused

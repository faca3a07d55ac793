"""What a dead push left of each server, read from its journal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.store.in_doubt import (
    InDoubt,
    clear_doubt,
    close_orphans,
    in_doubt,
    leave_to_next_push,
    left_behind,
    put_in_doubt,
    touch,
)
from skyctl.store.journal import Job, JobEvent
from skyctl.store.state import FleetState

DEAD = json.dumps({"pid": 1, "create_time": 1.0, "boot_id": "another boot"})


@pytest.fixture
def state(tmp_path: Path) -> Iterator[FleetState]:
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        yield state


def journaled(state: FleetState, *events: str, dead: bool = False) -> Job:
    """A push with these events: a word is a stage, `a:paused` a server's state."""
    job = state.journal.begin("push", {"checkpoint": "c", "sleep_after": 2})
    for event in events:
        server, _, reached = event.partition(":")
        if reached:
            state.journal.add_events(job.id, JobEvent.server(server, *reached.split("=")))
        else:
            state.journal.add_events(job.id, JobEvent.stage(event))
    if dead:
        state.write("UPDATE jobs SET owner = ?", DEAD)
    return state.journal.job(job.id)


def left(state: FleetState, *events: str) -> dict[str, tuple[bool, bool]]:
    """Per server: half updated, to be thawed."""
    job = journaled(state, *events)
    found = left_behind(job, state.journal.events(job.id))
    return {name: (one.half_updated, one.thaw) for name, one in found.items()}


def test_before_the_pause_nothing_was_touched(state: FleetState) -> None:
    assert left(state, "preflight", "stage") == {}


@pytest.mark.parametrize("last", ["a:pausing", "a:paused"])
def test_a_server_that_was_only_frozen_has_its_old_weights(state: FleetState, last: str) -> None:
    assert left(state, "pause", "a:pausing", last, "init") == {"a": (False, True)}


@pytest.mark.parametrize("last", ["a:paused", "a:updating", "a:updated=v2", "a:quarantined=broken"])
def test_once_the_update_began_nobody_knows_what_it_holds(state: FleetState, last: str) -> None:
    assert left(state, "pause", "start", "update", last) == {"a": (True, True)}


def test_a_server_that_an_undone_push_did_not_give_back_may_hold_what_another_sent(
    state: FleetState,
) -> None:
    """Another program's session was open in it. Until that is closed, and its digest compared, a
    later push that does not come to it changes nothing."""
    pausing = ("pause", "a:pausing", "b:pausing", "start")
    job = journaled(state, *pausing, "recover", "b:ready", "a:quarantined=half updated")
    put_in_doubt(state, left_behind(job, state.journal.events(job.id)))
    put_in_doubt(state, {"a": InDoubt("a", "push-2", "pause", half_updated=False, thaw=True)})
    [record] = in_doubt(state).values()
    assert (record.server, record.job, record.stage) == ("a", job.id, "recover")
    assert record.thaw and not record.half_updated


def test_a_server_that_was_given_back_is_in_no_doubt(state: FleetState) -> None:
    found = left(
        state,
        "pause",
        "update",
        "a:updating",
        "b:updating",
        "resume",
        "a:ready",
        "c:held",
        "c:kept",
    )
    assert found == {"b": (True, True)}


def test_a_server_that_was_paused_before_stays_so(state: FleetState) -> None:
    assert left(state, "pause", "a:held", "b:pausing") == {"b": (False, True)}
    assert left(state, "pause", "a:held", "start") == {"a": (False, False)}
    assert left(state, "pause", "a:held", "update", "a:updating") == {"a": (True, False)}


def test_a_server_that_ran_again_amid_the_push_is_to_be_thawed(state: FleetState) -> None:
    events = ("pause", "a:held", "update", "a:updating", "a:quarantined=broken", "a:pausing")
    assert left(state, *events) == {"a": (True, True)}


def woken(state: FleetState, *events: str) -> dict[str, tuple[bool, bool]]:
    """Per server: half updated, its weights were woken."""
    job = journaled(state, *events)
    found = left_behind(job, state.journal.events(job.id))
    return {name: (one.half_updated, one.woken) for name, one in found.items()}


def test_weights_that_were_woken_are_in_doubt_until_they_sleep_again(state: FleetState) -> None:
    assert woken(state, "wake", "a:waking") == {"a": (False, True)}
    assert woken(state, "wake", "a:waking", "pause", "a:held", "b:held") == {"a": (False, True)}
    undone = ("wake", "a:waking", "pause", "a:held", "init", "recover", "a:kept")
    assert woken(state, *undone) == {"a": (False, True)}
    assert woken(state, *undone, "a:asleep") == {}


def test_a_push_that_woke_weights_and_sent_them_is_judged_by_its_end(state: FleetState) -> None:
    sent = ("wake", "a:waking", "pause", "a:held", "update", "a:updating")
    assert woken(state, *sent) == {"a": (True, True)}
    assert woken(state, *sent, "resume", "a:ready") == {}


def test_weights_that_may_be_awake_are_on_record(state: FleetState) -> None:
    journaled(state, "wake", "a:waking", dead=True)
    close_orphans(state)
    assert {row.name for row in state.servers() if row.weights_awake} == {"a"}
    assert state.server("a").quarantine == "push-1 broke off in stage wake"


@pytest.mark.parametrize("paused", [True, False])
def test_one_that_slept_is_thawed_once_it_is_awake_unless_somebody_had_paused_it(
    state: FleetState, paused: bool
) -> None:
    """On a full disk a later push freezes it without a record."""
    state.update_server("a", paused=paused)
    journaled(state, "wake", "a:waking", "pause", "a:held", dead=True)
    close_orphans(state)
    assert in_doubt(state)["a"].thaw is not paused


def test_a_dead_push_quarantines_what_it_left_and_is_closed_once(state: FleetState) -> None:
    job = journaled(state, "pause", "a:pausing", "b:pausing", "update", "b:updated=v2", dead=True)
    assert [closed.id for closed in close_orphans(state)] == [job.id]
    assert state.journal.job(job.id).state == "interrupted"
    assert set(in_doubt(state)) == {"a", "b"}
    assert state.server("a").quarantine == f"{job.id} broke off in stage update"
    assert close_orphans(state) == []


@pytest.mark.parametrize(("whole", "last"), [(True, "ready"), (True, "sleeping"), (False, "ready")])
def test_what_a_dead_push_had_verified_is_committed(
    state: FleetState, whole: bool, last: str
) -> None:
    """Of a part of a roll only the servers are: the fleet's version is the one before. What an
    earlier push had left of a server that this one gave back is over."""
    put_in_doubt(state, {"b": InDoubt("b", "push-0", "init", half_updated=False, thaw=True)})
    state.update_servers({name: {"sleep_level": 2, "weights_awake": True} for name in "ab"})
    job = journaled(
        state, "pause", "a:pausing", "b:pausing", "c:pausing", "update", "resume", dead=True
    )
    fact = {
        "version": "v2",
        "checkpoint": "/new",
        "checkpoint_digest": "files",
        "content_digest": "bytes",
        "transport": "shm",
        "whole": whole,
        "servers": {"a": "weights", "b": "weights"},
    }
    state.journal.add_events(job.id, JobEvent.now("verified", **fact))
    state.journal.add_events(job.id, JobEvent.server("b", last))
    close_orphans(state)
    doubts = in_doubt(state)
    assert set(doubts) == {"a", "c"} and doubts["c"].half_updated
    assert (doubts["a"].half_updated, doubts["a"].thaw, doubts["a"].version) == (False, True, "v2")
    for name in ("a", "b"):
        row = state.server(name)
        assert (row.weight_version, row.weights_digest) == ("v2", "weights")
    assert state.server("a").quarantine and not state.server("b").quarantine
    # what is ready was wholly awake; all of it may sleep since, and does if that was begun
    slept = [(row.sleep_level, row.weights_awake) for row in state.servers() if row.name in "ab"]
    assert slept == [(1, True), (2 if last == "sleeping" else 1, False)]
    assert state.weights().version == ("v2" if whole else None)
    assert [push.ok for push in state.journal.pushes()] == ([True] if whole else [])


def test_what_a_dead_push_left_asleep_but_for_its_weights_is_on_record_as_that(
    state: FleetState,
) -> None:
    state.update_server("a", sleep_level=2, weights_awake=True)
    job = journaled(state, "pause", "a:held", "update", "a:updated=v2", "resume", dead=True)
    fact = {"version": "v2", "checkpoint": "/new", "checkpoint_digest": "files", "whole": True}
    fact |= {"content_digest": "bytes", "transport": "shm", "servers": {"a": "weights"}}
    state.journal.add_events(job.id, JobEvent.now("verified", **fact))
    state.journal.add_events(job.id, JobEvent.server("a", "kept"))
    close_orphans(state)
    row = state.server("a")
    assert (row.weight_version, row.sleep_level, row.weights_awake) == ("v2", 1, True)


@pytest.mark.parametrize("thawed", [True, False])
def test_weights_that_nobody_verified_are_those_of_a_server_that_was_given_back(
    state: FleetState, thawed: bool
) -> None:
    job = journaled(state, "pause", "a:pausing", "update", "resume", dead=True)
    fact = {"version": "v2", "checkpoint": "/new", "checkpoint_digest": "files", "whole": True}
    state.journal.add_events(
        job.id, JobEvent.now("verified", **{**fact, "transport": "shm", "servers": {"a": ""}})
    )
    if thawed:
        state.journal.add_events(job.id, JobEvent.server("a", "ready"))
    close_orphans(state)
    assert state.server("a").weight_version == ("v2" if thawed else None)
    assert set(in_doubt(state)) == (set() if thawed else {"a"})


def test_what_is_half_updated_stays_so_until_it_was_put_right(state: FleetState) -> None:
    put_in_doubt(state, {"a": InDoubt("a", "push-1", "update", True, True)})
    put_in_doubt(state, {"a": InDoubt("a", "push-2", "pause", False, True)})
    # the push to finish is the one that sent something
    assert in_doubt(state)["a"] == InDoubt("a", "push-1", "update", True, True)
    clear_doubt(state, "a")
    assert in_doubt(state) == {}


def test_a_push_that_froze_a_half_updated_server_before_it_began_is_to_thaw_it(
    state: FleetState,
) -> None:
    put_in_doubt(state, {"a": InDoubt("a", "push-1", "update", True, False)})
    job = journaled(state, "preflight", "stage", "a:pausing", "a:quarantined=broken")
    put_in_doubt(state, left_behind(job, state.journal.events(job.id)))
    assert in_doubt(state)["a"] == InDoubt("a", "push-1", "update", True, True)


def test_what_recovery_left_whole_is_so_until_a_push_touches_it(state: FleetState) -> None:
    leave_to_next_push(state, "a")
    assert in_doubt(state)["a"].whole
    put_in_doubt(state, {"a": InDoubt("a", "push-2", "start", False, True)})
    left = in_doubt(state)["a"]  # another fleet must not resume it, nor recovery repeat the push
    assert (left.whole, left.half_updated, left.job) == (False, True, "recovery")


def test_a_session_that_may_be_open_is_remembered_until_a_push_has_closed_it(
    state: FleetState,
) -> None:
    put_in_doubt(state, {"a": InDoubt("a", "push-1", "start", False, True)})
    put_in_doubt(state, {"a": InDoubt("a", "push-2", "pause", False, True)})
    assert in_doubt(state)["a"].stage == "start"


@pytest.mark.parametrize("stage", ["init", "start"])
def test_a_push_that_was_undone_broke_off_before_the_undo(state: FleetState, stage: str) -> None:
    undone = journaled(state, "pause", "a:pausing", stage, "recover")
    put_in_doubt(state, left_behind(undone, state.journal.events(undone.id)))
    next_push = journaled(state, "pause", "a:paused", "init")
    put_in_doubt(state, left_behind(next_push, state.journal.events(next_push.id)))
    assert in_doubt(state)["a"].stage == stage


@pytest.mark.parametrize("sent", [False, True])
def test_what_was_verified_keeps_its_label_until_something_is_sent(
    state: FleetState, sent: bool
) -> None:
    verified = InDoubt("a", "push-1", "resume", False, True, digest="weights", version="v2")
    put_in_doubt(state, {"a": verified})
    put_in_doubt(state, {"a": InDoubt("a", "push-2", "update" if sent else "pause", sent, True)})
    assert in_doubt(state)["a"].version == ("" if sent else "v2")
    assert in_doubt(state)["a"].digest == "weights"


def test_a_push_of_its_own_is_remembered_without_a_quarantine(state: FleetState) -> None:
    touch(state, "a")
    assert in_doubt(state)["a"].half_updated and in_doubt(state)["a"].thaw
    assert state.server("a").quarantine is None


def test_nothing_is_in_doubt_after_down(state: FleetState) -> None:
    touch(state, "a")
    state.forget_run()
    assert in_doubt(state) == {}


def test_a_server_that_left_the_fleet_is_not_in_doubt(state: FleetState) -> None:
    touch(state, "a")
    leave_to_next_push(state, "b")
    state.forget_server("a")
    assert in_doubt(state).keys() == {"b"}


def test_a_look_at_the_weights_touches_nothing_and_is_remembered(state: FleetState) -> None:
    looked = ["a:weighed=5f0c:tp2", "b:weighed=5f0c:tp2"]
    assert left(state, "preflight", *looked, "stage") == {}
    job = journaled(state, *looked, "pause", "a:pausing", dead=True)
    assert left_behind(job, state.journal.events(job.id)).keys() == {"a"}
    close_orphans(state)
    assert {name: one.digest for name, one in in_doubt(state).items()} == {"a": "5f0c:tp2"}
    later = InDoubt("a", "push-9", "pause", False, True, digest="of what the first one left")
    put_in_doubt(state, {"a": later})
    assert in_doubt(state)["a"].digest == "5f0c:tp2"

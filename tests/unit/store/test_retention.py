"""History stays within its bounds, and keeps what recovery and rollback need."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from skyctl.fleetfile.sections import HistorySection
from skyctl.store.database import Retention
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.in_doubt import InDoubt, put_in_doubt
from skyctl.store.journal import RECENT, JobEvent, JobState
from skyctl.store.kept_weights import KeptWeights, remember
from skyctl.store.state import FleetState

RESULT = {"servers": [{"server": f"a-{n}", "padding": "x" * 700} for n in range(8)]}
"""As large as the result of a push into 8 servers."""


def in_memory(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None)


def push(state: FleetState, version: str, result: dict[str, Any] = RESULT) -> str:
    """What a push into 8 servers leaves on record, but for some of its events."""
    job = state.journal.begin("push", {"checkpoint": "/c", "padding": "x" * 900})
    with state.transaction():
        for number in range(8):
            state.journal.add_events(job.id, JobEvent.server(f"a-{number}", "ready"))
        state.journal.record_push(
            job.id, ok=True, version=version, checkpoint="/c", checkpoint_digest="d", result=result
        )
        state.add_event("fleet", f"{job.id}: weights {version}, frozen for 100 ms")
        state.journal.end(job.id, "succeeded", result=result)
    return job.id


def size(state: FleetState) -> int:
    pages, of = (state.row(f"PRAGMA {name}") for name in ("page_count", "page_size"))
    assert pages is not None and of is not None
    return int(pages[0]) * int(of[0])


def count(state: FleetState, table: str) -> int:
    row = state.row(f"SELECT count(*) FROM {table}")
    assert row is not None
    return int(row[0])


_BATCH = 1000
_AGAIN = [
    f"WITH RECURSIVE more (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more WHERE n < {_BATCH}) "
    + statement
    for statement in (
        """INSERT INTO jobs (kind, state, done_bytes, total_bytes, request, created_at, finished_at,
        result, owner) SELECT kind, state, done_bytes, total_bytes, request, created_at,
        finished_at, result, owner FROM more, jobs WHERE number = (SELECT max(number) FROM jobs)""",
        """INSERT INTO job_events (job, at, kind, data, server) SELECT job + n, at, kind, data,
        server FROM more, job_events WHERE job = (SELECT max(job) FROM job_events)""",
        """INSERT INTO pushes (job, at, ok, version, checkpoint, checkpoint_digest, result)
        SELECT 'push-' || (number + n), at, ok, 'v' || (number + n), checkpoint, checkpoint_digest,
        result FROM more, pushes WHERE number = (SELECT max(number) FROM pushes)""",
        """INSERT INTO events (at, subject, message)
        SELECT at, subject, message FROM more, (SELECT * FROM events LIMIT 1)""",
    )
]
"""Pushes like the latest one."""


def test_a_hundred_thousand_pushes_take_no_more_room_than_some_thousand(tmp_path: Path) -> None:
    """A push a minute for ten weeks; then it is the same for every further year."""
    sizes: list[int] = []
    with FleetState(tmp_path / "fleet" / "state.sqlite", connect=in_memory) as state:
        for number in range(_BATCH - 1):
            push(state, f"v{number}")
        push(state, "small", {"repeated": "quickly"})
        assert size(state) < 16 * 2**20
        for _ in range(100_000 // _BATCH - 1):
            for statement in _AGAIN:
                state.write(statement)
            state.prune()  # by itself after every 20th: then there is never this much
            sizes.append(size(state))
            assert count(state, "jobs") == count(state, "pushes") == 500
        assert max(sizes) < 16 * 2**20
        assert max(sizes) <= sizes[len(sizes) // 4] * 1.05
        assert state.journal.jobs()[0].id == "push-100000"
        assert set(state.journal.jobs()[0].servers) == {f"a-{n}" for n in range(8)}
        assert state.journal.pushes()[0].job == "push-100000"


def test_pushes_are_forgotten_as_new_ones_come(tmp_path: Path) -> None:
    with FleetState(tmp_path / "fleet" / "state.sqlite", connect=in_memory) as state:
        state.retention = Retention(pushes=60)
        for number in range(120):
            push(state, f"v{number}")
        assert 60 <= count(state, "jobs") <= 80 and 60 <= count(state, "pushes") <= 80


def test_lines_of_history_are_forgotten_as_new_ones_come(tmp_path: Path) -> None:
    with FleetState(tmp_path / "fleet" / "state.sqlite", connect=in_memory) as state:
        state.retention = Retention(events=1000)
        for number in range(10_000):
            state.add_event("a-0", f"line {number}")
        assert 1000 <= count(state, "events") <= 1500
        assert state.events(1)[0].message == "line 9999"


@pytest.fixture
def state(tmp_path: Path) -> FleetState:
    return FleetState(tmp_path / "fleet" / "state.sqlite", connect=in_memory)


def test_what_is_needed_is_kept_at_any_age(state: FleetState) -> None:
    state.retention = Retention(pushes=1, events=1, days=1.0)
    running = state.journal.begin("push", {}).id
    doubted = push(state, "half")
    put_in_doubt(state, {"a-0": InDoubt("a-0", doubted, "update", True, True)})
    for version in ("served", "fleet", "kept", "nobody's"):
        for _ in range(5):
            push(state, version)
    state.update_server("a-1", weight_version="served")
    state.set_weights(FleetWeights("fleet", "/c"))
    remember(state, KeptWeights("kept", "/k", "/c", "", "", "", 1, time.time()))
    for number in range(RECENT):
        push(state, f"v{number}")
    state.write("UPDATE jobs SET created_at = 0")
    state.write("UPDATE pushes SET at = 0")
    state.write("UPDATE events SET at = 0")
    state.add_event("fleet", "the latest")
    state.prune()
    assert state.journal.job(running).state == "running"
    assert state.journal.job(doubted).servers
    assert len(state.journal.jobs(1000)) == RECENT + 2
    versions = [push.version for push in state.journal.pushes(1000)]
    assert [versions.count(v) for v in ("served", "fleet", "kept")] == [3, 3, 3]
    assert versions.count("nobody's") == 0 and len(versions) == RECENT + 9
    assert [event.message for event in state.events()] == ["the latest"]
    kept = {row["job"] for row in state.rows("SELECT DISTINCT job FROM job_events")}
    assert len(kept) == RECENT + 1  # the one that runs has no events


def test_nothing_is_forgotten_that_is_neither_old_nor_too_much(state: FleetState) -> None:
    for number in range(RECENT + 10):
        push(state, f"v{number}")
    state.prune()
    assert count(state, "jobs") == count(state, "pushes") == RECENT + 10


def test_the_fleet_file_says_how_much() -> None:
    assert Retention(**HistorySection().model_dump()) == Retention()
    assert Retention(**HistorySection(pushes=7, events=8, days=9).model_dump()) == Retention(
        7, 8, 9.0
    )


def test_dry_runs_are_kept_beside_many_pushes_and_their_numbers_not_used_again(
    state: FleetState,
) -> None:
    state.retention = Retention(pushes=1)
    for number in range(RECENT + 30):
        push(state, f"v{number}")
    for number in range(1, RECENT + 41):
        job = state.journal.begin("dry-run", {})
        state.journal.end(job.id, JobState.SUCCEEDED, result=RESULT)
        assert job.id == f"dry-run-{number}"
        assert state.journal.job(job.id).ended
    state.prune()
    assert count(state, "jobs") == 2 * RECENT

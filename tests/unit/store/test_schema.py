"""State files of other versions: brought to this one, with a copy kept, unless they are in use."""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from skyctl.errors import StateUnwritable
from skyctl.store import unrecorded
from skyctl.store.identity import own_identity
from skyctl.store.in_doubt import InDoubt, in_doubt
from skyctl.store.schema import SCHEMA_VERSION, VERSIONS, upgrade
from skyctl.store.state import FleetState

DEAD = json.dumps({"pid": 1, "create_time": -1.0, "boot_id": "of another boot"})
ALIVE = json.dumps(own_identity().__dict__)


@pytest.fixture(autouse=True)
def nothing_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    unrecorded.LOST.clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "fleet"
    directory.mkdir(mode=0o700)
    return directory / "state.sqlite"


def write_version_2(path: Path, *, owner: str = DEAD) -> None:
    """As skyctl wrote it when lists of servers were JSON in `meta` and `jobs`."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(VERSIONS[2])
        connection.execute("PRAGMA user_version = 2")
        doubt = {"server": "a-0", "job": "push-7", "stage": "update", "half_updated": True}
        meta = {
            "weights_awake": json.dumps(["a-1", "a-2"]),
            "in_doubt": json.dumps([{**doubt, "thaw": False}]),
            "base_dir": "/here",
        }
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute("INSERT INTO servers VALUES ('a-1', 1, 2, 'v', '/c', 'd', 'w', NULL)")
        connection.execute(
            "INSERT INTO jobs VALUES (7, 'push', 'running', 'update', 1, 2, '{}', "
            """'{"a-0": {"state": "updating", "detail": ""}}', 1.0, NULL, NULL, NULL, ?)""",
            [owner],
        )
        for state in ("pausing", "updating"):
            data = json.dumps({"server": "a-0", "state": state, "detail": ""})
            connection.execute(
                "INSERT INTO job_events (job, at, kind, data) VALUES (7, 1.0, 'server', ?)", [data]
            )
        connection.execute(
            "INSERT INTO job_events (job, at, kind, data) "
            """VALUES (7, 1.0, 'stage', '{"stage": "update"}')"""
        )


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check_what_it_says(state: FleetState) -> None:
    row = state.server("a-1")
    assert (row.paused, row.sleep_level, row.weight_version) == (True, 2, "v")
    assert {row.name for row in state.servers() if row.weights_awake} == {"a-1", "a-2"}
    assert in_doubt(state) == {"a-0": InDoubt("a-0", "push-7", "update", True, False, False)}
    job = state.journal.job("push-7")
    assert job.stage == "update"
    assert job.servers == {"a-0": {"state": "updating", "detail": ""}}
    assert [event.kind for event in state.journal.events(job.id)] == ["server", "server", "stage"]
    assert state.get("base_dir") == "/here" and state.get("in_doubt") is None


def test_an_older_file_is_migrated_and_a_copy_of_it_kept(path: Path) -> None:
    write_version_2(path)
    with FleetState(path) as state:
        check_what_it_says(state)
        assert state.journal.begin("push", {}).id == "push-8"
    assert version(path) == SCHEMA_VERSION
    copy = path.with_name("state.sqlite.version-2")
    assert version(copy) == 2 and copy.stat().st_mode & 0o077 == 0


def test_a_migrated_file_has_the_tables_of_a_new_one(path: Path, tmp_path: Path) -> None:
    write_version_2(path)
    with FleetState(path) as old, FleetState(tmp_path / "new" / "state.sqlite") as new:
        tables = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        assert [row["sql"] for row in old.rows(tables)] == [row["sql"] for row in new.rows(tables)]


def test_a_migration_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version_2(path)
    monkeypatch.setitem(VERSIONS, 3, f"{VERSIONS[3]}CREATE TABLE servers (twice)")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.OperationalError, match="already exists"):
            upgrade(connection, path)
        columns = [row[1] for row in connection.execute("PRAGMA table_info(servers)")]
    assert version(path) == 2 and "weights_awake" not in columns


@pytest.mark.parametrize("user", ["a supervisor", "a push"])
def test_a_file_that_an_older_skyctl_uses_is_read_and_left_alone(path: Path, user: str) -> None:
    write_version_2(path, owner=ALIVE if user == "a push" else DEAD)
    lock = path.with_name("supervisor.lock").open("w")
    if user == "a supervisor":
        fcntl.flock(lock, fcntl.LOCK_EX)
    with FleetState(path) as state:
        check_what_it_says(state)
        with pytest.raises(StateUnwritable, match="older skyctl") as refused, state.durable():
            pytest.fail("nothing is begun")
        assert "skyctl recover" in refused.value.hint or "wait" in refused.value.hint
        state.add_event("fleet", "only in memory")
        assert version(path) == 2
        lock.close()
        if user == "a supervisor":
            assert state.complete()
    assert version(path) == (SCHEMA_VERSION if user == "a supervisor" else 2)


def test_the_supervisor_itself_migrates_under_its_own_lock(path: Path) -> None:
    write_version_2(path)
    with path.with_name("supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with FleetState(path, owner=True) as state:
            check_what_it_says(state)
    assert version(path) == SCHEMA_VERSION

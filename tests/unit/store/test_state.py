"""The state file: versioned, private, and the same for all who have it open."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import psutil
import pytest

from skyctl.errors import ConflictError, NotFoundError, SkyctlError
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.identity import ProcessIdentity, boot_id, own_identity
from skyctl.store.journal import JobEvent
from skyctl.store.processes import ProcessRow
from skyctl.store.schema import SCHEMA_VERSION
from skyctl.store.state import FleetState


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet" / "state.sqlite"


def row(name: str = "a-0", **changes: object) -> ProcessRow:
    fields: dict[str, object] = {
        "name": name,
        "role": "server",
        "phase": "intended",
        "token": "t",
        "identity": None,
        "spec_hash": "h",
        "host": "127.0.0.1",
        "port": 8000,
    }
    return ProcessRow(**{**fields, **changes})  # type: ignore[arg-type]


def test_what_was_written_is_read_back_by_another_connection(path: Path) -> None:
    own = own_identity()
    with FleetState(path) as state:
        state.save_process(row(identity=own, gpus=(1, 2), descendants=(own,), phase="running"))
        state.update_server("a-0", paused=True, weight_version="v1")
        state.set_weights(FleetWeights("v1", "/ckpt", "digest"))
    with FleetState(path) as state:
        found = state.process("a-0")
        assert found is not None
        assert (found.identity, found.gpus, found.descendants) == (own, (1, 2), (own,))
        assert state.server("a-0").intended == "paused"
        assert state.weights() == FleetWeights("v1", "/ckpt", "digest")


def test_the_directory_and_the_files_are_private(path: Path) -> None:
    with FleetState(path) as state:
        state.set("key", "value")
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_symlinked_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SkyctlError, match="not a plain directory"):
        FleetState(tmp_path / "link" / "state.sqlite")


def test_a_symlinked_file_is_refused(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SkyctlError, match="cannot open"):
        FleetState(path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("or_memory", [False, True])
def test_a_file_of_another_version_is_refused_and_left_alone(path: Path, or_memory: bool) -> None:
    FleetState(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(SkyctlError, match="written by another skyctl") as refused:
        FleetState(path, or_memory=or_memory)
    assert f"skyctl down; or remove what it recorded: rm -r {path.parent}" in refused.value.hint
    assert [p.name for p in path.parent.iterdir() if "corrupt" in p.name] == []
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION + 1,)


def test_a_corrupt_file_is_kept_aside_and_recreated(path: Path) -> None:
    FleetState(path).close()
    path.write_bytes(b"this is no database" * 100)
    warnings: list[str] = []
    with FleetState(path, warn=warnings.append) as state:
        assert state.processes() == []
    kept = [p for p in path.parent.iterdir() if ".corrupt-" in p.name]
    assert len(kept) == 1 and kept[0].read_bytes().startswith(b"this is no database")
    assert len(warnings) == 1 and kept[0].name in warnings[0]


async def test_a_held_lock_names_its_holder(path: Path) -> None:
    holder = rf"push-3 \(pid {os.getpid()}, for "
    with FleetState(path) as state:
        async with state.locks.hold("turn", "push-3", wait_s=0.0):
            with pytest.raises(ConflictError, match=holder):
                state.locks.take("turn", "another")
    with FleetState(path) as state:
        assert state.locks.holders("turn") == []


def test_an_identity_does_not_match_another_process_with_its_pid() -> None:
    own = own_identity()
    assert own.alive()
    assert not ProcessIdentity(own.pid, own.create_time - 5, own.boot_id).alive()
    assert not ProcessIdentity(own.pid, own.create_time, "another boot").alive()
    assert boot_id() == own.boot_id


def test_an_identity_outlives_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil adds a boot time that moves with the clock: then everything would seem dead."""
    identity = own_identity()
    said = psutil.Process.create_time

    def after_the_clock_was_set(process: psutil.Process) -> float:
        return said(process) - 1.0

    monkeypatch.setattr(psutil.Process, "create_time", after_the_clock_was_set)
    assert identity.alive()
    assert own_identity() == identity


def test_events_of_a_job_are_read_from_where_one_left_off(path: Path) -> None:
    with FleetState(path) as state:
        job = state.journal.begin("push", {})
        state.journal.add_events(job.id, JobEvent.stage("pause"))
        first = state.journal.events(job.id)
        state.journal.add_events(job.id, JobEvent.note("hello"))
        state.journal.end(job.id, "succeeded", result={"version": "v"})
        later = state.journal.events(job.id, after=first[-1].sequence)
        assert [event.kind for event in first + later] == ["stage", "note", "end"]
        assert state.journal.job(job.id).result == {"version": "v"}


def test_jobs_are_listed_by_their_numbers_though_the_clock_was_set_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((1000.0, 1001.0, 1002.0, 400.0, 401.0))
    monkeypatch.setattr("skyctl.store.journal.time.time", lambda: next(times))
    with FleetState(path) as state:
        for kind in ("push", "dry-run", "push", "push", "dry-run"):
            state.journal.begin(kind, {})
        listed = [job.id for job in state.journal.jobs()]
        pushes = [name for name in listed if name.startswith("push")]
        assert pushes == ["push-3", "push-2", "push-1"]
        assert listed.index("dry-run-2") < listed.index("dry-run-1")
        assert state.journal.jobs(1)[0].id == "push-3"


@pytest.mark.parametrize(
    "job_id", ["push-9", "9", "", "other-1", "push-" + "9" * 30, "push-" + "9" * 5000]
)
def test_an_unknown_job_is_not_found(path: Path, job_id: str) -> None:
    with FleetState(path) as state:
        state.journal.begin("push", {})
        with pytest.raises(NotFoundError, match="no job"):
            state.journal.job(job_id)


def test_text_that_is_no_utf8_is_put_on_record_as_far_as_it_goes(path: Path) -> None:
    broken = os.fsdecode(b"/runs/\xff")  # so a path may be; or a server's error message
    with FleetState(path) as state:
        job = state.journal.begin("push", {"checkpoint": broken})
        state.add_event("fleet", f"{broken} \N{CHECK MARK}")
        state.update_server("a", checkpoint=broken)
        state.journal.end(job.id, "failed")
        assert state.events()[-1].message == "/runs/? \N{CHECK MARK}"
        assert state.server("a").checkpoint == "/runs/?"
        assert state.journal.job(job.id).request == {"checkpoint": broken}


def test_forgetting_a_run_keeps_the_history(path: Path) -> None:
    with FleetState(path) as state:
        state.save_process(row())
        state.update_server("a-0", weight_version="v")
        state.set_weights(FleetWeights("v", "c"))
        state.journal.record_push(
            "push-1", ok=True, version="v", checkpoint="c", checkpoint_digest=None, result={}
        )
        state.expected.launched("a", "files:of this run")  # another server may get the name
        state.forget_run()
        assert state.expected.launches() == {}
        assert (state.processes(), state.servers(), state.weights()) == ([], [], FleetWeights())
        assert [push.version for push in state.journal.pushes()] == ["v"]

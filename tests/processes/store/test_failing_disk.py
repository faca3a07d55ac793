"""A state file on real file systems that are full or read-only, and after processes that died."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from skyctl.errors import StateUnwritable
from skyctl.store import unrecorded
from skyctl.store.journal import JobEvent
from skyctl.store.state import FleetState
from tests.unit.store.disks import BIG, FailingDisk, failing_disk, fill, mounted, remount


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet" / "state.sqlite"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    return failing_disk(monkeypatch)


@pytest.mark.parametrize("before", ["", "in a transaction"])
def test_what_was_begun_has_room_to_end_on_a_disk_that_fills_up(
    tmp_path: Path, disk: FailingDisk, before: str
) -> None:
    with mounted(tmp_path / "small", "8m") as directory:
        path = directory / "fleet" / "state.sqlite"
        with FleetState(path) as state, FleetState(path) as other:
            job = state.journal.begin("push", {})
            filler = fill(directory)
            for number in range(20):  # as long as what is free in files suffices, and longer
                with state.transaction() if before else nullcontext():
                    state.journal.add_events(job.id, JobEvent.stage(f"stage {number}"))
                    state.journal.add_events(job.id, JobEvent.note(BIG[:20_000]))
            state.journal.end(job.id, "succeeded")
            assert state.unrecorded is None
            assert other.journal.job(job.id).state == "succeeded"
            assert len(other.journal.events(job.id)) == 41
            with pytest.raises(StateUnwritable, match="No space"):
                state.journal.begin("push", {})
            filler.unlink()
            state.journal.begin("push", {})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small") as directory:
        yield directory


_DIES = (
    "import os, sys; from pathlib import Path; from skyctl.store.state import FleetState\n"
    "s = FleetState(Path(sys.argv[1])); s.update_server('a-0', quarantine='why'); os._exit(0)"
)


@pytest.mark.parametrize("left", ["closed", "killed", "killed and no -shm"])
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_file_on_a_failing_disk_is_read_and_completed(
    small_disk: Path, disk: FailingDisk, left: str, fault: str
) -> None:
    path = small_disk / "fleet" / "state.sqlite"
    if left == "closed":
        with FleetState(path) as state:
            state.update_server("a-0", quarantine="why")
    else:
        subprocess.run([sys.executable, "-c", _DIES, str(path)], check=True)
        assert path.with_name(f"{path.name}-wal").stat().st_size > 0
    if left == "killed and no -shm":
        path.with_name(f"{path.name}-shm").unlink()
    filler = fill(small_disk) if fault == "full" else remount(small_disk, "ro")
    with FleetState(path) as state:
        assert state.server("a-0").quarantine == "why"
        for number in range(10):
            state.update_server("a-0", paused=True)
            state.add_event("fleet", f"{number}{BIG[:10_000]}")
        assert state.unrecorded is not None
        with pytest.raises(StateUnwritable):
            state.journal.begin("push", {"checkpoint": BIG})
        if filler is not None:
            filler.unlink()
        else:
            remount(small_disk, "rw")
        assert state.complete()
    with FleetState(path) as state:
        assert state.server("a-0").paused and state.server("a-0").quarantine == "why"
        assert len(state.events()) == 10


def test_a_state_that_was_never_there_begins_in_memory_on_a_full_disk(
    small_disk: Path, disk: FailingDisk
) -> None:
    filler = fill(small_disk)
    path = small_disk / "fleet" / "state.sqlite"
    with FleetState(path) as state:
        state.update_server("a-0", paused=True)
        assert state.server("a-0").paused
        filler.unlink()
    with FleetState(path) as state:
        assert state.server("a-0").paused
    assert unrecorded.LOST == []

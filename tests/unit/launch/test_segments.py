"""Shared memory of CPU ranks is removed with the processes that had it mapped, and no other."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.launch.local.host import sweep_scratch
from skyctl.launch.local.segments import mapped_by, remove, remove_left
from skyctl.store.paths import FleetPaths

OURS = "vllm_dist_0a1b-tp:0-[0-1]-cpushm_0"
MAPS = """\
7f00-7f01 rw-s 00000000 00:1a {inode}                     /dev/shm/{name}
7f02-7f03 rw-s 00000000 00:1a 77                         /dev/shm/psm_1234
7f04-7f05 rw-s 00000000 00:1a 78                         /dev/shm/gone-cpushm_1 (deleted)
7f06-7f07 r-xp 00000000 fe:00 79                         /usr/lib/x-cpushm_1
7f08-7f09 rw-p 00000000 00:00 0
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Stands in for /dev/shm."""
    directory = tmp_path / "shm"
    directory.mkdir()
    for name in (OURS, "vllm_dist_ffff-tp:0-[0-1]-cpushm_0", "vllm_dist_0a1b-other", "psm_1234"):
        (directory / name).touch()
    return directory


def remaining(shared: Path) -> set[str]:
    return {path.name for path in shared.iterdir()}


def test_what_a_process_had_mapped_is_removed(tmp_path: Path, shared: Path) -> None:
    before, inode = remaining(shared), (shared / OURS).stat().st_ino
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").write_text(MAPS.format(inode=inode, name=OURS))
    mapped = mapped_by([7, 8], proc=tmp_path)  # there is no process 8 any more
    assert mapped == {(OURS, inode)}
    remove(mapped, root=shared)
    remove(mapped, root=shared)
    assert remaining(shared) == before - {OURS}


def test_a_name_that_another_file_has_now_is_left_alone(shared: Path) -> None:
    remove([(OURS, (shared / OURS).stat().st_ino + 1)], root=shared)
    assert OURS in remaining(shared)


def test_rendezvous_files_of_the_fleet_tell_what_is_left(tmp_path: Path, shared: Path) -> None:
    before, scratch = remaining(shared), tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "vllm_dist_0a1b").touch()
    remove_left(scratch, root=shared)
    assert remaining(shared) == before - {OURS}


def test_who_has_removed_the_rendezvous_files_meanwhile_has_removed_what_they_tell(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: Path) -> None:
        raise FileNotFoundError(path)

    before = remaining(shared)
    monkeypatch.setattr(os, "scandir", gone)
    remove_left(tmp_path, root=shared)
    monkeypatch.undo()
    assert remaining(shared) == before


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/vllm_dist_test{os.getpid()}-tp:0-[0-1]-cpushm_0")
    yield path
    path.unlink(missing_ok=True)


def test_the_end_of_a_fleet_removes_what_its_rendezvous_files_tell(
    tmp_path: Path, segment: Path
) -> None:
    paths = FleetPaths(tmp_path, "f")
    paths.scratch.mkdir(parents=True)
    segment.write_bytes(b"\0" * mmap.PAGESIZE)
    (paths.scratch / segment.name.partition("-")[0]).touch()
    sweep_scratch(paths)
    assert not segment.exists() and not paths.scratch.exists()

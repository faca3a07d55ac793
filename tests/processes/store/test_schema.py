"""Migrations among processes, and on a disk that is read-only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.store.state import FleetState
from tests.unit.store.disks import mounted, remount
from tests.unit.store.test_schema import check_what_it_says, version, write_version_2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "fleet"
    directory.mkdir(mode=0o700)
    return directory / "state.sqlite"


_OPENS = (
    "import sys; from pathlib import Path; from skyctl.store.state import FleetState\n"
    "with FleetState(Path(sys.argv[1])) as state:\n"
    "    print([row.name for row in state.servers() if row.weights_awake])"
)


def test_of_processes_that_migrate_at_once_each_finds_it_done(path: Path) -> None:
    write_version_2(path)
    command = [sys.executable, "-c", _OPENS, str(path)]
    openers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [opener.communicate(timeout=60)[0] for opener in openers] == ["['a-1', 'a-2']\n"] * 4
    assert version(path.with_name("state.sqlite.version-2")) == 2


def test_an_older_file_on_a_read_only_disk_is_read(tmp_path: Path) -> None:
    with mounted(tmp_path / "small") as directory:
        path = directory / "state.sqlite"
        write_version_2(path)
        remount(directory, "ro")
        with FleetState(path) as state:
            check_what_it_says(state)
        assert version_of_copy(path) == 2


def version_of_copy(path: Path) -> int:
    """Without the files that SQLite would make beside it."""
    return int.from_bytes(path.read_bytes()[60:64], "big")

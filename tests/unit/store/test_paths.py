"""Nobody else can read, redirect or stand in for a fleet's directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from skyctl.errors import SkyctlError, UsageError
from skyctl.store.paths import FleetPaths, create_private_file, private_directory, state_root
from skyctl.supervisor.interface import SupervisorClient


def test_every_directory_of_a_fleet_is_ours_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        paths = FleetPaths(tmp_path / "home", "demo").prepare()
    finally:
        os.umask(before)
    for path in (paths.root, paths.root / "fleets", paths.directory, paths.logs):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_a_directory_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o777)
    private_directory(tmp_path / "open")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "level", ["home", "home/fleets", "home/fleets/demo", "home/fleets/demo/logs"]
)
def test_a_symlink_anywhere_in_it_is_refused(tmp_path: Path, level: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / level
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SkyctlError, match="not a plain directory"):
        FleetPaths(tmp_path / "home", "demo").prepare()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = FleetPaths(tmp_path / "home", "demo").prepare()
    own = os.getuid()
    monkeypatch.setattr("skyctl.store.paths.os.getuid", lambda: own + 1)
    with pytest.raises(SkyctlError, match=f"belongs to uid {own}, not to you"):
        paths.prepare()
    with pytest.raises(SkyctlError, match="not to you"):
        SupervisorClient.on_this_machine(paths)


async def test_a_socket_in_somebody_elses_directory_is_not_talked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is too long for a socket: it lies in /tmp, open to all."""
    monkeypatch.setattr("skyctl.store.paths._EVERYBODYS", tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    paths = FleetPaths(tmp_path / ("long" * 30), "demo")
    assert paths.socket.is_relative_to(tmp_path / "tmp")
    async with SupervisorClient.on_this_machine(paths):
        pass  # nothing there: the fleet is down
    (tmp_path / "theirs").mkdir()
    paths.socket.parent.symlink_to(tmp_path / "theirs")
    with pytest.raises(SkyctlError, match="not a plain directory"):
        SupervisorClient.on_this_machine(paths)


def test_a_private_file_is_neither_shared_nor_redirected(tmp_path: Path) -> None:
    os.close(create_private_file(tmp_path / "file"))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(SkyctlError, match="cannot open"):
        create_private_file(tmp_path / "link")


def test_every_process_finds_the_socket_whatever_its_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = FleetPaths(Path("/var") / ("long" * 30), "demo")
    found = paths.socket, paths.scratch
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert (paths.socket, paths.scratch) == found


@pytest.mark.parametrize("depth", [1, 12])
def test_a_socket_with_a_long_name_fits_into_the_scratch_directory(
    depth: int,
) -> None:
    root = Path("/var").joinpath(*["directory"] * depth)
    paths = FleetPaths(root, "demo")
    assert len(os.fsencode(paths.scratch / ("x" * 36))) <= 107  # what a Unix socket may be named
    assert paths.scratch != FleetPaths(root, "other").scratch


def test_a_state_directory_whose_path_is_not_utf8_is_refused() -> None:
    """Else `up` would succeed, and `down` could not read the fleet's own copy of its file."""
    with pytest.raises(UsageError, match="not UTF-8") as failure:
        state_root({"SKYCTL_HOME": os.fsdecode(b"/srv/caf\xe9")})
    failure.value.message.encode()

"""Which fleet a command is about, and where it lives on disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from skyctl.core.registry import (
    FleetRef,
    base_dir_of,
    find,
    keep_applied,
    kept_files,
    known_fleets,
    refuse_another_file,
    remember,
    select,
    select_paths,
)
from skyctl.errors import ConflictError, FleetFileError, NotFoundError, UsageError
from skyctl.service import connect
from skyctl.store.paths import LONGEST_SOCKET_PATH_BYTES, FleetPaths, fleet_paths, state_root
from skyctl.store.state import FleetState


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, and a state root of its own."""
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def write(directory: Path, name: str, extra: str = "") -> Path:
    directory.mkdir(exist_ok=True)
    file = directory / "fleet.yaml"
    file.write_text(f"name: {name}\nservers: [http://127.0.0.1:1]\n{extra}")
    return file


def keep(ref: FleetRef) -> None:
    remember(ref)


def test_the_state_root_follows_the_environment() -> None:
    assert state_root({"SKYCTL_HOME": "/s"}) == Path("/s")
    assert state_root({"XDG_STATE_HOME": "/x"}) == Path("/x/skyctl")
    assert state_root({}) == Path.home() / ".local/state/skyctl"


def test_a_long_path_puts_the_socket_elsewhere(tmp_path: Path) -> None:
    short, long = FleetPaths(Path("/s"), "a"), FleetPaths(tmp_path / ("x" * 120), "a")
    assert short.socket.parent == short.directory
    assert len(str(long.socket)) <= LONGEST_SOCKET_PATH_BYTES
    assert long.socket != FleetPaths(tmp_path / ("y" * 120), "a").socket


def test_without_a_file_and_without_fleets_one_is_told_how_to_begin(here: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        select(None, None)
    assert "skyctl init" in caught.value.hint


def test_the_file_here_is_taken_and_a_given_file_wins_over_it(here: Path, tmp_path: Path) -> None:
    write(here, "local")
    assert select(None, None).name == "local"
    assert select([write(tmp_path / "other", "other")], None).name == "other"


def test_a_remembered_fleet_is_found_by_name_and_when_it_is_the_only_one(
    here: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "project", "known")
    keep(select([file], None))
    assert known_fleets() == ["known"]
    assert select(None, "known").file == file
    assert select(None, None).name == "known"
    write(here, "local")
    assert select(None, "known").name == "known"


def test_a_fleet_whose_first_up_was_refused_is_not_known(here: Path, tmp_path: Path) -> None:
    paths = FleetPaths(state_root(), "refused")
    paths.prepare()
    with FleetState(paths.database):
        pass
    assert known_fleets() == []
    with pytest.raises(NotFoundError, match="no fleet named 'refused'"):
        select(None, "refused")


def test_several_known_fleets_are_listed(here: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        keep(select([write(tmp_path / name, name)], None))
    with pytest.raises(UsageError) as caught:
        select(None, None)
    assert "one, two" in caught.value.hint
    with pytest.raises(NotFoundError) as missing:
        select(None, "three")
    assert "one, two" in missing.value.hint


def test_fleets_that_run_are_listed_first_and_those_that_are_down_as_such(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    files = []
    for name in ("a-down", "b-up", "c-up"):
        files.append(write(tmp_path / name, name))
        files[-1].write_text(f"name: {name}\nmodel: {tmp_path / 'model'}\n")
    for file in (*files, write(tmp_path / "attached", "attached")):
        ref = select([file], None)
        remember(ref)
    with contextlib.ExitStack() as held:
        for name in ("b-up", "c-up"):
            lock = held.enter_context(fleet_paths(name).supervisor_lock.open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError) as caught:
            select(None, None)
    assert "--fleet: b-up, c-up; attached: attached; down: a-down;" in caught.value.hint


def test_a_fleet_whose_file_is_gone_is_known_by_its_copy(here: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "project", "known")
    keep(select([file], None))
    file.unlink()
    found = select(None, "known")
    assert found.file is None
    assert found.base_dir == tmp_path / "project"
    assert found.config.servers == ["http://127.0.0.1:1"]


def test_what_relative_paths_were_relative_to_stays_when_a_link_on_the_way_moves(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "current").symlink_to(tmp_path / "one")
    write(tmp_path / "one", "known")
    write(tmp_path / "two", "known")
    ref = select([tmp_path / "current" / "fleet.yaml"], None)
    keep(ref)
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to(tmp_path / "two")
    assert base_dir_of(ref) == tmp_path / "one"


@pytest.mark.parametrize("text", ["name: known\nservers: [http://127.0.0.1:1]\n", "name: ["])
def test_a_second_file_of_an_attached_fleets_name_is_refused(
    here: Path, tmp_path: Path, text: str
) -> None:
    first = write(tmp_path / "project", "known")
    keep(select([first], None))
    second = select([write(tmp_path / "copy", "known")], None)
    first.write_text(text)  # perhaps it is being edited
    with pytest.raises(ConflictError, match=f"known is attached already, from {first}") as refused:
        refuse_another_file(second)
    assert refused.value.hint.endswith("--fleet known")
    refuse_another_file(select([first], "known"))


@pytest.mark.parametrize("became", ["moved", "another fleet's"])
def test_the_file_of_an_attached_fleet_may_move(here: Path, tmp_path: Path, became: str) -> None:
    first = write(tmp_path / "project", "known")
    keep(select([first], None))
    second = write(tmp_path / "moved", "known")
    if became == "moved":
        first.unlink()
    else:
        write(tmp_path / "project", "other")
    refuse_another_file(select([second], None))


@pytest.mark.parametrize("change", ["copied", "moved", "down", "out of reach"])
def test_a_second_file_of_a_running_fleets_name_is_refused_while_the_first_exists(
    here: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    first, second = tmp_path / "project" / "fleet.yaml", here / "fleet.yaml"
    for file in (first, second):
        file.write_text("name: lab\nmodel: x\n")
    remember(select([first], None))
    if change == "moved":
        first.unlink()
    if change == "out of reach":
        monkeypatch.setattr(Path, "samefile", Mock(side_effect=PermissionError))
    with contextlib.ExitStack() as stack:
        if change != "down":
            lock = stack.enter_context(fleet_paths("lab").supervisor_lock.open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        connect(select(None, "lab"))  # by its name, from anywhere
        if change != "copied":
            connect(select(None, None))
            return
        with pytest.raises(ConflictError, match=f"lab is up already, from {first}") as refused:
            connect(select(None, None))
    assert refused.value.hint.endswith("--fleet lab")


def test_a_kept_file_of_a_running_fleet_is_not_another_file(here: Path) -> None:
    """`rollout undo` applies it."""
    (here / "fleet.yaml").write_text("name: lab\nmodel: x\n")
    ref = select(None, None)
    remember(ref)
    keep_applied(ref.paths, (here / "fleet.yaml").read_bytes())
    with ref.paths.supervisor_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (kept,) = kept_files(ref)
        connect(kept)


def test_a_fleet_whose_file_broke_is_known_by_its_copy(here: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "project", "known")
    keep(select([file], None))
    file.write_text("name: [")
    assert select(None, "known").name == "known"
    assert select_paths(None, "known").name == "known"
    with pytest.raises(FleetFileError):
        select([file], None)


def test_the_file_of_a_fleet_that_is_up_from_it_is_read_by_those_who_need_it(
    here: Path, tmp_path: Path
) -> None:
    (here / "model").mkdir()
    file = here / "fleet.yaml"
    file.write_text("name: lab\nmodel: ./model\n")
    remember(select(None, None))
    assert select(None, None).loaded is not None  # it is down
    with fleet_paths("lab").supervisor_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for ref in (select(None, None), select([file], None), select(None, "lab")):
            assert (ref.name, ref.file, ref.base_dir) == ("lab", file, here)
            assert ref.loaded is None and not ref.attached
            assert ref.config.model == "./model"
        text = file.read_text()
        file.write_text(text + "replicas: 0\n")
        with pytest.raises(FleetFileError, match="replicas"):
            select(None, None)
        file.write_text(text + "x-by: ${USER:-me}\n")
        remember(select(None, None))
        assert select(None, None).loaded is not None  # the environment may be another one
        write(here, "lab")
        remember(select(None, None))
        assert select(None, None).attached


def test_variables_are_not_expanded_in_the_copy(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_PORT", "4242")
    file = tmp_path / "project" / "fleet.yaml"
    file.parent.mkdir()
    file.write_text("name: known\nservers: ['http://127.0.0.1:${SECRET_PORT}']\n")
    ref = select([file], None)
    assert ref.config.servers == ["http://127.0.0.1:4242"]
    keep(ref)
    assert "4242" not in ref.paths.fleet_file.read_text()


def test_a_fleets_url_that_cannot_be_parsed_is_a_wrong_argument() -> None:
    with pytest.raises(UsageError, match="is not a URL"):
        find(None, "https://[::1")


def test_a_password_in_a_fleets_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        find(None, "https://me:s3cret@h:1")
    assert "--token-file" in caught.value.hint and "s3cret" not in caught.value.message


def test_a_fleet_file_may_come_through_a_pipe(here: Path) -> None:
    """`-f <(…)`: it can be read only once."""
    reader, writer = os.pipe()
    os.write(writer, b"name: piped\nservers: ['http://127.0.0.1:1']\n")
    os.close(writer)
    try:
        assert select([Path(f"/dev/fd/{reader}")], None).name == "piped"
    finally:
        os.close(reader)


def test_several_files_are_remembered_merged_and_found_by_name(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    base, prod = project / "fleet.yaml", project / "prod.yaml"
    base.write_text("name: known\nmodel: ./m\nenv: {TOKEN: '${TOKEN}', MODE: a}\n")
    prod.write_text("env: {MODE: b}\n")
    (project / ".env").write_text("TOKEN=s3cret\n")
    ref = select([base, prod], None)
    keep(ref)
    env = {"TOKEN": "s3cret", "MODE": "b"}
    assert ref.config.env == env and ref.file == base
    kept = [*ref.paths.directory.rglob("*")]
    assert kept and not any(b"s3cret" in file.read_bytes() for file in kept if file.is_file())
    assert select(None, "known").files == (base, prod)
    prod.unlink()
    ref = select(None, "known")  # from skyctl's copy, with the variables of the same directory
    assert ref.config.env == env and ref.file is None and ref.base_dir == project
    keep(select([base], None))
    prod.touch()
    assert select(None, "known").files == (base,)


def test_the_file_here_is_meant_with_those_that_override_it_while_its_fleet_is_up(
    here: Path,
) -> None:
    (here / "fleet.yaml").write_text("name: lab\nmodel: x\n")
    (here / "prod.yaml").write_text("replicas: 3\n")
    keep(select([Path("fleet.yaml"), Path("prod.yaml")], None))
    assert select(None, None).config.replicas == 1
    with fleet_paths("lab").supervisor_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert select(None, None).config.replicas == 3
        assert select([Path("fleet.yaml")], None).config.replicas == 1
        (here / "prod.yaml").unlink()
        assert select(None, None).config.replicas == 1


def test_what_comes_through_a_pipe_is_remembered_as_it_was_read(here: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"name: piped\nmodel: ./m\n")
    os.close(writer)
    try:
        keep(select([Path(f"/dev/fd/{reader}")], None))
    finally:
        os.close(reader)
    ref = select(None, "piped")
    assert (ref.config.model, ref.files, ref.base_dir) == ("./m", (), here)

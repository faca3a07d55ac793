"""A fleet's secrets on disk: made once, ours alone, and never shown."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from skyctl.errors import SkyctlError
from skyctl.store.credentials import AT_SPAWN, Credentials, ensure_credentials, read_secret
from skyctl.store.paths import FleetPaths


@pytest.fixture
def paths(tmp_path: Path) -> FleetPaths:
    return FleetPaths(tmp_path / "home", "demo").prepare()


def test_they_are_made_once_and_kept(paths: FleetPaths) -> None:
    first = ensure_credentials(paths)
    assert ensure_credentials(paths) == first
    assert first.control != first.inference
    assert min(len(first.control), len(first.inference)) == 64
    assert read_secret(paths.control_token) == first.control
    for path in (paths.control_token, paths.api_key):
        assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in paths.directory.iterdir()) == ["api.key", "control.token", "logs"]


def test_two_that_make_them_at_once_end_with_the_same(paths: FleetPaths) -> None:
    found: list[Credentials] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_credentials(paths))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_they_show_in_no_repr() -> None:
    made = Credentials("c" * 64, "i" * 64)
    assert "ccc" not in repr(made) and "iii" not in repr(made)


def test_only_what_a_plan_left_open_is_filled_in() -> None:
    env = {"SKYCTL_CONTROL_TOKEN": AT_SPAWN, "VLLM_API_KEY": "own", "OTHER": AT_SPAWN}
    filled = Credentials("c" * 64, "i" * 64).fill(env, "VLLM_API_KEY")
    assert filled == {"SKYCTL_CONTROL_TOKEN": "c" * 64, "VLLM_API_KEY": "own", "OTHER": AT_SPAWN}
    assert Credentials("c", "i").fill({"A": "b"}, "KEY") == {"A": "b"}


def test_a_symlink_in_their_place_is_refused(paths: FleetPaths, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("e" * 64)
    elsewhere.chmod(0o600)
    paths.control_token.symlink_to(elsewhere)
    with pytest.raises(SkyctlError, match="cannot be opened"):
        ensure_credentials(paths)


def test_a_file_that_others_can_read_is_refused(paths: FleetPaths) -> None:
    ensure_credentials(paths)
    paths.api_key.chmod(0o640)
    with pytest.raises(SkyctlError, match="can be read by others") as caught:
        ensure_credentials(paths)
    assert "remove it" in caught.value.hint


def test_a_file_of_another_user_is_refused(
    paths: FleetPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_credentials(paths)
    own = os.getuid()
    monkeypatch.setattr("skyctl.store.credentials.os.getuid", lambda: own + 1)
    with pytest.raises(SkyctlError, match="belongs to uid"):
        read_secret(paths.control_token)


@pytest.mark.parametrize("text", ["", "short", "x" * 40 + " y", "\x00" * 64, "é" * 64])
def test_a_file_that_holds_no_secret_is_refused_and_not_quoted(
    paths: FleetPaths, text: str
) -> None:
    paths.control_token.write_text(text)
    paths.control_token.chmod(0o600)
    with pytest.raises(SkyctlError, match="does not hold a secret") as caught:
        read_secret(paths.control_token)
    assert not text or text not in str(caught.value)


def test_a_pipe_in_their_place_does_not_hang_the_reader(paths: FleetPaths) -> None:
    os.mkfifo(paths.control_token, 0o600)
    with pytest.raises(SkyctlError, match="is not a plain file"):
        read_secret(paths.control_token)


def test_a_directory_in_their_place_is_named(paths: FleetPaths) -> None:
    """As with `--token-file ~/demo`."""
    paths.api_key.mkdir()
    with pytest.raises(SkyctlError, match=r"api\.key is not a plain file"):
        read_secret(paths.api_key)


def test_there_is_none_before_the_first_up(paths: FleetPaths) -> None:
    assert read_secret(paths.control_token) is None

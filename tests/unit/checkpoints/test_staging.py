"""What keeps weights on disk, and what takes them away."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.checkpoints.staging import in_use, staged, sweep
from skyctl.errors import SkyctlError
from tests.unit.push.checkpoints import names_below


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Stands in for /dev/shm."""
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_weights_that_fit_go_to_memory_and_the_sweep_takes_them_away(
    tmp_path: Path, memory: Path
) -> None:
    home = tmp_path / "weights"
    with staged(home, needed_bytes=10, memory_root=memory) as live:
        (live / "a").write_bytes(b"1234567890")
        assert live.resolve().is_relative_to(memory)
        assert live.resolve().stat().st_mode & 0o077 == 0
        sweep(home, (), memory_root=memory)
        assert (live / "a").exists(), "swept while it was in use"
    sweep(home, (), memory_root=memory)
    assert names_below(home) == [] and names_below(memory) == []


@pytest.mark.parametrize("needed_bytes", [None, 1 << 60])
def test_weights_of_unknown_size_or_too_large_stay_out_of_memory(
    tmp_path: Path, memory: Path, needed_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if needed_bytes:
        with (
            pytest.raises(SkyctlError, match="do not fit"),
            staged(tmp_path / "weights", needed_bytes=needed_bytes, memory_root=memory),
        ):
            pass
    else:
        with staged(tmp_path / "weights", needed_bytes=None, memory_root=memory) as live:
            assert not live.is_symlink() and live.is_dir()
    sweep(tmp_path / "weights", (), memory_root=memory)
    assert names_below(tmp_path / "weights") == [] and names_below(memory) == []


@pytest.mark.parametrize("available", [None, 15])
def test_weights_that_a_containers_memory_cannot_hold_stay_out_of_it(
    tmp_path: Path, memory: Path, available: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.checkpoints.staging.available_memory", lambda: available)
    with staged(tmp_path / "weights", needed_bytes=15, memory_root=memory) as live:
        assert not live.is_symlink() and live.is_dir()
    monkeypatch.setattr("skyctl.checkpoints.staging.available_memory", lambda: 150)
    with staged(tmp_path / "weights", needed_bytes=15, memory_root=memory) as live:
        assert live.resolve().is_relative_to(memory)


def test_what_the_state_names_is_kept(tmp_path: Path, memory: Path) -> None:
    home = tmp_path / "weights"
    with staged(home, needed_bytes=1, memory_root=memory) as kept:
        (kept / "a").write_bytes(b"x")
    with staged(home, needed_bytes=1, memory_root=memory) as other:
        pass
    sweep(home, {None, str(kept)}, memory_root=memory)
    assert (kept / "a").read_bytes() == b"x" and not other.parent.exists()


def test_a_push_keeps_the_weights_it_sends(tmp_path: Path, memory: Path) -> None:
    home = tmp_path / "weights"
    with staged(home, needed_bytes=1, memory_root=memory) as live:
        pass
    with in_use(str(live)):
        sweep(home, (), memory_root=memory)
        assert live.exists()
    sweep(home, (), memory_root=memory)
    assert not live.exists()


def test_holding_an_ordinary_checkpoint_changes_nothing(tmp_path: Path) -> None:
    checkpoint = tmp_path / "live"
    checkpoint.mkdir()
    with in_use(str(checkpoint)), in_use("org/model"):
        pass
    assert names_below(tmp_path) == ["live"]


def test_memory_of_a_removed_state_directory_is_swept_by_any_other_fleet(
    tmp_path: Path, memory: Path
) -> None:
    with staged(tmp_path / "gone", needed_bytes=1, memory_root=memory) as live:
        (live / "a").write_bytes(b"x")
        (live.parent / ".lock").unlink()
        live.unlink()
        live.parent.rmdir()
    sweep(tmp_path / "another", (), memory_root=memory)
    assert names_below(memory) == []


def test_a_half_made_entry_is_swept(tmp_path: Path, memory: Path) -> None:
    home = tmp_path / "weights"
    (home / "0123").mkdir(parents=True)
    sweep(home, (), memory_root=memory)
    assert names_below(home) == []

"""Which fleet of a group may be awake, as it is on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skyctl.errors import ConflictError, SkyctlError
from skyctl.store import sleep_groups
from skyctl.store.sleep_groups import SleepGroup


def test_one_name_at_a_time_may_be_awake(tmp_path: Path) -> None:
    assert SleepGroup(tmp_path, "pair").awake() == ""
    for name in ("policy", "judge"):
        SleepGroup(tmp_path, "pair").give(name)
        assert SleepGroup(tmp_path, "pair").awake() == name
    assert SleepGroup(tmp_path, "other").awake() == ""


@pytest.mark.parametrize("place", [lambda file: file.mkdir(), lambda file: file.write_bytes(b"")])
def test_a_name_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, place: Callable[[Path], object]
) -> None:
    file = tmp_path / "sleep-groups" / "pair" / "awake"
    file.parent.mkdir(parents=True)
    place(file)
    with pytest.raises(SkyctlError, match="which fleet of sleep_group pair may be awake is not"):
        SleepGroup(tmp_path, "pair").awake()


async def test_of_two_switches_at_once_the_second_is_refused_and_told_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep_groups, "_PATIENCE_S", 0.0)
    group = SleepGroup(tmp_path, "pair")
    async with group.switching("skyctl switch judge"):
        message = r"sleep_group pair are being switched by skyctl switch judge \(pid"
        with pytest.raises(ConflictError, match=message):
            async with group.switching("skyctl switch policy"):
                pass
    async with group.switching("skyctl switch policy"):
        pass

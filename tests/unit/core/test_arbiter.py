"""The rule of who may act on a fleet, as its table says it."""

from __future__ import annotations

import asyncio
import json
import os
from itertools import product
from pathlib import Path

import pytest

from skyctl.core.arbiter import Act, Arbiter, caller, own_command
from skyctl.errors import ConflictError, StateUnwritable
from skyctl.store import locks
from skyctl.store.locks import Holder, Locks


@pytest.fixture
def two(tmp_path: Path) -> tuple[Arbiter, Arbiter]:
    """Two commands on one fleet."""
    return Arbiter(Locks(tmp_path)), Arbiter(Locks(tmp_path))


@pytest.mark.parametrize(("first", "second"), list(product(Act, Act)))
def test_only_verbs_act_at_the_same_time(
    two: tuple[Arbiter, Arbiter], first: Act, second: Act
) -> None:
    one, other = two
    with one.take(first, "the first"):
        if first is second is Act.VERB:
            other.take(second, "the second").release()
        else:
            with pytest.raises(ConflictError, match=r"busy: the first \(pid \d+, for "):
                other.take(second, "the second")
    other.take(second, "the second").release()


async def test_a_push_waits_for_verbs_that_end_and_is_told_of_another_push(
    two: tuple[Arbiter, Arbiter],
) -> None:
    one, other = two
    verb = one.take(Act.VERB, "skyctl resume")
    waiting = asyncio.create_task(other.turn(Act.PUSH, "push-2", wait_s=10))
    await asyncio.sleep(0)
    assert not waiting.done()
    verb.release()
    with await waiting:
        for act in (Act.VERB, Act.PUSH):
            with pytest.raises(ConflictError, match="push-2") as caught:
                await one.turn(act, "another", wait_s=10)
            assert caught.value.hint == "wait for it: skyctl jobs wait push-2"
        with pytest.raises(ConflictError, match="push-2"):
            await one.turn(Act.RECOVER, "skyctl recover", wait_s=0.1)


def test_who_asked_is_named(two: tuple[Arbiter, Arbiter]) -> None:
    one, other = two
    asked = caller.set("`skyctl sync-weights b` (pid 7)")
    with one.take(Act.PUSH, "push-3"):
        assert other.holds("push-3") and not other.holds("push-30")
        with pytest.raises(
            ConflictError,
            match=r"push-3 for .*, asked for by `skyctl sync-weights b` \(pid 7\)$",
        ):
            other.take(Act.VERB, "skyctl pause")
    caller.reset(asked)
    assert other.holders() == []


def test_where_there_is_no_room_for_the_lock_its_directory_is_locked(
    two: tuple[Arbiter, Arbiter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb that began on a full disk excludes a push that finds room by then."""

    def no_room(path: Path, flags: int = 0) -> int:
        raise StateUnwritable(f"cannot open {path}: No space left on device")

    one, other = two
    with monkeypatch.context() as full:
        full.setattr(locks, "create_private_file", no_room)
        verb = one.take(Act.VERB, "skyctl resume")
        other.take(Act.VERB, "skyctl pause").release()
        with pytest.raises(ConflictError):
            other.take(Act.SLEEP, "skyctl sleep")
    with pytest.raises(ConflictError):
        other.take(Act.PUSH, "push-1")
    verb.release()
    other.take(Act.PUSH, "push-1").release()


def test_whether_the_last_holder_died_can_be_seen(
    two: tuple[Arbiter, Arbiter], tmp_path: Path
) -> None:
    one, other = two
    turn = one.take(Act.SLEEP, "skyctl sleep")
    assert not other.died()
    turn.release()
    assert not other.died()
    record = json.dumps(vars(Holder("skyctl sleep", 2**22 + 1, 0.0, 0.0)))
    (tmp_path / "turn.lock").write_text(record)
    assert other.died()


def test_what_thaws_needs_no_lock_where_none_can_be_made(tmp_path: Path) -> None:
    """Without the file no push can be under way."""
    (tmp_path / "no directory").write_text("")
    arbiter = Arbiter(Locks(tmp_path / "no directory"))
    arbiter.take(Act.VERB, "skyctl resume").release()
    with pytest.raises(Exception, match="cannot open"):
        arbiter.take(Act.PUSH, "push-1")


def test_a_command_with_a_path_that_is_no_utf8_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["skyctl", "validate", os.fsdecode(b"\xff.yaml")])
    assert "validate '?.yaml'" in own_command().encode().decode()


def test_a_command_that_python_started_as_a_module_has_the_packages_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/lib/skyctl/__main__.py", "recover", "--yes"])
    assert own_command().startswith("`skyctl recover --yes`")

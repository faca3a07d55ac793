"""A lock that cannot be had: every command that needs it is refused, and says what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.arbiter import Act, Arbiter
from skyctl.errors import ConflictError, SkyctlError
from skyctl.store import owned, paths
from skyctl.store.locks import Locks


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("act", [Act.VERB, Act.PUSH])
def test_a_file_system_without_locks_is_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, act: Act
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owned.fcntl, "flock", flock)
    with pytest.raises(SkyctlError, match=os.strerror(number)) as failure:
        Arbiter(Locks(tmp_path)).take(act, "skyctl resume")
    assert "local disk" in failure.value.hint
    with pytest.raises(SkyctlError, match=os.strerror(number)):
        paths.flocked(tmp_path / "turn.lock")


@pytest.mark.parametrize("act", [Act.VERB, Act.PUSH])
def test_without_a_free_descriptor_nothing_counts_as_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    """Whether another command acts cannot be seen then, so no command may."""
    really = os.open
    pushing = Arbiter(Locks(tmp_path)).take(Act.PUSH, "push-1")

    def full(path: Any, flags: int, mode: int = 0o777) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(SkyctlError, match="Too many open files") as failure:
        Arbiter(Locks(tmp_path)).take(act, "skyctl resume")
    assert "ulimit -n" in failure.value.hint
    with pytest.raises(SkyctlError, match="Too many open files"):
        paths.flocked(tmp_path / "turn.lock")
    monkeypatch.setattr(os, "open", really)
    with pytest.raises(ConflictError):
        Arbiter(Locks(tmp_path)).take(act, "skyctl resume")
    pushing.release()

"""Who may act on a fleet after a process that acted on it has died."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.core import arbiter
from skyctl.core.arbiter import LATE_S, Act, Arbiter
from skyctl.store.locks import Locks


@pytest.fixture
def two(tmp_path: Path) -> tuple[Arbiter, Arbiter]:
    """Two commands on one fleet."""
    return Arbiter(Locks(tmp_path)), Arbiter(Locks(tmp_path))


@pytest.mark.parametrize("act", [Act.RECOVER, Act.VERB])
async def test_after_a_holder_that_died_the_next_waits_for_its_late_requests(
    two: tuple[Arbiter, Arbiter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Act
) -> None:
    waited: list[float] = []
    here, really = asyncio.current_task(), asyncio.sleep

    async def sleep(seconds: float) -> None:
        if asyncio.current_task() is here:  # and no thread of another test's client
            waited.append(seconds)
        else:
            await really(seconds)

    monkeypatch.setattr(arbiter.asyncio, "sleep", sleep)
    one, other = two
    with await one.turn(Act.PUSH, "push-1"):
        pass
    with await one.turn(Act.PUSH, "push-2"):
        assert waited == []  # whoever lets go has had its answers
    _take_and_die(tmp_path)
    one.take(Act.PUSH, "a look").release()  # it did not wait: the next one has to
    with await one.turn(act, "skyctl recover"):
        assert waited == [LATE_S]
    with await other.turn(act, "skyctl recover"):
        assert waited == [LATE_S]


_DIES = """
import os, sys
from pathlib import Path
from skyctl.store.locks import Locks
Locks(Path(sys.argv[1])).take("turn", "push-3").rename("push-3")
os._exit(0)
"""


def _take_and_die(directory: Path) -> None:
    subprocess.run([sys.executable, "-c", _DIES, str(directory)], check=True)

"""A process that ends is noticed; one that cannot be seen is not waited for."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from skyctl.engines.inside import ended


def test_the_end_of_any_of_several_processes_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "GRACE_S", 0.0)
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    processes = [subprocess.Popen(wait, stdin=subprocess.PIPE) for _ in range(2)]
    acted = threading.Event()
    try:
        ended.when_ended([1 << 30, *(process.pid for process in processes)], acted.set)
        assert not acted.is_set()
        assert processes[1].stdin is not None
        processes[1].stdin.close()
        assert acted.wait(30)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_processes_of_another_container_are_not_watched() -> None:
    before = threading.active_count()
    ended.when_ended([1 << 30], lambda: pytest.fail("acted"))
    assert threading.active_count() == before

"""No test below here starts a process: where one is needed by nature, it is in tests/processes."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import pytest

from skyctl.core import guardian
from skyctl.transfer.sender_client import SenderProcess
from tests.stub.guardian import Nobody
from tests.stub.sender import spawn_in_thread

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
_started: list[str] | None = None  # None: no unit test runs


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _started is not None and event in STARTS:
        what = f"{event}{arguments[:2]!r:.300}"
        _started.append(what)
        raise RuntimeError(f"a unit test starts a process: {what}")


sys.addaudithook(_watch)  # it cannot be removed


@contextmanager
def _watched() -> Iterator[None]:
    """Fails also where what was refused is taken for a program that cannot be run."""
    global _started
    _started = []
    try:
        yield
        if _started:
            pytest.fail(
                f"a unit test starts no process, this one did: {'; '.join(_started)}. Use a "
                "stand-in, or move the test to tests/processes",
                pytrace=False,
            )
    finally:
        _started = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # tensors this small take longer where threads wait for each other
    with _watched():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    with _watched():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, Any, Any]:
    with _watched():
        return (yield)


@pytest.fixture(scope="session")
def vllm() -> None:
    """Imports vLLM, which takes seconds and asks programs about the machine. Not a module's to do:
    each worker of pytest-xdist imports all modules, and few run these tests."""
    global _started
    watched, _started = _started, None
    try:
        pytest.importorskip("vllm")
        import_module("vllm.config")
        with suppress(ImportError):
            import_module("cpuinfo")  # which vLLM's layers import
    finally:
        _started = watched


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push has its sender in a thread, and nobody who would recover it were it killed."""
    monkeypatch.setattr(SenderProcess, "spawn", spawn_in_thread)
    monkeypatch.setattr(guardian, "_spawn", lambda paths: Nobody())

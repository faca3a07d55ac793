"""For all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forking, tiny


def pytest_configure(config: pytest.Config) -> None:
    forking.use()
    if directory := tiny.share():
        config.add_cleanup(lambda: shutil.rmtree(directory))
    # a shell that puts us into the background has SIGINT ignored, and so would every command that
    # a test interrupts; a handler is not inherited, it becomes the default
    signal.signal(signal.SIGINT, signal.default_int_handler)


_LONG = (
    *("test_sglang_fleet", "test_network_namespaces", "test_soak"),
    *("test_sglang_states", "test_kill_points"),
)
_WITH_VLLM = ("test_own_sender",)


COLLECTED = pytest.StashKey[list[str]]()
"""All tests that this run found, those that `-m` leaves out, too."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first: at the end, other workers would wait for it. Then what
    imports vLLM, all of it in one worker."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.path.stem in _LONG:
        return 0
    with_vllm = "vllm" in getattr(item, "fixturenames", ()) or item.path.stem in _WITH_VLLM
    return 1 if with_vllm else 2


def pytest_collection_finish() -> None:
    """Modules and collected tests stay: the collector looks through them no more."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_staged_remains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights in memory go when their state directory does: pytest keeps those of three runs."""
    yield
    for origin in Path(f"/dev/shm/skyctl-{os.getuid()}").glob("*.origin"):
        # another run may remove its own meanwhile
        if tmp_path_factory.getbasetemp() in Path(os.path.realpath(origin)).parents:
            shutil.rmtree(origin.with_suffix(""), ignore_errors=True)
            origin.unlink()

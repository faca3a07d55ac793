"""For all tests."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest

from tests import forking, tiny

# helpers, too, say what was not equal
pytest.register_assert_rewrite("tests.faults", "tests.integration", "tests.processes", "tests.unit")
hypothesis.settings.register_profile("any time", deadline=None)
hypothesis.settings.load_profile("any time")
gc.disable()  # it would look through all that test modules import, again and again


def pytest_configure(config: pytest.Config) -> None:
    forking.use()
    _read_certificates_once(config)
    if directory := tiny.share():
        config.add_cleanup(lambda: shutil.rmtree(directory))
    # a shell that puts us into the background has SIGINT ignored, and so would every command that
    # a test interrupts; a handler is not inherited, it becomes the default
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _read_certificates_once(config: pytest.Config) -> None:
    """Each client of httpx would, for tens of milliseconds of a processor."""
    patch = pytest.MonkeyPatch()
    read = functools.cache(httpx.create_ssl_context)
    patch.setattr("httpx._transports.default.create_ssl_context", read)
    config.add_cleanup(patch.undo)


_FIRST = (
    *("test_kill_points", "test_network_namespaces", "test_sglang_fleet", "test_sglang_states"),
    *("test_soak", "vllm"),
)
"""Modules that take long, and all that imports vLLM."""
_WITH_VLLM = ("test_own_sender",)


COLLECTED = pytest.StashKey[list[str]]()
"""All tests that this run found, those that `-m` leaves out, too."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Each of `_FIRST` is what a worker begins with, a worker of its own where there are enough:
    at the end, others would wait for it."""
    config.stash[COLLECTED] = [item.nodeid for item in items]
    yield
    groups: dict[str, list[pytest.Item]] = {name: [] for name in _FIRST}
    rest: list[pytest.Item] = []
    for item in items:
        groups.get(_group(item), rest).append(item)
    first = list(groups.values())
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    left = len(items)
    items.clear()
    for number in range(workers):
        begins = [item for group in first[number::workers] for item in group]
        size = left // (workers - number)  # as pytest-xdist cuts them
        left -= size
        more = max(0, size - len(begins))
        items += begins + rest[:more]
        del rest[:more]
    items += rest


def _group(item: pytest.Item) -> str:
    with_vllm = "vllm" in getattr(item, "fixturenames", ()) or item.path.stem in _WITH_VLLM
    return "vllm" if with_vllm else item.path.stem


IMPORTED = pytest.StashKey[frozenset[str]]()
"""All that test modules import, and what that imports."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and collected tests stay: the collector looks through them no more."""
    session.config.stash[IMPORTED] = frozenset(sys.modules)
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def nothing_staged_remains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights in memory go when their state directory does: pytest keeps those of three runs."""
    yield
    for origin in Path(f"/dev/shm/skyctl-{os.getuid()}").glob("*.origin"):
        # another run may remove its own meanwhile
        if tmp_path_factory.getbasetemp() in Path(os.path.realpath(origin)).parents:
            shutil.rmtree(origin.with_suffix(""), ignore_errors=True)
            origin.unlink()

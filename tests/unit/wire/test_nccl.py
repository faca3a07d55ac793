"""NCCL in a worker: the end of a group, and the settings that a group shares."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from skyctl.wire.nccl import leave_group, nccl_settings


def test_a_group_is_destroyed_once() -> None:
    destroyed: list[str] = []
    group = SimpleNamespace(destroy=lambda: destroyed.append("group"))
    engine = SimpleNamespace(model_update_group=group)
    leave_group(engine)
    leave_group(engine)
    assert destroyed == ["group"] and engine.model_update_group is None


def test_a_worker_that_is_in_none_has_nothing_to_leave() -> None:
    leave_group(None)
    leave_group(SimpleNamespace())


@contextlib.contextmanager
def lifting() -> Iterator[None]:
    before = os.environ.pop("NCCL_PROTO")
    try:
        yield
    finally:
        os.environ["NCCL_PROTO"] = before


@pytest.mark.parametrize(
    ("vllm", "told"),
    [
        (None, {"NCCL_PROTO": "Simple", "NCCL_P2P_LEVEL": "NVL"}),
        (SimpleNamespace(unpinned_nccl_env=lifting), {"NCCL_P2P_LEVEL": "NVL"}),
        (SimpleNamespace(), {"NCCL_PROTO": "Simple", "NCCL_P2P_LEVEL": "NVL"}),
    ],
    ids=["no such module", "vLLM lifts its own", "an older vLLM"],
)
def test_settings_are_those_of_a_group_with_another_process(
    monkeypatch: pytest.MonkeyPatch, vllm: object, told: dict[str, str]
) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "NVL")
    monkeypatch.setitem(sys.modules, "vllm.utils.nccl", vllm)
    assert nccl_settings() == told
    assert os.environ["NCCL_PROTO"] == "Simple"

"""How long vLLM's readers spin."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.vllm.inside.idle import spin_less

MODULE = "vllm.distributed.device_communicators.shm_broadcast"


class Known:
    def __init__(self, is_reader: bool, busy_loop_s: float = 1) -> None:
        self.seconds = busy_loop_s


class Changed:
    def __init__(self, is_reader: bool, timeout_s: float = 5) -> None:
        self.seconds = timeout_s


def seconds_of(kind: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """What a reader of this kind, made afresh, spins."""
    fresh = type(kind.__name__, (), {"__init__": _copy(kind.__init__)})
    module: Any = ModuleType(MODULE)
    module.SpinCondition = fresh
    for name in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    spin_less()
    made: Any = fresh(True)
    return float(made.seconds)


def _copy(function: Any) -> Any:
    return FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)


def test_readers_sleep_as_soon_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYCTL_SPIN_S", "0.02")
    assert seconds_of(Known, monkeypatch) == 0.02


def test_without_the_variable_vllm_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYCTL_SPIN_S", raising=False)
    assert seconds_of(Known, monkeypatch) == 1


def test_a_reader_of_another_make_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYCTL_SPIN_S", "0.02")
    assert seconds_of(Changed, monkeypatch) == 5
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace())  # type: ignore[arg-type]
    spin_less()  # no such class: no complaint

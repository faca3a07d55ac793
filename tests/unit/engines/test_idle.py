"""How long vLLM's readers spin."""

from __future__ import annotations

import sys
import threading
import time
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.vllm.inside.idle import let_nixl_rest, spin_less

PACKAGE = "vllm.distributed.device_communicators"
MODULE = f"{PACKAGE}.shm_broadcast"


class Known:
    def __init__(self, is_reader: bool, busy_loop_s: float = 1) -> None:
        self.seconds = busy_loop_s


class Changed:
    def __init__(self, is_reader: bool, timeout_s: float = 5) -> None:
        self.seconds = timeout_s


def stand_in(monkeypatch: pytest.MonkeyPatch, **names: Any) -> Any:
    """A module in the place of vLLM's, with these names."""
    module: Any = ModuleType(MODULE)
    vars(module).update(names)
    for name in ("vllm", "vllm.distributed", PACKAGE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[PACKAGE])["shm_broadcast"] = module
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def seconds_of(kind: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """What a reader of this kind, made afresh, spins."""
    fresh = type(kind.__name__, (), {"__init__": _copy(kind.__init__)})
    stand_in(monkeypatch, SpinCondition=fresh)
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
    stand_in(monkeypatch)
    spin_less()  # no such class: no complaint


def test_a_reader_sleeps_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[Any] = []
    here, really = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        slept.append(seconds) if threading.get_ident() == here else really(seconds)

    monkeypatch.delenv("SKYCTL_SPIN_S", raising=False)
    monkeypatch.setattr(time, "sleep", sleep)
    for variable, expected in ((None, ["vllm's"]), ("0.02", [50e-6])):
        vllms = stand_in(monkeypatch, sched_yield=lambda: slept.append("vllm's"))
        if variable is not None:
            monkeypatch.setenv("SKYCTL_SPIN_S", variable)
        spin_less()
        vllms.sched_yield()
        assert slept == expected
        slept.clear()


def test_nixl_waits_for_events_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        pthrDelay = 0

    api: Any = ModuleType("nixl._api")
    api.nixlBind = SimpleNamespace(nixlAgent=lambda name, config: (name, config.pthrDelay))
    package: Any = ModuleType("nixl")
    package._api = api
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.delenv("SKYCTL_SPIN_S", raising=False)
    let_nixl_rest()
    assert api.nixlBind.nixlAgent("as it is", Config()) == ("as it is", 0)
    monkeypatch.setenv("SKYCTL_SPIN_S", "0.02")
    for _ in range(2):
        let_nixl_rest()
    assert api.nixlBind.nixlAgent("rests", Config()) == ("rests", 1000)

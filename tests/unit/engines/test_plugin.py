"""The vLLM plugin: registers once, and never keeps a server from starting."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from skyctl.engines.vllm.inside.plugin import register

FACTORY = "vllm.distributed.weight_transfer.factory"


class Factory:
    """vLLM's registry, as far as the plugin uses it."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError("already registered")
        self._registry[name] = (module, class_name)


def with_factory(monkeypatch: pytest.MonkeyPatch, factory: object) -> None:
    module = ModuleType(FACTORY)
    if factory is not None:
        module.WeightTransferEngineFactory = factory  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, FACTORY, module)


def test_it_registers_by_name_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = Factory()
    with_factory(monkeypatch, factory)
    register()
    register()
    assert factory._registry == {
        "skyctl": ("skyctl.engines.vllm.inside.engine", "SkyctlWeightTransferEngine")
    }


def test_it_does_nothing_where_vllm_has_no_weight_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    with_factory(monkeypatch, None)
    register()


@pytest.mark.usefixtures("vllm")
def test_the_registered_engine_exists() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from skyctl.engines.vllm.inside.engine import SkyctlWeightTransferEngine

    assert issubclass(SkyctlWeightTransferEngine, WeightTransferEngine)
    assert not SkyctlWeightTransferEngine.__abstractmethods__

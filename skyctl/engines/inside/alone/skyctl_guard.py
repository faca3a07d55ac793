"""`skyctl_guard.Guard`: skyctl's guard for an interpreter that does not have skyctl."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(name: str) -> ModuleType:
    """A module of the directory above."""
    spec = importlib.util.spec_from_file_location(
        f"_skyctl_{name}_source", Path(__file__).parents[1] / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None  # it is beside this directory
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_module = load("guard")
TOKEN_VARIABLE, Guard, Routes = _module.TOKEN_VARIABLE, _module.Guard, _module.Routes
answer, route_path = _module.answer, _module.route_path
Application, Receive, Scope, Send = (
    _module.Application,
    _module.Receive,
    _module.Scope,
    _module.Send,
)

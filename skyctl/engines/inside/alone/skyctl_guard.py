"""`skyctl_guard.Guard`: skyctl's guard for an interpreter that does not have skyctl."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "_skyctl_guard_source", Path(__file__).parents[1] / "guard.py"
)
assert _spec is not None and _spec.loader is not None  # it is beside this directory
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

TOKEN_VARIABLE, Guard, Routes = _module.TOKEN_VARIABLE, _module.Guard, _module.Routes
answer, route_path = _module.answer, _module.route_path

"""The terminal that records pictures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]


def load_terminal() -> ModuleType:
    """scripts/terminal.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("terminal", ROOT / "scripts" / "terminal.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["terminal"] = module
    spec.loader.exec_module(module)
    return module

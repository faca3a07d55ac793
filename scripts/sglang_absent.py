"""Stand-ins for packages that SGLang imports at module level and `gpu-sglang-site.sh` leaves out.

They have only the names that are imported without a guard: a guarded import still fails, and SGLang
takes its other way. The names can be imported, annotated with, subclassed and used as decorators; a
call of one fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAMES: dict[str, list[str]] = {}
"""Of each module that is stood in for."""


class _Absent(type):
    """The class of each name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__module__}.{cls.__name__}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_absent"):
            raise RuntimeError(f"{cls.__module__}.{cls.__name__}: its package is not in this site")
        return super().__call__(*args, **kwargs)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _stand_in(module: str, name: str) -> _Absent:
    def schema(cls: Any, *arguments: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    body = {"_absent": True, "__module__": module}
    return _Absent(name, (), body | {"__get_pydantic_core_schema__": classmethod(schema)})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        _fill(module.__name__, vars(module))


def _fill(module: str, namespace: dict[str, Any]) -> None:
    namespace.update({name: _stand_in(module, name) for name in _NAMES[module]})


def package(namespace: dict[str, Any], **modules: str) -> None:
    """Called by a package's `__init__` with its globals: the names of each submodule, separated by
    spaces; `own`: those of the package itself."""
    top = namespace["__name__"]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    for module, names in modules.items():
        _NAMES[top if module == "own" else f"{top}.{module}"] = names.split()
    _fill(top, namespace)

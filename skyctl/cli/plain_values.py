"""Typer without pydantic, where the values are plain."""

from __future__ import annotations

from enum import Enum
from typing import Any

from typer.core import TyperArgument, TyperOption


def spare_validators() -> None:
    """Have Typer take plain values without pydantic, where the result is the same.

    Typer builds a pydantic validator for every parameter, typed or not. Importing pydantic and
    building them takes a third of a short command's time.
    """
    for kind in (TyperArgument, TyperOption):
        _spare(kind)


def _spare(kind: Any) -> None:
    validated = kind.process_value

    def process_value(self: Any, context: Any, value: Any) -> Any:
        try:
            plain = _plain(self, value)
        except ValueError:
            return validated(self, context, value)  # Typer says what is wrong with it
        return plain if self.callback is None else self.callback(context, self, plain)

    kind.process_value = process_value


def _plain(parameter: Any, value: Any) -> Any:
    """The value itself, or the member of an enumeration. Raises ValueError for any other."""
    if value is None and not parameter.required:
        return () if parameter.multiple or parameter.nargs != 1 else None
    # Typer has it since it has had validators
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is str and isinstance(value, str):
        value.encode()  # refuses lone surrogates
        return value
    raise ValueError

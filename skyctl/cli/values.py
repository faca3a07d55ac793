"""What was typed, as commands take it: without pydantic, where that would change nothing.

Typer builds one of pydantic's validators for each parameter, also for those that nobody typed. To
import and build them takes a third of a short command's time.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from typer.core import TyperArgument, TyperOption


def spare_validators() -> None:
    """Have Typer take plain values as they are, in this process."""
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
    # Typer has it since it has validators
    wanted = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return wanted(value)
    if wanted is str and isinstance(value, str):
        value.encode()  # what is no Unicode is refused
        return value
    raise ValueError

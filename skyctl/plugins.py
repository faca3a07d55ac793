"""Objects that a fleet file selects by name: skyctl's own, and those of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Generic, TypeVar

from skyctl.errors import UsageError

T = TypeVar("T")


class Plugins(Generic[T]):
    """Objects by name. `own` has skyctl's as `module:attribute`, imported on first use; others are
    entry points of `group`, looked up only for names that are not skyctl's own.
    """

    def __init__(self, kind: str, group: str, own: Mapping[str, str]) -> None:
        self._kind = kind
        self._group = group
        self._own = own
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        """The object of that name.

        Raises:
            UsageError: no such object, or the package that provides it cannot be imported.
        """
        if name in self._own:
            module, _, attribute = self._own[name].partition(":")
            own: T = getattr(import_module(module), attribute)
            return own
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def names(self) -> list[str]:
        """All available names, sorted."""
        from importlib.metadata import entry_points  # most commands do not need it, and it is slow

        return sorted({*self._own, *(point.name for point in entry_points(group=self._group))})

    def _load(self, name: str) -> T:
        from importlib.metadata import entry_points

        points = [*entry_points(group=self._group, name=name)]
        if not points:
            raise UsageError(
                f"there is no {self._kind} {name!r}",
                hint=f"there are: {', '.join(self.names())}",
            )
        try:
            loaded: T = points[0].load()
        except Exception as error:
            raise UsageError(
                f"{self._kind} {name!r} ({points[0].value}) cannot be imported: {error!r}"
            ) from error
        return loaded

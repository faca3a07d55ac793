"""Prometheus' text format, as far as engines' pages need it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)(?:\s+-?\d+)?$"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of finite samples whose name starts with `prefix`."""
    for line in text.splitlines():
        if not line.startswith(prefix):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if value == value and abs(value) != float("inf"):
            yield match["name"], dict(_LABEL.findall(match["labels"] or "")), value


def totals(prefix: str, found: Iterable[tuple[str, object, float]]) -> Callable[[str], int]:
    """Sums over all labels, by name without the prefix."""
    sums: dict[str, float] = {}
    for name, _, value in found:
        sums[name] = sums.get(name, 0.0) + value
    # infinity, which sums can reach, becomes large
    return lambda name: int(max(0.0, min(sums.get(prefix + name, 0.0), 2.0**63)))

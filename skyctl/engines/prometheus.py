"""Prometheus' text format, as far as engines' pages need it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from skyctl.engines.base import ServerMetrics
from skyctl.engines.traffic import Histogram
from skyctl.units import finite_or

Sample = tuple[str, dict[str, str], float]
"""Name, labels and value."""

_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)(?:\s+-?\d+)?$"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text: str, prefix: str) -> Iterator[Sample]:
    """Finite samples whose name starts with `prefix`."""
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


def totals(measured: Iterable[Sample]) -> Callable[[str], int]:
    """Sums over all labels, by name; zero for what is missing."""
    sums: dict[str, float] = {}
    for name, _, value in measured:
        sums[name] = sums.get(name, 0.0) + value
    # infinity, which sums can reach, becomes large
    return lambda name: int(max(0.0, min(sums.get(name, 0.0), 2.0**63)))


def histogram(measured: Iterable[Sample], name: str) -> Histogram:
    """The histogram of this name, summed over all other labels."""
    up_to: dict[float, int] = {}
    count = 0
    for metric, labels, value in measured:
        if metric == f"{name}_bucket" and (bound := finite_or(labels.get("le", ""), -1.0)) >= 0:
            up_to[bound] = up_to.get(bound, 0) + int(value)
        elif metric == f"{name}_count":
            count += int(value)
    return Histogram(count, up_to)


def server_metrics(
    measured: Iterable[Sample], counts: Mapping[str, str], usage: str, sleep_level: int | None
) -> ServerMetrics:
    """Of a page's samples. `counts` names the metric that each counting field is the sum of, and
    `usage` the one whose mean is `kv_usage`. Missing metrics count as zero.
    """
    measured = list(measured)
    total = totals(measured)
    shares = [value for name, _, value in measured if name == usage]
    return ServerMetrics(
        **{field: total(metric) for field, metric in counts.items()},
        kv_usage=sum(shares) / len(shares) if shares else 0.0,
        sleep_level=sleep_level,
        measured=any(name == counts["running"] for name, _, _ in measured),
    )

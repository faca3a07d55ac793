"""A fleet's logs, and their lines of a period, by the times that they begin with."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from skyctl.core.requests import LogQuery
from skyctl.engines.logs import is_mark, is_probe, plain, tail
from skyctl.errors import NotFoundError
from skyctl.launch.local.rotation import earlier
from skyctl.store.paths import FleetPaths

_TIME = re.compile(r"(?:(\d{4})-)?(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
_WITHIN = 80  # characters in which a line says when it was written
_ZONE_S = 1800.0
_ZONE_ERROR_S = 120.0
_HALF_A_YEAR_S = 182 * 86_400.0


def log_files(paths: FleetPaths, names: Sequence[str] = ()) -> dict[str, Path]:
    """A fleet's logs by name: all, or those of `names`.

    Raises:
        NotFoundError: one of the names has no log.
    """
    files = {path.stem: path for path in sorted(paths.logs.glob("*.log"))}
    for name in names:
        if name not in files:
            raise NotFoundError(f"there is no log of {name!r}", hint=f"logs: {', '.join(files)}")
    return {name: files[name] for name in names or files}


def log_lines(path: Path, request: LogQuery) -> list[str]:
    """The lines of one log that a request is about."""
    if not request.since and request.until is None:
        return tail(path, request.lines, probes=request.probes)
    since, until = request.since, request.until
    return written(path, since, until, lines=request.lines, probes=request.probes)


def written(
    path: Path, since: float, until: float | None, *, lines: int, probes: bool = False
) -> list[str]:
    """The last `lines` lines between two moments, reaching back before rotations. Each run of the
    process begins with its mark. A line without a time was written when the one before it was.
    """
    end = math.inf if until is None else until
    clock, mark, shown = _Clock(), "", list[str]()
    for line in _lines(path, probes=probes):
        at = clock.read(line)
        if is_mark(line):
            mark = line
        if since <= at <= end:
            if mark and mark != line:
                shown.append(mark)
            mark = ""
            shown.append(line)
    return shown[-lines:] if lines else []


class _Clock:
    """When each of a log's lines was written, in seconds since the epoch. The router, and servers
    on other machines, may write in another zone: the first time after a mark shows which.
    """

    def __init__(self) -> None:
        self._at = -math.inf
        self._year = str(datetime.now().year)
        self._ahead_s: float | None = 0.0  # of our zone; None: not seen since the mark

    def read(self, line: str) -> float:
        if (match := _TIME.search(line[:_WITHIN])) is None:
            return self._at
        year, day, time = match.groups()
        self._year = year or self._year
        try:
            at = datetime.fromisoformat(f"{self._year}-{day} {time}").timestamp()
        except ValueError:  # the 29th of February, or no time at all
            return self._at
        if is_mark(line):
            self._at, self._ahead_s = at, None
            return at
        if not year and self._at - at > _HALF_A_YEAR_S:  # vLLM writes no year
            self._year = str(int(self._year) + 1)
            return self.read(line)
        if self._ahead_s is None:
            zones = round((at - self._at) / _ZONE_S)
            off_s = at - self._at - zones * _ZONE_S
            self._ahead_s = zones * _ZONE_S if abs(off_s) < _ZONE_ERROR_S else 0.0
        self._at = at - self._ahead_s
        return self._at


def _lines(path: Path, *, probes: bool) -> Iterator[str]:
    """All lines of a log and its copies, oldest first, without terminal escapes."""
    copies = [path]
    while (copy := earlier(path, len(copies))).exists():
        copies.append(copy)
    for file in reversed(copies):
        try:
            with file.open("rb") as log:
                for raw in log:
                    line = plain(raw.decode(errors="replace").removesuffix("\n"))
                    if probes or not is_probe(line):
                        yield line
        except OSError:
            continue

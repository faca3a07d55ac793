"""The end of a log file, where each run of its process begins, and the one line that says why."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.launch.local.rotation import earlier
from skyctl.sanitize import sanitized
from skyctl.store.paths import create_private_file

# `ValueError: …`, `vllm.exceptions.EngineDeadError: …`, also after vLLM's `(EngineCore pid=7)` and
# log prefixes; not a traceback's `raise ValueError(`.
_ERROR_LINE = re.compile(
    r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Panic)\b(?!\():? ?.*)$"
)
_PREFIXES = re.compile(
    r"^(?:\([\w ]+ pid=\d+\)\s*)?(?:(?:INFO|WARNING|ERROR|DEBUG)\s+\S+\s+\S+\s+\[[^\]]*\]\s*)?"
)
_MARK = "── skyctl starts "
_CHUNK_BYTES = 64 * 1024
_LONGEST_TAIL_BYTES = 16 * 1024 * 1024


# What health probes and `status` leave in a server's access log every few seconds.
_PROBE = re.compile(
    r'"GET /(?:is_paused|skyctl/state|metrics|metrics/\?\S+|health|model_info|v1/models) '
    r'HTTP/1\.1" 200'
)


def tail(path: Path, lines: int, *, probes: bool = False) -> list[str]:
    """The last `lines` lines without terminal escapes, reaching back before the last rotation; []
    without a file. Answered probes are left out unless `probes`.
    """
    current = _tail(path, lines, probes=probes)
    return _tail(earlier(path), lines - len(current), probes=probes) + current


def _tail(path: Path, lines: int, *, probes: bool) -> list[str]:
    if lines <= 0:
        return []
    try:
        with path.open("rb") as log:
            start = log.seek(0, 2)
            data, shown = b"", list[str]()
            while start > 0 and len(shown) <= lines and len(data) < _LONGEST_TAIL_BYTES:
                # in growing steps: a quiet server's log may be nearly all probes
                step = min(max(_CHUNK_BYTES, len(data)), start)
                start -= step
                log.seek(start)
                data = log.read(step) + data
                # only at newlines: a progress bar redraws its line with carriage returns
                raw = data.decode(errors="replace").removesuffix("\n").split("\n") if data else []
                shown = [plain(line) for line in raw if probes or not is_probe(line)]
    except OSError:
        return []
    return shown[-lines:]


def mark_start(log: Path, name: str, at: float) -> None:
    """Append the line that separates this run of a process from its earlier ones (`at` is seconds
    since the epoch). Best effort: a server whose log cannot be written starts without.
    """
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    with (
        contextlib.suppress(OSError, SkyctlError),
        os.fdopen(create_private_file(log, os.O_APPEND), "ab+") as file,
    ):
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the earlier process died amid a line
                file.write(b"\n")
        file.write(f"{_MARK}{name} at {when}\n".encode())


def is_mark(line: str) -> bool:
    """Whether a process was started at this line."""
    return line.startswith(_MARK)


def this_run(lines: Sequence[str]) -> list[str]:
    """The lines after the last start."""
    begin = max((number for number, line in enumerate(lines, 1) if is_mark(line)), default=0)
    return list(lines[begin:])


def why_it_died(path: Path) -> str:
    """The telling line among the last 200 of the last run, or ""."""
    return telling_line(this_run(tail(path, 200)))


def is_probe(line: str) -> bool:
    """Whether an access-log line is an answered probe."""
    return _PROBE.search(line) is not None


def plain(line: str) -> str:
    """One line as a terminal would show it: a progress bar's last state, no escapes."""
    return sanitized(line.rstrip().rpartition("\r")[2]).rstrip()


def message(line: str) -> str:
    """A log line without vLLM's prefix `(EngineCore pid=7) INFO 11-20 12:00:00 [file.py:1]`."""
    return _PREFIXES.sub("", line)


def latest_message(lines: Sequence[str]) -> str:
    """The beginning of the last message, or "". vLLM prefixes each of its lines the same way."""
    prefixes = [line.removesuffix(message(line)) for line in lines]
    at = len(lines) - 1
    while at > 0 and prefixes[at] and prefixes[at] == prefixes[at - 1]:
        at -= 1
    return message(lines[at]) if lines else ""


def telling_line(lines: Sequence[str]) -> str:
    """The line that names the error: the last exception that is not a mere consequence, or ""."""
    reason = ""
    for line in lines:
        match = _ERROR_LINE.search(message(line))
        if match is None:
            continue
        # the API server only reports that its engine failed; the engine said why before
        consequence = "Engine core initialization failed" in line or "SystemExit" in line
        if not (consequence and reason):
            reason = match[1].strip()
    return reason

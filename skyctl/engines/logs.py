"""The end of a log file, and the one line in it that says why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from skyctl.launch.local.rotation import earlier
from skyctl.sanitize import sanitized

# `ValueError: …`, `vllm.exceptions.EngineDeadError: …`, also after vLLM's `(EngineCore pid=7)` and
# log prefixes.
_ERROR_LINE = re.compile(
    r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Panic)\b:? ?.*)$"
)
_PREFIXES = re.compile(
    r"^(?:\([\w ]+ pid=\d+\)\s*)?(?:(?:INFO|WARNING|ERROR|DEBUG)\s+\S+\s+\S+\s+\[[^\]]*\]\s*)?"
)
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
    found = _tail(path, lines, probes=probes)
    return _tail(earlier(path), lines - len(found), probes=probes) + found


def _tail(path: Path, lines: int, *, probes: bool, since: int = 0) -> list[str]:
    if lines <= 0:
        return []
    try:
        with path.open("rb") as log:
            start = log.seek(0, 2)
            data, found = b"", list[str]()
            while start > since and len(found) <= lines and len(data) < _LONGEST_TAIL_BYTES:
                # in growing steps: a quiet server's log may be nearly all probes
                step = min(max(_CHUNK_BYTES, len(data)), start - since)
                start -= step
                log.seek(start)
                data = log.read(step) + data
                # only at newlines: a progress bar redraws its line with carriage returns
                raw = data.decode(errors="replace").removesuffix("\n").split("\n") if data else []
                found = [plain(line) for line in raw if probes or not is_probe(line)]
    except OSError:
        return []
    return found[-lines:]


def why_it_died(path: Path, since: int) -> str:
    """The telling line among the last 200 that were written behind byte `since`, or ""; an earlier
    process may have left others. What was rotated begins anew.
    """
    try:
        size = path.stat().st_size
    except OSError:
        return ""
    return telling_line(_tail(path, 200, probes=False, since=since if since <= size else 0))


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
    found = ""
    for line in lines:
        match = _ERROR_LINE.search(message(line))
        if match is None:
            continue
        # the API server only reports that its engine failed; the engine said why before
        consequence = "Engine core initialization failed" in line or "SystemExit" in line
        if not (consequence and found):
            found = match[1].strip()
    return found

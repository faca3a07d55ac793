"""The end of a log file, and the one line in it that says why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

# `ValueError: …`, `vllm.exceptions.EngineDeadError: …`, also behind vLLM's `(EngineCore pid=7)`
# and log prefixes.
_ERROR_LINE = re.compile(
    r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Panic)\b:? ?.*)$"
)
_PREFIXES = re.compile(
    r"^(?:\([\w ]+ pid=\d+\)\s*)?(?:(?:INFO|WARNING|ERROR|DEBUG)\s+\S+\s+\S+\s+\[[^\]]*\]\s*)?"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CHUNK_BYTES = 256 * 1024


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines without terminal escapes; [] when there is no file."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            start = size
            data = b""
            while start > 0 and data.count(b"\n") <= lines:
                step = min(_CHUNK_BYTES, start)
                start -= step
                log.seek(start)
                data = log.read(step) + data
    except OSError:
        return []
    if lines <= 0:
        return []
    text = data.decode(errors="replace")
    # only at newlines: a progress bar redraws its line with carriage returns
    return [plain(line) for line in text.removesuffix("\n").split("\n")[-lines:]] if text else []


def plain(line: str) -> str:
    """One line without terminal escapes and carriage returns."""
    return _ESCAPES.sub("", line).rpartition("\r")[2].rstrip()


def message(line: str) -> str:
    """A log line without vLLM's `(EngineCore pid=7) INFO 11-20 12:00:00 [file.py:1]` before it."""
    return _PREFIXES.sub("", line)


def telling_line(lines: Sequence[str]) -> str:
    """The line that names the error: the last exception that is no mere consequence, or ""."""
    found = ""
    for line in lines:
        match = _ERROR_LINE.search(message(line))
        if match is None:
            continue
        # The API server only reports that its engine failed; the engine said why before.
        consequence = "Engine core initialization failed" in line or "SystemExit" in line
        if not (consequence and found):
            found = match[1].strip()
    return found

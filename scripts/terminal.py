"""A command in a terminal of a fixed size, and every picture that the terminal showed.

Enough of a terminal for what Rich draws: lines, colours, moving up and erasing, full screens.
Needs no package that skyctl does not.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SEQUENCE = re.compile(r"\x1b(?:\[([?0-9;]*)([A-Za-z])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9])")
_UNFINISHED = re.compile(r"\x1b(?:\[[?0-9;]*|\][^\x07\x1b]*\x1b?|[()])?$")
_GRACE_S = 2.0


class Screen:
    """What stands in the terminal; a cell is a character and the SGR parameters it was drawn in.

    `frames` are the pictures just before something was erased or drawn over, as ANSI text.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._lines: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""
        self._drawn_since = False
        self._rest = ""
        self.frames: list[str] = []

    def feed(self, text: str) -> None:
        """Take in some output; an escape sequence may be cut anywhere."""
        text, self._rest = self._rest + text, ""
        if unfinished := _UNFINISHED.search(text):
            self._rest, text = unfinished[0], text[: unfinished.start()]
        position = 0
        while position < len(text):
            found = _SEQUENCE.match(text, position)
            if found is None:
                self._put(text[position])
                position += 1
            else:
                self._obey(found[1] or "", found[2] or "")
                position = found.end()

    def text(self) -> str:
        """The terminal as ANSI text, without empty lines at the end."""
        lines = [_ansi(line) for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return "\n".join(lines)

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row += 1
            self._column = 0  # as the kernel makes of it: \r\n
        elif character == "\r":
            self._column = 0
        elif character >= " ":
            if self._column >= self._columns:
                self._row, self._column = self._row + 1, 0
            line = self._line()
            line.extend([(" ", "")] * (self._column + 1 - len(line)))
            line[self._column] = (character, self._style)
            self._column += 1
            self._drawn_since = True
        self._line()

    def _line(self) -> list[tuple[str, str]]:
        while len(self._lines) <= self._row:
            self._lines.append([])
        return self._lines[self._row]

    def _obey(self, parameters: str, command: str) -> None:
        number = int(parameters) if parameters.isdigit() else 1
        if command == "m":
            self._style = "" if parameters in ("", "0") else f"{self._style};{parameters}"
            return
        if command not in "AHJK" and parameters != "?1049":
            return
        if self._drawn_since:
            self.frames.append(self.text())
            self._drawn_since = False
        if command == "A":
            self._row = max(0, self._row - number)
        elif command == "K":
            del self._line()[0 if parameters == "2" else self._column :]
        elif command == "H":
            self._row = self._column = 0
        elif command == "J" or parameters == "?1049":
            self._lines, self._row, self._column = [[]], 0, 0


def _ansi(line: Sequence[tuple[str, str]]) -> str:
    drawn, style = "", ""
    for character, wanted in line:
        if wanted != style:
            drawn += f"\x1b[0{wanted}m"
            style = wanted
        drawn += character
    return (drawn + ("\x1b[0m" if style else "")).rstrip()


@dataclass(frozen=True)
class Shown:
    """What a command showed: every picture in order, and the last one. `code` is its exit code."""

    frames: list[str]
    end: str
    code: int


def show(
    command: Sequence[str],
    *,
    cwd: Path,
    environ: Mapping[str, str],
    columns: int = 100,
    rows: int = 40,
    timeout_s: float = 300.0,
    keys: Callable[[float], str] = lambda seconds: "",
) -> Shown:
    """Run a command in a terminal of `columns` times `rows`.

    `keys(seconds since it began)` is asked several times a second what to type next.

    Raises:
        TimeoutError: it had not ended after `timeout_s` seconds; it was killed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = {key: value for key, value in environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**environ, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen = Screen(columns)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    began = time.monotonic()
    try:
        while (seconds := time.monotonic() - began) < timeout_s:
            if typed := keys(seconds):
                os.write(ours, typed.encode())
            readable, _, _ = select.select([ours], [], [], 0.1)
            data = _read(ours) if readable else b""
            screen.feed(decoder.decode(data))
            if (readable and not data) or (not readable and process.poll() is not None):
                return Shown(screen.frames, screen.text(), process.wait(_GRACE_S))
        raise TimeoutError(f"{' '.join(command)} had not ended after {timeout_s:g} s")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed: the end, on Linux
        return b""

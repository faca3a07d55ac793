"""Reads single keys from a terminal, without Enter, for full-screen views."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from types import TracebackType

_ESCAPES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
_NAMES = {"\x1b": "escape", "\r": "enter", "\n": "enter", "\x03": "ctrl-c"}


def parse_keys(text: str) -> list[str]:
    """The keys in what one read gave: `p`, `up`, `down`, `escape`, `enter`, …"""
    keys = []
    position = 0
    while position < len(text):
        sequence = text[position : position + 3]
        if sequence in _ESCAPES:
            keys.append(_ESCAPES[sequence])
            position += 3
        elif text[position] == "\x1b" and text[position + 1 : position + 2] in ("[", "O"):
            position = _end_of_sequence(text, position)  # a key we have no use for
        else:
            keys.append(_NAMES.get(text[position], text[position]))
            position += 1
    return keys


def _end_of_sequence(text: str, start: int) -> int:
    position = start + 2
    while position < len(text) and not ("@" <= text[position] <= "~"):
        position += 1
    return position + 1


class Keyboard:
    """Keys as they are pressed, while the block runs; the terminal is as before after it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        self._keys: asyncio.Queue[str] = asyncio.Queue()

    async def next(self, timeout_s: float | None = None) -> str | None:
        """The next key, or None when none came within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._keys.get()
        except TimeoutError:
            return None

    async def __aenter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)  # Ctrl-C still interrupts
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 64)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._keys.put_nowait("q")
            return
        for key in parse_keys(data.decode(errors="replace")):
            self._keys.put_nowait(key)

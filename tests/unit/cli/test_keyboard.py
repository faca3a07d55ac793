"""What the bytes of a terminal mean, and that the terminal is left as it was."""

from __future__ import annotations

import os
import pty
import termios

import pytest

from skyctl.cli.top import Keyboard, parse_keys


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("p", ["p"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOA", ["up"]),
        ("\x1b", ["escape"]),
        ("\r", ["enter"]),
        ("\x1b[15~q", ["q"]),  # F5 means nothing here
        ("\x1b[Cy", ["y"]),
        ("", []),
    ],
)
def test_bytes_become_keys(text: str, keys: list[str]) -> None:
    assert parse_keys(text) == keys


async def test_keys_come_without_enter_and_the_terminal_is_restored() -> None:
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        async with Keyboard(theirs) as keyboard:
            assert not termios.tcgetattr(theirs)[3] & termios.ICANON
            os.write(ours, b"p\x1b[B")
            assert [await keyboard.next(5), await keyboard.next(5)] == ["p", "down"]
            assert await keyboard.next(timeout_s=0) is None
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)


async def test_a_terminal_that_goes_away_means_quit() -> None:
    reading, writing = os.pipe()
    keyboard = Keyboard(reading)
    os.close(writing)
    try:
        keyboard._read()
        assert await keyboard.next(5) == "q"
    finally:
        os.close(reading)

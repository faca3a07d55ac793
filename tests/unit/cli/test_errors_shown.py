"""How an error looks: whole in a file, cut between words on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from skyctl import output
from skyctl.errors import SkyctlError

WORDS = "the quick brown fox jumps over the lazy dog again and again"
ERROR = SkyctlError(f"{WORDS}\nand a second line", hint=f"skyctl {WORDS}")


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> list[str]:
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=terminal, no_color=True, width=40, soft_wrap=True
    )
    monkeypatch.setattr(output, "err", console)
    output.print_error(ERROR)
    return [line.rstrip() for line in console_text(written.getvalue()).splitlines()]


def console_text(written: str) -> str:
    return written.replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_a_file_has_each_line_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=False) == [
        f"error: {WORDS}",
        "and a second line",
        f"hint: skyctl {WORDS}",
    ]


def test_a_terminal_shows_it_cut_between_words_and_commands_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(monkeypatch, terminal=True) == [
        "error: the quick brown fox jumps over",
        "       the lazy dog again and again",
        "       and a second line",
        f"hint: skyctl {WORDS}",
    ]

"""Pictures of the documentation: every one is shown somewhere, and the terminal they come from."""

from __future__ import annotations

import html
import re
from pathlib import Path
from types import ModuleType

import pytest
from rich.text import Text

from tests.unit.docs.terminal import ROOT, load_terminal

IMAGES = ROOT / "docs" / "images"
PICTURE = re.compile(r"!\[[^\]]{10,}\]\(([^)]+\.svg)\)")


def words(picture: Path) -> str:
    """What can be read in an SVG."""
    drawn = re.sub(r"<style>.*?</style>", "", picture.read_text(encoding="utf-8"), flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", "\n", drawn)).replace("\xa0", " ")


def test_every_picture_is_shown_with_words_for_who_cannot_see_it() -> None:
    shown = {
        (page.parent / found).resolve()
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for found in PICTURE.findall(page.read_text(encoding="utf-8"))
    }
    assert shown == {picture.resolve() for picture in IMAGES.glob("*.svg")}


@pytest.mark.parametrize("picture", sorted(IMAGES.glob("*.svg")), ids=lambda p: p.name)
def test_a_picture_shows_no_path_but_the_demos_and_loads_nothing(picture: Path) -> None:
    paths = re.findall(r"(?<![\w.:/])/[a-z][\w.-]*(?:/[\w.-]+)+", words(picture))
    assert [path for path in paths if not path.startswith(("/tmp/demo", "/dev/shm"))] == []
    assert "@font-face" not in picture.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def terminal() -> ModuleType:
    return load_terminal()


def test_what_is_drawn_over_is_a_frame_of_its_own(terminal: ModuleType) -> None:
    screen = terminal.Screen(40)
    screen.feed("first\r\nsecond\r\n\x1b[1A\x1b[2K\x1b[1A\x1b[2Knew\r\nlines")
    assert screen.frames == ["first\nsecond"]
    assert screen.text() == "new\nlines"


def test_colours_are_kept_and_sequences_may_be_cut_anywhere(terminal: ModuleType) -> None:
    screen = terminal.Screen(40)
    for character in "\x1b[?25l\x1b[1;32mok\x1b[0m done\x1b]8;;x\x1b\\":
        screen.feed(character)
    shown = Text.from_ansi(screen.text())
    assert shown.plain == "ok done"
    assert [(str(span.style), span.start, span.end) for span in shown.spans] == [
        ("bold color(2)", 0, 2)
    ]


def test_a_long_line_goes_on_in_the_next(terminal: ModuleType) -> None:
    screen = terminal.Screen(4)
    screen.feed("abcdef")
    assert screen.text() == "abcd\nef"

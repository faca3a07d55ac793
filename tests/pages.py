"""Blocks of pages, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def block(page: str, heading: str, language: str) -> str:
    """The first block of this language below a heading of a page in docs/."""
    _, found, below = (DOCS / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    return next(code for name, code in _FENCED.findall(below) if name == language)


def marked_blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of a page that tests of all pages leave out: the reason, and the block."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        (reason, code)
        for reason, code in re.findall(
            r"^<!-- not run: (.*) -->\n```\w+\n(.*?)^```$", text, re.M | re.S
        )
    ]

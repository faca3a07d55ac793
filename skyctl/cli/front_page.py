"""The page that `skyctl --help` prints, generated ahead so that it costs no imports.

It is written from the table of commands by scripts/generate-reference.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).with_name("front_page.txt")


def asked_for(arguments: Sequence[str]) -> bool:
    """Whether the arguments only ask for help."""
    return list(arguments) in (["--help"], ["-h"])


def page() -> str:
    """The page; headings are bold if stdout is a terminal with colours."""
    text = FILE.read_text(encoding="utf-8")
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return re.sub(r"^(\S.*):$", "\033[1m\\1:\033[0m", text, flags=re.MULTILINE)

"""Docstrings as help texts: joins their lines so that a terminal can wrap them."""

from __future__ import annotations

import inspect


def flowing(docstring: str | None) -> str:
    """Paragraphs on one line each; blocks that begin with `\\b` keep their lines."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(
        text if text.startswith("\b") else " ".join(text.split()) for text in paragraphs
    )

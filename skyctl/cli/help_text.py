"""Docstrings as help texts: their lines are joined, so that a terminal can wrap them anew."""

from __future__ import annotations

import inspect


def flowing(docstring: str | None) -> str:
    """Paragraphs on one line each; blocks that begin with `\\b` keep their lines."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(
        text if text.startswith("\b") else " ".join(text.split()) for text in paragraphs
    )

"""Turns errors of the YAML parser into a line to look at and what to change there."""

from __future__ import annotations

import re

import yaml

from skyctl.fleetfile.problems import FileProblem

_QUOTE = 'quote variables inside [ ] and { }: "${NAME}"'
_COLUMN = "keys of one mapping begin in the same column; a text with `: ` in it needs quotes"
_HINTS = (
    (re.compile(r"'\\t'"), "indent with blanks: YAML takes no tabs"),
    (re.compile(r"could not find expected ':'"), "a line reads `key: value`, a blank after `:`"),
    (re.compile(r"mapping values are not allowed|expected <block end>"), _COLUMN),
    (re.compile(r"character '[@`%]'"), "quote a value that begins with @, ` or %"),
    (re.compile(r"undefined alias"), "`*name` means an anchor; quote it if it is meant as text"),
)
_INVALID = "not valid YAML: "
_OTHERWISE = "compare it with what `skyctl init` writes"
_CLOSES = {"[": "]", "{": "}"}


def explained(error: yaml.MarkedYAMLError, text: str) -> FileProblem:
    """One problem for what the parser found in `text`."""
    said = " ".join(part for part in (error.context, error.problem) if part)
    open_end = _never_closed(said, error, text)
    if open_end is not None:
        return open_end
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    written = "".join(text.splitlines()[line - 1 : line])
    if "${" in written:
        hint = _QUOTE
    else:
        hint = next((hint for pattern, hint in _HINTS if pattern.search(said)), _OTHERWISE)
    return FileProblem(line, f"{_INVALID}{said}", hint)


def _never_closed(said: str, error: yaml.MarkedYAMLError, text: str) -> FileProblem | None:
    """A bracket or quote that the file ends without."""
    if "end of stream" not in said and "<stream end>" not in said:
        return None
    if "quoted scalar" in said and error.context_mark is not None:
        line = error.context_mark.line + 1
        return FileProblem(line, f"{_INVALID}a quote is never closed", "close it on this line")
    for line, written in reversed([*enumerate(text.splitlines(), 1)]):
        code = written.partition(" #")[0]
        opened = [sign for sign in _CLOSES if code.count(sign) > code.count(_CLOSES[sign])]
        if opened:
            sign = max(opened, key=code.rindex)
            message = f"{_INVALID}`{sign}` is never closed"
            return FileProblem(line, message, f"close it with `{_CLOSES[sign]}`")
    return None

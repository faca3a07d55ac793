"""`${VAR}` in a fleet file, and the file `.env` beside it that gives variables their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_VARIABLE = re.compile(
    r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_]\w*)(?:(?P<form>:?[-+?])(?P<word>[^}]*))?\})?"
)
_ASSIGNMENT = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*)")
_QUOTED = re.compile(r"""(?:'([^']*)'|"((?:[^"\\]|\\.)*)")\s*(?:#.*)?""")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_ESCAPE = re.compile(r"\\(.)")
_DOLLAR = "\0"
"""In place of an escaped dollar, which begins no variable; no variable has it in its value."""
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "$": _DOLLAR}
_FORMS = "write ${NAME}, ${NAME:-default} or ${NAME:?message}, or $${ for the characters themselves"

Complain = Callable[[str, str], None]
"""Takes a problem and its hint."""


def expand(text: str, environ: Mapping[str, str], complain: Complain) -> str:
    """`text` with its variables replaced, as Docker Compose does: `${X:-default}`, `${X:?message}`
    and `${X:+other}`; without the colon a variable that is set and empty counts as set.
    """

    def value(match: re.Match[str]) -> str:
        if match.group() == "$${":
            return "${"
        name, form, word = match["name"], match["form"] or "", match["word"] or ""
        if name is None or "${" in word:
            complain(f"`${{` starts a variable: {_FORMS}", "")
            return ""
        is_set = bool(environ.get(name)) if form.startswith(":") else name in environ
        if form.endswith("+"):
            return word if is_set else ""
        if is_set:
            return environ[name]
        if form.endswith("-"):
            return word
        state = "is set to nothing" if name in environ else "is not set"
        complain(
            f"the environment variable {name} {state}" + (f": {word}" if word else ""),
            f"export {name}=…, write it into .env beside the fleet file, or give a default: "
            f"${{{name}:-default}}",
        )
        return ""

    return _VARIABLE.sub(value, text)


def read_assignments(
    text: str, environ: Mapping[str, str], complain: Callable[[int, str, str], None]
) -> dict[str, str]:
    """The variables of an env file: `NAME=value` lines, `#` comments, quotes as in a shell. Values
    may use variables of earlier lines and of `environ`, which has the last word.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (stripped := line.strip()) or stripped.startswith("#"):
            continue
        assignment = _ASSIGNMENT.fullmatch(stripped)
        if assignment is None:
            complain(number, "expected NAME=value", "")
            continue
        value, quoted = assignment["value"], _QUOTED.fullmatch(assignment["value"])
        if value[:1] in ("'", '"') and quoted is None:
            complain(number, "its quote is not closed on this line", "")
            continue
        if quoted is not None and quoted[1] is not None:
            values[assignment["name"]] = quoted[1]
            continue
        if quoted is not None:
            value = _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), quoted[2])
        else:
            value = _COMMENT.sub("", value).rstrip()

        def complain_on_line(message: str, hint: str, number: int = number) -> None:
            complain(number, message, hint)

        value = expand(value, {**values, **environ}, complain_on_line)
        values[assignment["name"]] = value.replace(_DOLLAR, "$")
    return values

"""Text from others, made safe for a terminal."""

from __future__ import annotations

import re

# ECMA-48 with the 8-bit forms. A string control (DCS, SOS, OSC, PM, APC) runs to its terminator and
# no further than the line: an unterminated one must not swallow the rest.
_SEQUENCES = re.compile(
    r"(?:\x1b[PX\]^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def sanitized(text: str) -> str:
    """`text` without terminal sequences and control characters; tabs and newlines stay.

    Escape sequences in a server's answer or log could retitle the window, write the clipboard
    (OSC 52) or make the terminal type (DCS, status reports). Colours go with the rest.
    """
    if _CONTROLS.search(text) is None:
        return text
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))

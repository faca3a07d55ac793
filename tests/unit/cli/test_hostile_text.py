"""What servers and logs say cannot command the terminal that shows it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.text import Text

from skyctl import output, output_mode
from skyctl.engines.logs import tail, telling_line
from skyctl.errors import SkyctlError
from skyctl.sanitize import sanitized

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
HOSTILE = [
    (CLIPBOARD, ""),
    ("\x1b]0;title\x1b\\", ""),
    ("\x1b]8;;https://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
    ("\x1bP+q544e\x1b\\", ""),
    ("\x1b_apc\x1b\\", ""),
    ("\x1b^pm\x1b\\", ""),
    ("\x1bXsos\x1b\\", ""),
    ("\x9d52;c;ZXZpbA==\x9c", ""),
    ("\x90+q544e\x9c", ""),
    ("\x9b2J", ""),
    ("\x1b[31mred\x1b[0m", "red"),
    ("\x1b[?1049h\x1b[6n\x1b[38:2::1:2:3m", ""),
    ("\x1bc\x1b(0\x1b7", ""),
    ("\x07\x08\x0b\x0c\x0e\x7f\x00", ""),
    ("\x1b]52;c;never ended\n", "\n"),
    ("\x1b\x1b]52;c;x\x07", ""),
]
DANGEROUS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_no_sequence_survives(text: str, shown: str) -> None:
    assert sanitized(f"a{text}b") == f"a{shown}b"
    assert not DANGEROUS.search(sanitized(text[:-1]))


@pytest.mark.parametrize("text", ["plain", "tab\there\nand\n", "Grüße, 你好 🙂", "a [bold] word"])
def test_ordinary_text_stays(text: str) -> None:
    assert sanitized(text) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_that_is_printed_reaches_the_terminal_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Terminal()
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("TERM", "xterm-256color")
    output_mode.configure(command="test", json=False, color=False)
    hostile = "[/nomarkup]" + "".join(text for text, _ in HOSTILE)
    output.print_error(SkyctlError(hostile, hint=hostile))
    output.warn(hostile)
    output.note(hostile)
    output.raw(hostile)
    output.out.print(Text.assemble(("name │ ", "cyan"), hostile))
    output.out.print(output.table(["A"], [[hostile], [Text(hostile)]]))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())  # Rich's own bold
    assert not DANGEROUS.search(shown)
    assert shown.count("[/nomarkup]") == 8


def test_generated_text_goes_into_a_pipe_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    output_mode.configure(command="generate", json=False)
    output.raw(CLIPBOARD)
    assert capsys.readouterr().out == CLIPBOARD


def test_the_end_of_a_log_and_its_telling_line_are_clean(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"50%\r100%\r\n{CLIPBOARD}one\x9b2J\nValueError: {CLIPBOARD}bad\x7f\n")
    assert tail(log, 3) == ["100%", "one", "ValueError: bad"]
    assert telling_line(tail(log, 3)) == "ValueError: bad"

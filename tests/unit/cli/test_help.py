"""The help topics are complete: every word of the code they explain is in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from skyctl import errors
from skyctl.cli import app as app_module
from skyctl.cli.complete import topics
from skyctl.cli.options import PauseModeOption
from skyctl.cli.sync_weights import TransportChoice
from skyctl.errors import ExitCode
from skyctl.help import text_of
from skyctl.help import topics as known_topics
from skyctl.output import STATE_STYLES
from skyctl.store.journal import JobState
from tests.unit.cli.commands import run


def test_every_topic_is_listed_and_completed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "help")
    assert code == 0
    assert all(f"  {name} " in out for name in known_topics())
    assert topics("p") == ["pause-modes"]


def test_a_topic_is_printed_as_it_is_and_in_the_envelope(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(monkeypatch, capsys, "help", "states")
    assert out == text_of("states")
    _, out, _ = run(monkeypatch, capsys, "help", "states", "--json")
    assert json.loads(out)["data"] == {"topic": "states", "text": text_of("states")}


def test_a_commands_name_shows_its_own_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(monkeypatch, capsys, "help", "pause")
    assert "--keep-partial" in out and "Usage" in out


def test_an_unknown_topic_names_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "help", "pauses")
    assert code == ExitCode.NOT_FOUND
    assert "pause-modes" in err


def test_texts_fit_a_terminal_and_have_a_title() -> None:
    for name, title in known_topics().items():
        text = text_of(name)
        assert re.match(r"^[A-Z][\w ]+: .+$", title), name
        assert max(map(len, text.splitlines())) <= 100, name
        assert text.endswith("\n") and not text.endswith("\n\n"), name


def test_each_text_has_all_the_words_of_the_code() -> None:
    codes = text_of("exit-codes")
    assert all(re.search(rf"^ +{int(code)} ", codes, re.MULTILINE) for code in ExitCode)
    kinds = re.findall(r"\w+(?:Error|Failure|Unreachable|Exceeded)\b", codes)
    assert kinds and all(hasattr(errors, kind) for kind in kinds)
    assert all(re.search(rf"^  {mode} ", text_of("pause-modes"), re.M) for mode in PauseModeOption)
    transports = [name for name in TransportChoice if name != "auto"]
    assert all(re.search(rf"^  {name} ", text_of("transports"), re.M) for name in transports)
    states = text_of("states")
    outcomes = {"ok", "routed", "loading", "skipped", "rolled-back", "timeout"}
    documented = {
        *STATE_STYLES,
        *(state for state in JobState if state.ended),
        "healthy",
        "down",
    } - outcomes
    assert [w for w in sorted(documented) if not re.search(rf"^  {w} ", states, re.M)] == []


def test_every_command_that_a_text_mentions_exists() -> None:
    names = {verb.name for verb in app_module.VERBS}
    for topic in known_topics():
        mentioned = set(re.findall(r"(?:`|  |: )skyctl ([a-z][a-z-]+)", text_of(topic)))
        assert mentioned <= names, topic


def test_the_texts_are_part_of_the_package() -> None:
    pyproject = Path(app_module.__file__).parents[2] / "pyproject.toml"
    assert '"help/*.txt"' in pyproject.read_text()

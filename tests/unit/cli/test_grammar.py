"""One grammar for all commands: how servers, files and deadlines are typed, and help that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from skyctl.cli import app as app_module
from skyctl.cli import mistyped
from tests.unit.cli.commands import run

MOST_LINES = 90
MOST_OPTIONS_IN_A_PANEL = 8


def commands() -> Iterator[tuple[str, Any]]:
    """`jobs show` and its command, for every command."""
    app_module.register(app_module.VERBS)
    for name, command in typer.main.get_command(app_module.app).commands.items():  # type: ignore[attr-defined]
        yield name, command
        for below, inner in getattr(command, "commands", {}).items():
            yield f"{name} {below}", inner


COMMANDS = dict(commands())


def options(command: Any) -> dict[str, str]:
    """The parameter of each option as it is typed."""
    return {name: param.name for param in command.params for name in param.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_servers_files_and_deadlines_are_typed_the_same_way(name: str) -> None:
    typed = options(COMMANDS[name])
    assert typed.get("-f") in (None, "file")
    assert ("-f" in typed) == ("--file" in typed)
    # the argument of `generate` is the prompt
    assert ("--server" in typed) == (name == "generate")
    assert not {option for option in typed if option.endswith("timeout")} - {
        "--timeout",
        "--drain-timeout",  # the fleet file's drain_timeout_s, for once
    }


@pytest.mark.parametrize("name", ["pause", "resume", "sleep", "wake", "wait", "restart", "logs"])
def test_a_command_about_some_servers_takes_their_names(name: str) -> None:
    arguments = [p for p in COMMANDS[name].params if p.param_type_name == "argument"]
    assert [(p.metavar, p.nargs) for p in arguments] == [("SERVER", -1)]
    assert name in mistyped.TAKES_SERVERS


@pytest.mark.parametrize("name", ["up", "validate", "plan"])
def test_a_command_about_the_file_takes_its_path(name: str) -> None:
    assert [p.metavar for p in COMMANDS[name].params if p.param_type_name == "argument"] == ["FILE"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_is_short_and_grouped(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, page, _ = run(monkeypatch, capsys, *name.split(), "--help")
    assert code == 0
    lines = page.splitlines()
    assert len(lines) <= MOST_LINES
    examples = [line for part in COMMANDS[name].help.split("\b")[1:] for line in part.split("\n")]
    written = {line.strip() for line in lines}
    assert not [line for line in examples if line.strip() and line.strip() not in written]
    assert any(line.strip().startswith("skyctl ") for line in examples)
    # what explains an example is a comment for the shell that it is pasted into
    assert not [line for line in examples if re.search(r"\S {2,}[^# ]", line)]
    # what an option takes stands on one line
    words = set(page.split())
    kinds = {word for p in COMMANDS[name].params if p.metavar for word in p.metavar.split()}
    assert {kind for kind in kinds if kind not in words} <= {"ID", "N", "TOPIC"}, words
    shown = 0
    for line in lines:
        assert not re.search(r"<[a-z-]+[|][^>]*$", line), line
        shown = 0 if line.startswith("╭") else shown + line.startswith(("│ --", "│ *"))
        assert shown <= MOST_OPTIONS_IN_A_PANEL, line

"""What is read from the arguments before any command runs."""

from __future__ import annotations

import pytest

from skyctl.cli.app import flowing
from skyctl.cli.arguments import command_name, given, options_first
from skyctl.cli.mistyped import explain

GROUPS = {"jobs": {"show", "wait"}, "weights": {"verify"}}


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("status -q", "-q status"),
        ("jobs --no-color show push-1 --quiet", "--no-color --quiet jobs show push-1"),
        ("-q status", "-q status"),
        ("generate -- -q", "generate -- -q"),
        ("status --debug --json", "--debug status --json"),
    ],
)
def test_options_of_every_command_may_stand_anywhere(typed: str, read: str) -> None:
    assert options_first(typed.split()) == read.split()


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("status", "status"),
        ("-q jobs show push-1", "jobs show"),
        ("jobs --fleet x show push-1", "jobs show"),
        ("jobs", "jobs"),
        ("status show", "status"),
        ("weights verify --json", "weights verify"),
        ("--version", "skyctl"),
        ("", "skyctl"),
    ],
)
def test_the_commands_name_is_found(typed: str, name: str) -> None:
    assert command_name(typed.split(), GROUPS) == name


def test_words_after_two_dashes_are_not_options() -> None:
    assert given("--json", ["status", "--json"])
    assert not given("--json", ["generate", "--", "--json"])


def test_help_texts_flow_but_examples_keep_their_lines() -> None:
    def command() -> None:
        """First line.

        A paragraph that is
        longer.

        \b
        Examples:
          skyctl x
        """

    assert flowing(command.__doc__) == (
        "First line.\n\nA paragraph that is longer.\n\n\b\nExamples:\n  skyctl x"
    )
    assert flowing(None) == ""


@pytest.mark.parametrize(
    ("complaint", "command", "message", "hint"),
    [
        (
            "No such command 'statsu'. Did you mean 'status', 'restart'?",
            "",
            "no such command 'statsu'",
            "did you mean status, restart?",
        ),
        (
            "Got unexpected extra argument(s) (demo)",
            "status",
            "got unexpected extra argument(s) (demo)",
            "a fleet is named with: --fleet demo; all options: skyctl status --help",
        ),
        ("No such option: -f", "", "no such option: -f", None),
        (
            "No such option: --file (Possible options: --quiet, --token-file)",
            "",
            "no such option: --file",
            "it goes behind the command, as in: skyctl status --file FILE",
        ),
        (
            "No such option: --model (Possible options: --help)",
            "up",
            "no such option: --model",
            "`model:` in the fleet file",
        ),
        (
            "No such command 'list'.",
            "jobs",
            "no such command 'list'",
            "its commands: skyctl jobs --help",
        ),
        (
            "No such command 'list'. Did you mean 'ls'?",
            "tinker",
            "no such command 'list'",
            "did you mean ls?",
        ),
        (
            "Invalid value for '--mode': Value error, 'kepe' is not one of 'abort', 'wait'.",
            "pause",
            "invalid value for '--mode': 'kepe' is not one of 'abort', 'wait'",
            "skyctl pause --help",
        ),
    ],
)
def test_the_parsers_complaints_become_one_line_and_a_hint(
    complaint: str, command: str, message: str, hint: str | None
) -> None:
    message_and_hint = explain(complaint, command)
    assert message_and_hint[0] == message
    assert (
        message_and_hint[1] == hint
        if hint is not None
        else "skyctl status -f" in message_and_hint[1]
    )

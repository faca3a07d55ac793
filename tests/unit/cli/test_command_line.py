"""What is read from the arguments before any command runs."""

from __future__ import annotations

import pytest

from skyctl.cli.command_line import command_name, given, options_first
from skyctl.cli.help_text import flowing

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


def test_what_comes_after_two_dashes_is_no_option() -> None:
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

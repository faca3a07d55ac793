"""What describes the commands and the site: nothing is missing, and nothing is twice."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from skyctl import __main__ as entry
from skyctl.cli import app as app_module

ROOT = Path(__file__).parents[3]


def test_the_front_page_fits_a_terminal_and_names_every_command() -> None:
    page = entry.FRONT_PAGE.read_text()
    assert {verb.name for verb in app_module.VERBS} <= set(re.findall(r"^  ([\w-]+) ", page, re.M))
    assert max(map(len, page.splitlines())) <= 110


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_help_and_no_command_print_the_front_page(
    arguments: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["skyctl", *arguments])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == code
    assert capsys.readouterr().out == entry.FRONT_PAGE.read_text()


def test_every_page_of_the_site_is_in_its_navigation_and_the_other_way_round() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"\S+\.md$", config, re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert named == pages


def test_no_two_pages_of_the_site_are_called_the_same() -> None:
    entries = re.findall(r"^ *- (.+): \S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(entries) > 10 and len(set(entries)) == len(entries)

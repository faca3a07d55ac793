"""Every block of the page for trainers is run: files are read here, the rest by tests it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyctl.fleetfile.load import load_fleet
from tests.pages import DOCS, marked_blocks

PAGE = "trainers.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")
ROOT = DOCS.parent
MARKED = marked_blocks(PAGE)


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.M | re.S))
def test_a_fleet_file_of_the_page_is_valid(text: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    assert load_fleet(file).config.name == "rollouts"


@pytest.mark.parametrize("number", range(len(MARKED)))
def test_a_test_runs_each_block_that_tests_of_all_pages_leave_out(number: int) -> None:
    reason, _ = MARKED[number]
    tests = re.findall(r"tests/\S+\.py", reason)
    assert tests, f"no test runs it: {reason}"
    for path in tests:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f'block("{PAGE}"' in source or "own_sender" in source, path

"""tests/failure-matrix.md: every cell names a test that exists, and there are enough of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.conftest import COLLECTED

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "tests" / "failure-matrix.md"
HEADER = "| command | fault | what holds | test | servers |"
AT_LEAST = 60


@dataclass(frozen=True)
class Row:
    """One line of a table: a fault that each of `commands` meets."""

    commands: tuple[str, ...]
    fault: str
    holds: str
    test: str
    servers: str


def rows() -> list[Row]:
    found, inside = [], False
    for line in PAGE.read_text().splitlines():
        inside = line == HEADER or (inside and line.startswith("|"))
        if not inside or line == HEADER or set(line) <= set("|-"):
            continue
        commands, fault, holds, test, servers = (c.strip() for c in line.strip("|").split(" | "))
        found.append(Row(tuple(commands.split(", ")), fault, holds, test.strip("`"), servers))
    return found


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> list[str]:
    """Every test in the files that the page names, as `faults/…::name[…]`: collecting them again
    takes longer than all of this file's tests.
    """
    files = {f"tests/{row.test.partition('::')[0]}" for row in rows()}
    found = request.config.stash[COLLECTED]
    if not files <= {test.partition("::")[0] for test in found}:
        found = collected_anew(files)
    return [test.removeprefix("tests/") for test in found]


def collected_anew(files: Collection[str]) -> list[str]:
    quietly = ["--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *quietly, *sorted(files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


def matching(row: Row, collected: list[str]) -> list[str]:
    pattern = row.test.replace("[", "[[]")
    return [test for test in collected if fnmatchcase(test, pattern)]


def test_every_row_names_a_test_that_exists(collected: list[str]) -> None:
    missing = [row.test for row in rows() if not matching(row, collected)]
    assert missing == []


def test_a_row_of_several_commands_has_a_test_for_each(collected: list[str]) -> None:
    for row in rows():
        if "*" in row.test:
            assert len(matching(row, collected)) >= len(row.commands), row


def test_there_are_enough_cells_and_none_twice() -> None:
    found = rows()
    assert sum(len(row.commands) for row in found if row.commands != ("any",)) >= AT_LEAST
    twice = [test for test, count in Counter(row.test for row in found).items() if count > 1]
    # one test may show two sides of one fault, to different commands
    shown = {(row.test, row.commands) for row in found}
    assert len(shown) == len(found), twice


def test_every_matrix_test_is_in_the_page(collected: list[str]) -> None:
    """A new cell that nobody lists would not be found by who reads the page."""
    own = [test for test in collected if test.startswith("faults/test_matrix_")]
    listed = {test for row in rows() for test in matching(row, collected)}
    bare = {re.sub(r"\[.*", "", test) for test in listed}
    assert [test for test in own if re.sub(r"\[.*", "", test) not in bare] == []

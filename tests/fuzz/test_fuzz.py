"""A sample of what `python -m benchmarks.fuzz` does by the ten thousand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.fuzz import fuzz
from skyctl.errors import FleetFileError, SkyctlError
from skyctl.fleetfile.load import parse_fleet
from tests.fuzz.inputs import CASES, WRITTEN, TooSlow, run_case

SAMPLE = {"fleet file": 100, "state file": 100}


@pytest.mark.parametrize("kind", CASES)
def test_an_input_is_accepted_or_refused_in_one_line_and_nothing_else(kind: str) -> None:
    found = fuzz(kind, SAMPLE.get(kind, 300))
    assert found["harm"] == 0, found["examples"]
    assert found["refused"] > 0
    assert found["accepted"] > 0


def test_what_fleet_files_are_mutated_from_is_accepted() -> None:
    assert parse_fleet(WRITTEN.decode(), Path("f"), {})


def test_a_fleet_file_of_very_many_lines_is_given_up_where_it_becomes_too_long() -> None:
    with pytest.raises(FleetFileError, match=r"^f:10000: .*too large"):
        parse_fleet("a: b\n" * 200_000, Path("f"), {})


def test_a_traceback_an_endless_case_and_a_refusal_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traceback(dice: random.Random, directory: Path) -> None:
        raise KeyError("x")

    def endless(dice: random.Random, directory: Path) -> None:
        while True:
            pass

    def refused(dice: random.Random, directory: Path) -> None:
        raise SkyctlError("no")

    for case in (traceback, endless, refused):
        monkeypatch.setitem(CASES, case.__name__, case)
    assert fuzz("traceback", 2)["harm"] == 2
    assert fuzz("refused", 2)["refused"] == 2
    with pytest.raises(TooSlow):
        run_case("endless", 0, tmp_path, timeout_s=0.05)

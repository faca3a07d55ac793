"""docs/bounds.md: its defaults are the code's, and its worst cases follow from them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from skyctl.fleetfile.schema import FleetConfig
from tests.unit.docs.bounds import constant, default, evaluated, fixed, names, settable, worst


def seconds_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a schema that is a time in seconds."""
    for name, field in model.model_fields.items():
        found = [t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if t]
        for kind in found:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from seconds_keys(kind, f"{prefix}{name}.")
        if name.endswith("_s"):
            yield prefix + name


@pytest.mark.parametrize("row", settable(), ids=lambda row: row[1])
def test_a_default_is_that_of_the_schema(row: list[str]) -> None:
    assert default(row[1]) == float(row[2])


@pytest.mark.parametrize("row", fixed(), ids=lambda row: row[1])
def test_a_fixed_deadline_is_that_of_the_code(row: list[str]) -> None:
    assert constant(row[1]) == float(row[2])


@pytest.mark.parametrize("row", worst(), ids=lambda row: row[0])
def test_a_worst_case_follows_from_the_deadlines(row: list[str]) -> None:
    known = names()
    assert evaluated(row[2], known) == float(row[3])


def test_every_time_of_the_fleet_file_is_in_the_page() -> None:
    windows = {"restart.window_s", "scale.up_after_s", "scale.down_after_s", "scale.sleep_s"}
    listed = {row[1] for row in settable()} | windows  # which nothing waits for
    assert set(seconds_keys(FleetConfig)) <= listed

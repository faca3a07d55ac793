"""docs/bounds.md: its defaults are the code's, and its worst cases follow from them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from skyctl.fleetfile.schema import FleetConfig

PAGE = Path(__file__).parents[3] / "docs" / "bounds.md"


def table(header: str) -> list[list[str]]:
    """Cells of the rows under a table's header line, backticks removed."""
    lines = iter(PAGE.read_text().splitlines())
    for line in lines:
        if line == header:
            break
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.split("|")[1:-1]])
    assert rows, header
    return rows


def settable() -> list[list[str]]:
    return table("| wait | fleet file | default (s) | option |")


def fixed() -> list[list[str]]:
    return table("| wait | in the code | seconds |")


def worst() -> list[list[str]]:
    return table("| command | ends with | worst case | at the defaults (s) |")


def default(key: str) -> float:
    """Default of a dotted key of the fleet file."""
    file = {"name": "f", "model": "m", "lora": {"max_rank": 32}, "tinker": {}}
    value: Any = FleetConfig.model_validate(file)
    for part in key.split("."):
        value = getattr(value, part)
    return float(value)


def constant(path: str) -> float:
    module, _, name = path.rpartition(".")
    return float(getattr(importlib.import_module(module), name))


def seconds_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a schema that is a time in seconds."""
    for name, field in model.model_fields.items():
        found = [t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if t]
        for kind in found:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from seconds_keys(kind, f"{prefix}{name}.")
        if name.endswith("_s"):
            yield prefix + name


def names() -> dict[str, float]:
    """What the formulas may name: the keys' last parts, the constants, and how many probes."""
    found = {row[1].rpartition(".")[2]: default(row[1]) for row in settable()}
    found |= {row[1].rpartition(".")[2]: constant(row[1]) for row in fixed()}
    found["failures"] = default("health.failures")
    return found


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


def evaluated(formula: str, known: dict[str, float]) -> float:
    """Sums and products of known names and numbers."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        if isinstance(node, ast.Name):
            return known[node.id]
        assert isinstance(node, ast.Constant)
        return float(node.value)

    return value(ast.parse(formula, mode="eval").body)

"""The tables of docs/bounds.md, and what their formulas come to."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

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


def names() -> dict[str, float]:
    """What the formulas may name: the keys' last parts, the constants, and how many probes."""
    found = {row[1].rpartition(".")[2]: default(row[1]) for row in settable()}
    found |= {row[1].rpartition(".")[2]: constant(row[1]) for row in fixed()}
    found["failures"] = default("health.failures")
    return found


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

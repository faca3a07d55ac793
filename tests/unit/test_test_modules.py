"""Test modules share nothing directly: what two of them need is in a helper module."""

import ast
from pathlib import Path

import pytest

from tests.conftest import IMPORTED

TESTS = Path(__file__).parents[1]


def test_no_test_module_is_imported() -> None:
    imported = [
        f"{path.relative_to(TESTS)}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        for name in [f"{getattr(node, 'module', '')}.{alias.name}"]
        if any(part.startswith("test_") for part in name.split("."))
    ]
    assert imported == []


def test_no_test_module_imports_what_takes_seconds_in_each_worker(
    request: pytest.FixtureRequest,
) -> None:
    """Each of pytest-xdist imports all of them; the fixture `vllm` does it where a test runs."""
    assert request.config.stash[IMPORTED] & {"vllm", "transformers"} == set()

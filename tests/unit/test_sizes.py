"""Functions, modules and test modules are short enough to be read at once."""

import ast
from itertools import pairwise
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "skyctl"
MOST_IN_FUNCTION = 50  # without its signature and its docstring
MOST_IN_MODULE = 400  # without the sentences under fields
MOST_IN_TEST_MODULE = 500
LONG_MODULES = {
    "engines/inside/guard.py": "one file, which servers of other interpreters load by itself",
    "push/delivery.py": "one way of delivery, step by step",
    "store/database.py": "one connection: a file, and the memory that stands in for it",
    "supervisor/resident.py": "each verb of a supervisor, a method",
    "supervisor/trainer_api.py": "each request of a trainer, a method",
}


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of its body."""
    first = node.body[1:2] if ast.get_docstring(node) is not None else node.body[:1]
    return 1 + (node.end_lineno or 0) - first[0].lineno if first else 0


def sentences(tree: ast.Module) -> int:
    """The lines of the strings that follow fields and constants."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
    pairs = [pair for body in bodies for pair in pairwise(body)]
    return sum(
        1 + (below.end_lineno or 0) - below.lineno
        for above, below in pairs
        if isinstance(above, ast.AnnAssign | ast.Assign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    )


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {lines_of(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and lines_of(node) > MOST_IN_FUNCTION
    ]
    assert long == []


def test_modules_are_short_but_for_those_with_a_reason() -> None:
    long = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") - sentences(ast.parse(text)) > MOST_IN_MODULE:
            long.add(str(path.relative_to(PACKAGE)))
    assert long == LONG_MODULES.keys()


def test_test_modules_are_short() -> None:
    lengths = {path: path.read_bytes().count(b"\n") for path in TESTS.rglob("test_*.py")}
    long = [path for path, length in lengths.items() if length > MOST_IN_TEST_MODULE]
    assert long == []

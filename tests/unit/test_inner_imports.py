"""Imports stand at the top of a module, unless they would be loaded where they are not needed.

What may stand inside a function: packages that are heavy or optional, the parts of a command that
its `--help` does without, and what only one verb of many needs. Never a module that is loaded
anyway by the time the function's own module is.
"""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "skyctl"
SLOW = {"asyncio", "ctypes", "importlib", "multiprocessing", "sqlite3"}  # of the standard library
MOST_PER_1000_LINES = 4  # of skyctl's own modules
MOST_OF_A_PUSH = 70  # modules


@cache
def tree(module: str) -> ast.Module | None:
    """The parsed module of skyctl; None for another name."""
    path = ROOT / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def loaded_by(statement: ast.stmt) -> set[str]:
    """The modules that an import names."""
    match statement:
        case ast.Import(names=names):
            return {alias.name for alias in names}
        case ast.ImportFrom(module=str(module), names=names):
            below = {f"{module}.{alias.name}" for alias in names}
            return {module, *(name for name in below if tree(name) is not None)}
    return set()


@cache
def at_import(module: str) -> frozenset[str]:
    """What the module itself imports when it is imported."""
    found = tree(module)
    parents = {module[:at] for at, sign in enumerate(module) if sign == "."}
    names = set().union(*map(loaded_by, found.body)) if found else set()
    return frozenset(names | parents)


@cache
def closure(module: str) -> frozenset[str]:
    """All of skyctl that is loaded once the module is."""
    seen, waiting = {module}, [module]
    while waiting:
        for name in at_import(waiting.pop()):
            if name not in seen:
                seen.add(name)
                if tree(name) is not None:
                    waiting.append(name)
    return frozenset(seen)


def inner_imports() -> list[tuple[str, int, ast.stmt]]:
    """Each import inside a function: its module, line and statement."""
    rows = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        rows[module, node.lineno] = node
    return [(module, line, node) for (module, line), node in sorted(rows.items())]


def is_needless(module: str, statement: ast.stmt) -> bool:
    """Whether all that it imports is loaded already, or costs nothing."""
    loaded = closure(module)
    if module.startswith("skyctl.cli."):
        loaded |= closure("skyctl.cli.app")  # which loads them
    cheap = sys.stdlib_module_names - SLOW
    return all(name in loaded or name.partition(".")[0] in cheap for name in loaded_by(statement))


def test_an_import_inside_a_function_spares_something() -> None:
    needless = [
        f"{module}:{line} {ast.unparse(node)}"
        for module, line, node in inner_imports()
        if is_needless(module, node)
    ]
    assert needless == []


def test_imports_inside_functions_are_few() -> None:
    lines = sum(path.read_bytes().count(b"\n") for path in PACKAGE.rglob("*.py"))
    own = [row for row in inner_imports() if any(map(tree, loaded_by(row[2])))]
    assert len(own) <= MOST_PER_1000_LINES * lines / 1000


def test_a_push_loads_few_modules() -> None:
    """As it does from the files of a checkpoint, on this machine and without a trial."""
    loaded = [module for module in closure("skyctl.push.transaction") if tree(module) is not None]
    assert len(loaded) <= MOST_OF_A_PUSH, sorted(loaded)

"""A dataclass of five or more fields says in a sentence below each what it holds; few are large."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "skyctl"
FEW = 5
MANY = 15
MOST_LARGE = 6
LARGE = {
    "core/status.py ReplicaStatus": "a server's row of `skyctl status`, with the keys of its JSON",
    "core/status.py FleetStatus": "the result of `skyctl status`, with the keys of its JSON",
    "core/tinker.py TinkerSettings": "what one process is started with, as its one argument",
    "push/request.py PushRequest": "the options of `sync-weights`, with the keys of a job's JSON",
    "push/request.py PushResult": "the result of a push, with the keys of its JSON",
}
"""Dataclasses of many fields, each with the reason that it is one thing to its users."""


def is_dataclass(node: ast.ClassDef) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(isinstance(d, ast.Name) and d.id == "dataclass" for d in decorators)


def number_of_fields(node: ast.ClassDef, module: ast.Module) -> int:
    """With those of its bases in the same module."""
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    return sum(isinstance(part, ast.AnnAssign) for part in node.body) + sum(
        number_of_fields(base, module)
        for base in module.body
        if isinstance(base, ast.ClassDef) and base.name in bases
    )


def bare_fields(node: ast.ClassDef) -> list[str]:
    """The fields of a class that no string follows."""
    following = [*node.body[1:], ast.Pass()]
    return [
        field.target.id
        for field, below in zip(node.body, following, strict=True)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and field.target.id != "_"
        and not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
    ]


def undescribed() -> list[str]:
    """Each class of five or more fields that has bare ones, and which."""
    rows = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or not is_dataclass(node):
                continue
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            if len(fields) >= FEW and (bare := bare_fields(node)):
                rows.append(f"{relative}:{node.lineno} {node.name} {bare}")
    return rows


def test_each_field_has_a_sentence_below_it() -> None:
    assert undescribed() == []


def test_few_dataclasses_have_many_fields_each_with_a_reason() -> None:
    large = set()
    for path in PACKAGE.rglob("*.py"):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(module):
            if not isinstance(node, ast.ClassDef) or not is_dataclass(node):
                continue
            if number_of_fields(node, module) >= MANY:
                large.add(f"{path.relative_to(PACKAGE)} {node.name}")
    assert large == LARGE.keys()
    assert len(large) <= MOST_LARGE

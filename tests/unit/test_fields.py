"""A dataclass of five or more fields says in a sentence below each what it holds."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "skyctl"
FEW = 5


def is_dataclass(node: ast.ClassDef) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(isinstance(d, ast.Name) and d.id == "dataclass" for d in decorators)


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

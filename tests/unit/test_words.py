"""Names are the field's nouns and verbs, not pronouns."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "skyctl"
# fmt: off
BANNED = frozenset({
    "one", "found", "asked", "said", "told", "known", "wanted", "meant", "held", "left",
    "rest", "of", "who", "what", "why", "here", "there", "settle", "say", "hear", "look",
    "tell", "trust", "doubt", "weigh", "hurry", "leave", "come_to", "spoken",
})
# fmt: on


def assigned(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of all that `tree` defines or assigns, parameters and `self.x` included."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append((node.lineno, node.name))
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.append((node.lineno, name))
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.MatchAs(name=str(name)):
                names.append((node.lineno, name))
            case ast.ExceptHandler(name=str(name)) if name != "why":
                names.append((node.lineno, name))
    return names


def banned() -> list[str]:
    """Each banned name, as `path:line name`. A leading underscore does not help."""
    return [
        f"{path}:{line} {name}"
        for path in sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py"))
        for line, name in assigned(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))
        if name.lstrip("_") in BANNED
    ]


def test_no_name_is_banned() -> None:
    assert banned() == []

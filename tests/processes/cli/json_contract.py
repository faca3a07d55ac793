"""docs/json.md as a specification: read its tables, and compare a document with one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[3] / "docs" / "json.md"
_SECTION = re.compile(
    r"^### (?P<title>.+?)\n\n```text\n(?P<table>.*?)```", re.MULTILINE | re.DOTALL
)
_LINE = re.compile(r"^(?P<path>\.\.\.\w+|[\w.*\[\]{}-]+\??)(?:: (?P<type>\w+))?(?:  .*)?$")


@dataclass
class Node:
    """What is known of one value: its keys, whether it is a list of such, and how strict to be."""

    keys: dict[str, Node] = field(default_factory=dict)
    many: bool = False
    optional: bool = False
    free: bool = False


def tables(text: str) -> dict[str, str]:
    """The table of each object and of each command (a heading may name several)."""
    found = {}
    for match in _SECTION.finditer(text):
        for title in match["title"].split(", "):
            found[title] = match["table"]
    return found


def specification(title: str, all_tables: dict[str, str]) -> Node:
    """One table as a tree, with the objects that it refers to."""
    root = Node()
    for line in all_tables[title].splitlines():
        match = _LINE.match(line)
        assert match is not None, f"docs/json.md, {title}: {line!r}"
        path = match["path"]
        if path.startswith("..."):
            root.keys |= specification(path[3:], all_tables).keys
            continue
        leaf = _place(root, path)
        if match["type"]:
            leaf.keys |= specification(match["type"], all_tables).keys
    return root


def _place(root: Node, path: str) -> Node:
    node = parent = root
    for part in path.removesuffix("?").split("."):
        parent, name = node, part.removesuffix("[]").removesuffix("{}")
        node = node.keys.setdefault(name, Node())
        node.many = node.many or part.endswith("[]")
        node.free = node.free or part.endswith("{}")
    if path.endswith("?"):
        # a mapping from names may be empty anyway: with `topics.*?`, all of it may be absent
        (parent if path.endswith(".*?") else node).optional = True
    return node


def differences(value: Any, node: Node, where: str = "data") -> list[str]:
    """Keys that are not in the specification, or missing. Null is always allowed."""
    if value is None or node.free or not node.keys:
        return []
    if node.many:
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [d for member in value for d in differences(member, _one(node), f"{where}[]")]
    if not isinstance(value, dict):
        return [f"{where} is no object"]
    if "*" in node.keys:
        return [d for k, v in value.items() for d in differences(v, node.keys["*"], f"{where}.*")]
    found = [f"{where}.{key} is not documented" for key in value if key not in node.keys]
    for key, below in node.keys.items():
        if key in value:
            found += differences(value[key], below, f"{where}.{key}")
        elif not below.optional:
            found.append(f"{where}.{key} is missing")
    return found


def _one(node: Node) -> Node:
    return Node(node.keys)

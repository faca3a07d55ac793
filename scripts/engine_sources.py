"""The Python sources of an engine's wheel, read without importing them."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Collection, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

_DECORATORS = {"get", "post", "put", "delete", "api_route", "websocket"}
_MOUNTS = {"add_api_route", "mount", "Mount", "Route"}
_ROUTING = re.compile(
    r"@\w+\.(get|post|put|delete|api_route|websocket)\(|\.(add_api_route|mount)\(|\b(Route|Mount)\("
)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


class Wheel:
    """The Python sources of one release."""

    def __init__(self, path: Path, package: str) -> None:
        self._zip = zipfile.ZipFile(path)
        self.package = package
        names = self._zip.namelist()
        self.files = [n for n in names if n.startswith(f"{package}/") and n.endswith(".py")]
        self.modules = {n[:-3].replace("/", ".").removesuffix(".__init__"): n for n in self.files}
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        lines = self._zip.read(metadata).decode().splitlines()
        self.version = next(x.partition(":")[2].strip() for x in lines if x.startswith("Version:"))
        self.requires = {
            x.partition(":")[2].strip() for x in lines if x.startswith("Requires-Dist:")
        }

    @cache  # noqa: B019 - a wheel lives as long as the process
    def text(self, file: str) -> str:
        return self._zip.read(file).decode("utf-8", "replace")

    @cache  # noqa: B019 - as above
    def tree(self, file: str) -> ast.Module:
        return ast.parse(self.text(file))

    def definition(self, module: str, name: str, depth: int = 4) -> Any:
        """A class, function or assignment, also one that a module re-exports; the module's name if
        `name` is a module; None if it is neither.
        """
        top, _, member = name.partition(".")
        file = self.modules.get(module)
        if file is None or not depth:
            return None
        nodes = definitions(self.tree(file))
        if top in nodes:
            node = nodes[top]
            return definitions(node).get(member) if member else node
        if f"{module}.{top}" in self.modules:
            return f"{module}.{top}"
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == top:
                        up = package.split(".")[: len(package.split(".")) - node.level + 1]
                        source = ".".join([*up, *filter(None, [node.module])])
                        source = source if node.level else node.module or ""
                        full = f"{alias.name}.{member}" if member else alias.name
                        return self.definition(source, full, depth - 1)
        return None

    @cached_property
    def names(self) -> set[str]:
        """All functions and attributes that the sources define."""
        pattern = re.compile(r"\bdef (\w+)\(|\bself\.(\w+)(?:: [^=\n]+)? = |^    (\w+): ", re.M)
        return {
            name
            for file in self.files
            for each in pattern.findall(self.text(file))
            for name in each
        }

    def homes(self, name: str) -> list[str]:
        """Modules that define `name` at the top."""
        pattern = re.compile(
            rf"^(?:async def|def|class) {re.escape(name)}\b|^{re.escape(name)} =", re.M
        )
        return [module for module, file in self.modules.items() if pattern.search(self.text(file))]

    def routes(self, places: Collection[str]) -> set[str]:
        """Paths of the routes below `places`, with `{}` for a segment that varies."""
        paths = set[str]()
        for file in self.files:
            if file.startswith(tuple(places)) and _ROUTING.search(self.text(file)):
                paths |= _routes(self.tree(file))
        return paths

    def arguments(self, places: Collection[str]) -> set[str]:
        """Names of command-line options, without dashes."""
        names = set[str]()
        for file in self.files:
            if not file.startswith(tuple(places)):
                continue
            for node in ast.walk(self.tree(file)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names |= set(re.findall(r"^--([a-z][a-z0-9-]+)$", node.value))
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id.replace("_", "-"))
        return names

    def metrics(self, prefix: str) -> set[str]:
        """Names of metrics; a counter's without `_total`."""
        pattern = re.compile(rf"[\"']({re.escape(prefix)}[a-z0-9_]+)[\"']")
        found = {name for file in self.files for name in pattern.findall(self.text(file))}
        return {name.removesuffix("_total") for name in found}

    def mentions(self, text: str) -> set[str]:
        """Files that have the text."""
        return {file for file in self.files if text in self.text(file)}

    def says(self, message: str) -> bool:
        """Whether a text of the sources has these words, also if it is broken over lines."""
        if any(message in self.text(file) for file in self.files):
            return True
        first = message.split()[0]
        texts = (self.tree(file) for file in self.files if first in self.text(file))
        return any(message in text for tree in texts for text in strings(tree))


def definitions(tree: ast.AST) -> dict[str, Definition]:
    """What a module or class defines, also below `if` and `try`, but not within functions."""
    nodes: dict[str, Definition] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            nodes[node.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                # a class that is wrapped under its own name stays the class
                if isinstance(target, ast.Name):
                    nodes.setdefault(target.id, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            nodes[node.target.id] = node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            nodes |= definitions(node)
    return nodes


def strings(tree: ast.AST) -> Iterator[str]:
    """All texts in the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _routes(tree: ast.AST) -> set[str]:
    calls = [call for node in ast.walk(tree) for call in getattr(node, "decorator_list", ())]
    calls = [c for c in calls if isinstance(c, ast.Call) and _called(c) in _DECORATORS]
    calls += [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n) in _MOUNTS]
    texts = (text for call in calls for argument in call.args[:1] for text in strings(argument))
    return {re.sub(r"\{[^}]*\}", "{}", t).rstrip("/") or "/" for t in texts if t.startswith("/")}


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def plain(node: Any) -> str:
    """The code without comments and docstrings."""
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if isinstance(body, list) and body and isinstance(inner, _WITH_DOCSTRINGS):
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                inner.body = body[1:] or [ast.Pass()]
    return ast.unparse(node)


_WITH_DOCSTRINGS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def changed_bases(old: ast.ClassDef, new: ast.ClassDef) -> str:
    """The bases of a class before and after; "" if they are the same."""
    before, after = (", ".join(map(ast.unparse, [*node.bases])) for node in (old, new))
    return "" if before == after else f"bases ({before}) → ({after})"


def changed_form(old: Any, new: Any) -> str:
    """Which members of a class differ, or how a function is called now; "" if only code differs."""
    if type(old) is not type(new):
        return f"{_form(old)} → {_form(new)}"
    if isinstance(old, ast.ClassDef):
        before, after = (
            {name: plain(member) for name, member in definitions(node).items()}
            for node in (old, new)
        )
        return _named_differences(before, after)
    if not isinstance(old, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    decorators = [
        " ".join(f"@{ast.unparse(x)}" for x in node.decorator_list) for node in (old, new)
    ]
    if decorators[0] != decorators[1]:
        return f"{decorators[0] or 'no decorator'} → {decorators[1] or 'no decorator'}"
    return _named_differences(_parameters(old), _parameters(new))


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return " ".join(f"@{ast.unparse(each)}" for each in node.decorator_list) or "no decorator"


def _form(node: Any) -> str:
    return type(node).__name__.removesuffix("Def").lower()


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    given = node.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {parameter.arg: "" for parameter in parameters if parameter is not None}


def _named_differences(before: dict[str, str], after: dict[str, str]) -> str:
    both = before.keys() & after.keys()
    changed = {name for name in both if before[name] != after[name]}
    signs = (("+", after.keys() - both), ("−", before.keys() - both), ("~", changed))
    return ", ".join(f"{sign}{name}" for sign, names in signs for name in sorted(names))

"""Parses YAML into plain values that remember their files and lines; later files override."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import yaml

from skyctl.fleetfile.variables import expand

Location = tuple[str | int, ...]

INIT_HINT = "write a first fleet file with: skyctl init"
# aliases can make a small file expand enormously; a fleet file has a few hundred nodes
MOST_NODES = 20_000
_DEEPEST = 40
_LONGEST_VALUE = 60

# written as an escape; no argument, path or variable of a process can hold it
_UNUSABLE = re.compile(r"[\0\ud800-\udfff]")
_MERGE_TAG = "tag:yaml.org,2002:merge"
_TEXT_TAG = "tag:yaml.org,2002:str"
_NULL_TAG = "tag:yaml.org,2002:null"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"


class Place(NamedTuple):
    """A line of a file, from 1; `number` is that of the file among those that are read together."""

    number: int
    line: int
    file: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class FileProblem(NamedTuple):
    """One thing to correct."""

    place: Place
    message: str
    hint: str = ""


@dataclass
class YamlSource:
    """The content of a file, or of several of which later ones override."""

    start: Place
    """The first line of the first file."""
    text: str = ""
    """YAML of the same content, with variables as they are written."""
    value: Any = None
    """The content, with the values of variables."""
    places: dict[Location, Place] = field(default_factory=dict)
    """Where every key and list item is."""
    problems: list[FileProblem] = field(default_factory=list)
    """What is wrong with it."""
    root: yaml.MappingNode | None = None
    """The content as the YAML parser has it."""

    def place(self, location: Location) -> Place:
        """Place of the key or item at `location`, or of the nearest enclosing one."""
        while location and location not in self.places:
            location = location[:-1]
        return self.places.get(location, self.start)

    def overridden_by(self, other: YamlSource) -> YamlSource:
        """Mappings are merged, lists and other values replaced. Both sources are without
        problems.
        """
        assert self.root is not None and other.root is not None
        root = _overlaid_nodes(self.root, other.root)
        return YamlSource(
            self.start,
            yaml.serialize(root, Dumper=yaml.SafeDumper, allow_unicode=True),
            _overlaid(self.value, other.value),
            {**self.places, **other.places},
            root=root,
        )


def _overlaid(value: Any, other: Any) -> Any:
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return other
    merged = {key: _overlaid(value.get(key), item) for key, item in other.items()}
    return {**value, **merged}


def _overlaid_nodes(node: yaml.Node, other: yaml.Node) -> yaml.MappingNode:
    """The same for the parser's nodes, of which both are mappings."""
    pairs = _pairs(node)
    for key, (key_node, value_node) in _pairs(other).items():
        before = pairs[key][1] if key in pairs else None
        if isinstance(before, yaml.MappingNode) and isinstance(value_node, yaml.MappingNode):
            value_node = _overlaid_nodes(before, value_node)
        pairs[key] = (key_node, value_node)
    return yaml.MappingNode(node.tag, list(pairs.values()), flow_style=False)


def _pairs(node: yaml.Node) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """A mapping's keys with their nodes and values, those of `<<` among them."""
    own, merged = dict[str, tuple[yaml.Node, yaml.Node]](), dict[str, tuple[yaml.Node, yaml.Node]]()
    for key_node, value_node in node.value:
        if key_node.tag != _MERGE_TAG:
            own[key_node.value] = (key_node, value_node)
            continue
        parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
        for part in parts:
            merged = {**_pairs(part), **merged}
    return {**merged, **own}


def shown(value: Any) -> str:
    """A value as the user would recognise it, shortened, always printable."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


def read_yaml(text: str, environ: Mapping[str, str], file: str = "", number: int = 0) -> YamlSource:
    """Parse one YAML document whose top level is a mapping. Never raises for what the text says."""
    source = YamlSource(Place(number, 1, file), text)
    loader = None
    try:
        loader = _Loader(text)
        # `get_node` gives the first of several, as manifests have
        node = loader.get_node() if loader.check_node() else None
        if node is None:
            source.problems.append(FileProblem(source.start, "the file is empty", INIT_HINT))
        elif not isinstance(node, yaml.MappingNode):
            place = source.start._replace(line=_line(node))
            source.problems.append(
                FileProblem(place, "expected a mapping of keys to values", INIT_HINT)
            )
        else:
            source.root = node
            source.value = _Reader(loader, environ, source).read(node, ())
            if loader.check_node():
                line = loader.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
                place = source.start._replace(line=line)
                source.problems.append(FileProblem(place, "a second document begins", _SEVERAL))
    except yaml.MarkedYAMLError as error:
        line, *explanation = explained(error, text)
        source.problems.append(FileProblem(source.start._replace(line=line), *explanation))
    except yaml.YAMLError as error:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1
        reason = str(getattr(error, "reason", error)).splitlines()[0]
        place = source.start._replace(line=line)
        source.problems.append(FileProblem(place, f"not valid YAML: {reason}"))
    except RecursionError:
        source.problems.append(FileProblem(source.start, "nested too deeply"))
    finally:
        if loader is not None:
            loader.dispose()
    return source


class _TooLarge(yaml.MarkedYAMLError):
    """The document expands to more than a fleet file can."""


class _Loader(yaml.SafeLoader):
    """Gives up on a file with more nodes than a fleet file can have: each costs time before it is
    read.
    """

    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.composed += 1
        if self.composed > MOST_NODES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _TooLarge(problem="too large or too deep", problem_mark=mark)
        return super().compose_node(parent, index)


class _Reader:
    """One pass over a document's nodes."""

    def __init__(
        self, loader: yaml.SafeLoader, environ: Mapping[str, str], source: YamlSource
    ) -> None:
        self.loader = loader
        self.environ = environ
        self.source = source
        self.nodes = 0

    def read(self, node: yaml.Node, location: Location) -> Any:
        self.nodes += 1
        if self.nodes > MOST_NODES or len(location) > _DEEPEST:
            raise _TooLarge(problem="too large or too deep", problem_mark=node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.source.places[(*location, index)] = self._place(item)
                items.append(self.read(item, (*location, index)))
            return items
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, location)

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                self._merge(value_node, location, merged)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key is a single word, not a list or a mapping")
                continue
            self._refuse_unusable(key_node, key_node.value)
            key = key_node.value
            where = (*location, key)
            if key in own:
                first = self.source.place(where).line
                self._problem(key_node, f"key {shown(key)} was already given on line {first}")
                continue
            self.source.places[where] = self._place(key_node)
            own[key] = self.read(value_node, where)
        return {**merged, **own}

    def _merge(self, node: yaml.Node, location: Location, merged: dict[str, Any]) -> None:
        """`<<: *defaults` or `<<: [*first, *second]`; keys written out win, then earlier ones."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                self._problem(part, "`<<` takes a mapping or a list of mappings")
                continue
            for key, value in self._mapping(part, location).items():
                merged.setdefault(key, value)

    def _scalar(self, node: yaml.ScalarNode, location: Location) -> Any:
        text, tag = node.value, node.tag
        if "${" in text and tag == _TEXT_TAG:
            text = expand(text, self.environ, partial(self._problem, node))
            if node.style is None:
                # an expanded plain scalar is parsed again, so that `${N:-2}` can be a number
                tag = self.loader.resolve(  # type: ignore[no-untyped-call]
                    yaml.ScalarNode, text, (True, False)
                )
        self._refuse_unusable(node, text)
        if tag != _NULL_TAG and len(location) >= 2 and location[-2] == "env":
            return text  # environment values keep their text: 017, 1.10 and yes stay what they are
        if tag in (_TEXT_TAG, _TIMESTAMP_TAG):
            return text
        try:
            return self.loader.construct_object(
                yaml.ScalarNode(tag, text, node.start_mark, node.end_mark), deep=True
            )
        except (ValueError, OverflowError, LookupError):
            self._problem(node, f"{shown(text)} cannot be read; quote it if it is meant as text")
            return None

    def _refuse_unusable(self, node: yaml.ScalarNode, text: str) -> None:
        if match := _UNUSABLE.search(text):
            self._problem(node, f"no program can be given the character {match.group()!a}")

    def _problem(self, node: yaml.Node, message: str, hint: str = "") -> None:
        self.source.problems.append(FileProblem(self._place(node), message, hint))

    def _place(self, node: yaml.Node) -> Place:
        return self.source.start._replace(line=_line(node))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


_QUOTE = 'quote variables inside [ ] and { }: "${NAME}"'
_COLUMN = "keys of one mapping begin in the same column; a text with `: ` in it needs quotes"
_SEVERAL = "a fleet file is one document: give another file with a second -f"
_HINTS = (
    (re.compile(r"'\\t'"), "indent with blanks: YAML takes no tabs"),
    (re.compile(r"could not find expected ':'"), "a line reads `key: value`, a blank after `:`"),
    (re.compile(r"mapping values are not allowed|expected <block end>"), _COLUMN),
    (re.compile(r"character '[@`%]'"), "quote a value that begins with @, ` or %"),
    (re.compile(r"undefined alias"), "`*name` means an anchor; quote it if it is meant as text"),
)
_INVALID = "not valid YAML: "
_OTHERWISE = "compare it with what `skyctl init` writes"
_CLOSES = {"[": "]", "{": "}"}


def explained(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str, str]:
    """The line, the problem and the hint for the parser's error in `text`."""
    complaint = " ".join(part for part in (error.context, error.problem) if part)
    open_end = _never_closed(complaint, error, text)
    if open_end is not None:
        return open_end
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    written = "".join(text.splitlines()[line - 1 : line])
    if "${" in written:
        hint = _QUOTE
    else:
        hint = next((hint for pattern, hint in _HINTS if pattern.search(complaint)), _OTHERWISE)
    return line, f"{_INVALID}{complaint}", hint


def _never_closed(
    complaint: str, error: yaml.MarkedYAMLError, text: str
) -> tuple[int, str, str] | None:
    """A bracket or quote that the file leaves open."""
    if "end of stream" not in complaint and "<stream end>" not in complaint:
        return None
    if "quoted scalar" in complaint and error.context_mark is not None:
        line = error.context_mark.line + 1
        return line, f"{_INVALID}a quote is never closed", "close it on this line"
    for line, written in reversed([*enumerate(text.splitlines(), 1)]):
        code = written.partition(" #")[0]
        opened = [sign for sign in _CLOSES if code.count(sign) > code.count(_CLOSES[sign])]
        if opened:
            sign = max(opened, key=code.rindex)
            message = f"{_INVALID}`{sign}` is never closed"
            return line, message, f"close it with `{_CLOSES[sign]}`"
    return None

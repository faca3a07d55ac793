"""Turns pydantic's errors into sentences with line numbers of the fleet file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.yaml_source import INIT_HINT, FileProblem, Location, YamlSource, shown

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_unicode": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "nothing",
}
_LIMITS = {
    "greater_than_equal": "at least",
    "greater_than": "more than",
    "less_than_equal": "at most",
    "less_than": "less than",
}
_PATTERNS = {
    "name": "lower-case letters, digits and dashes (40 at most, no dash at either end)",
    "servers": "a URL like http://127.0.0.1:8000",
    "router": "a URL like http://127.0.0.1:8000",
    "dns": "a host name and a port, like gpus.example:8000",
    "api_key_env": "the name of an environment variable",
    "control_token_env": "the name of an environment variable",
}
_LISTS = {("replicas",): "a list of groups", ("servers",): "a list of URLs"}
# Keys that only another kind of file has at its top, and what that file is.
_OTHER_FILES = (
    ({"services"}, "a Docker Compose file"),
    ({"apiVersion", "kind"}, "a Kubernetes manifest"),
    ({"architectures"}, "a model's config.json"),
    ({"model_type"}, "a model's config.json"),
)
_SCHEMA_HINT = "`skyctl schema` prints every key"


def another_kind_of_file(source: YamlSource) -> FileProblem | None:
    """What the file is instead of a fleet file, where its first keys tell."""
    keys = set(source.value)
    if keys & {"model", "servers", "replicas"}:
        return None
    for signature, what in _OTHER_FILES:
        if signature <= keys:
            names = " and ".join(f"`{key}:`" for key in sorted(signature))
            line = min(source.line((key,)) for key in signature)
            return FileProblem(line, f"this is {what} ({names}), not a fleet file", INIT_HINT)
    return None


def problems_of(errors: Sequence[Mapping[str, Any]], source: YamlSource) -> list[FileProblem]:
    """One problem per place in the file, from pydantic's `errors()`.

    A value that fits no member of a union makes one error per member: they become one problem
    that names all of them, unless a member fits well enough to have errors of its own inside.
    """
    places: dict[Location, list[Mapping[str, Any]]] = {}
    for error in errors:
        places.setdefault(_location(error, source.value), []).append(error)
    problems = []
    for location, here in places.items():
        inside = any(
            other[: len(location)] == location and len(other) > len(location) for other in places
        )
        if inside and all(error["type"] in _EXPECTED for error in here):
            continue
        problems.append(_problem(location, here, source))
    return problems


def _location(error: Mapping[str, Any], value: Any) -> Location:
    """pydantic's location without the names of union members, which are not in the file."""
    location: list[str | int] = []
    parts = error["loc"]
    for position, part in enumerate(parts):
        if error["type"] == "missing" and position == len(parts) - 1:
            break
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]
            location.append(part)
    return tuple(location)


def _problem(
    location: Location, errors: Sequence[Mapping[str, Any]], source: YamlSource
) -> FileProblem:
    line = source.line(location)
    error = errors[0]
    kind = error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(line, location)
    if kind == "missing":
        missing = ".".join(str(part) for part in (*location, error["loc"][-1]))
        return FileProblem(line, f"key '{missing}' is missing", _SCHEMA_HINT)
    where = ".".join(str(part) for part in location)
    if kind in ("value_error", "assertion_error"):
        message = str(error["ctx"]["error"])
        line = _line_of_named_key(location, message, source)
    else:
        message = f"{_expectation(location, errors)}, got {_got(location, error['input'])}"
    return FileProblem(line, f"{where}: {message}" if where else message)


def _got(location: Location, value: Any) -> str:
    # somebody may have written the key itself where its variable's name belongs
    secret = location in (("api_key_env",), ("control_token_env",))
    return "something else" if secret else shown(value)


def _expectation(location: Location, errors: Sequence[Mapping[str, Any]]) -> str:
    """`expected a whole number or a list of groups`."""
    words: list[str] = []
    # a member of a union that fits in kind tells more than one that does not
    fitting = [error for error in errors if error["type"] not in _EXPECTED]
    for error in fitting or errors:
        kind, context = error["type"], error.get("ctx") or {}
        if kind == "literal_error":
            word = "one of " + context["expected"].replace(" or ", ", ")
            word += _nearest_word(error["input"], re.findall(r"'([^']*)'", context["expected"]))
        elif kind in _LIMITS:
            word = f"{_LIMITS[kind]} {next(iter(context.values())):g}"
        elif kind == "string_pattern_mismatch":
            key = next(part for part in reversed(location) if isinstance(part, str))
            word = _PATTERNS.get(key, str(error["msg"]))
        elif kind == "too_short":
            word = "at least one entry"
        elif kind == "list_type" and location in _LISTS:
            word = _LISTS[location]
        else:
            word = _EXPECTED.get(kind) or str(error["msg"])
        if word not in words:
            words.append(word)
    if len(words) > 1:
        words = [*words[:-2], f"{words[-2]} or {words[-1]}"]
    return f"expected {', '.join(words)}"


def _nearest_word(value: Any, known: Sequence[str]) -> str:
    meant = "cuda" if str(value).lower() in ("gpu", "nvidia") else str(value)
    near = difflib.get_close_matches(meant, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _unknown_key(line: int, location: Location) -> FileProblem:
    key = str(location[-1])
    known = known_keys(location[:-1])
    inside = ".".join(str(part) for part in location[:-1])
    message = f"{inside}: unknown key {shown(key)}" if inside else f"unknown key {shown(key)}"
    near = difflib.get_close_matches(key.replace("-", "_").lower(), known, n=1)
    if near:
        return FileProblem(line, f"{message}; did you mean {near[0]!r}?")
    hint = _SCHEMA_HINT
    if "args" in known:
        hint = f"arguments of the program itself go under `args:`; {hint}"
    return FileProblem(line, message, hint)


def known_keys(location: Location) -> list[str]:
    """Keys the schema knows at `location` (a mapping in the file); [] where any key may stand."""
    model: type[BaseModel] | None = FleetConfig
    for part in location:
        if isinstance(part, int) or model is None:
            continue  # a list's items are described by its field
        field = model.model_fields.get(part)
        model = None if field is None else _model_in(field.annotation)
    return [] if model is None else list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model inside an annotation such as `int | list[ReplicaGroup]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if (model := _model_in(argument)) is not None:
            return model
    return None


def _line_of_named_key(location: Location, message: str, source: YamlSource) -> int:
    """The line of a key that the message names, else of the mapping it is about."""
    for word in re.findall(r"\w+", message):
        if (*location, word) in source.lines:
            return source.lines[(*location, word)]
    return source.line(location)

"""Loads a fleet file into a FleetConfig, or raises an error a person can act on: pydantic's errors
become sentences with line numbers of the file.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from skyctl.errors import FleetFileError
from skyctl.fleetfile.arguments import refusals
from skyctl.fleetfile.foreign import another_kind_of_file
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.variables import read_assignments
from skyctl.fleetfile.yaml_source import (
    FileProblem,
    Location,
    Place,
    YamlSource,
    read_yaml,
    shown,
)

LARGEST_FILE_BYTES = 1024 * 1024
_MOST_PROBLEMS_SHOWN = 20
_LOOK_AGAIN = "correct it, then look again: skyctl validate"
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
    "command": "a shell command",
    "api_key_env": "the name of an environment variable",
    "control_token_env": "the name of an environment variable",
    "shared_dir": "an absolute path",
    "backend": "lower-case letters, digits, dashes and underscores",
    "base_model": "a model's name, as ORG/NAME",
    "device": "cpu, cuda or cuda:N",
    "devices": "cpu, cuda or cuda:N",
    "hosts": "a machine as ssh knows it, such as user@gpu-1",
    "adapters": "a name of letters, digits and ._:/-",
}
_LISTS = {("replicas",): "a list of groups", ("servers",): "a list of URLs"}
_NOT_LISTS = {
    "env": "a mapping such as {NAME: value}",
    "served_model_name": "one name: pushes, `generate` and adapters use it",
}
_SCHEMA_HINT = "`skyctl schema` prints every key"


STDIN = Path("-")
ENV_FILE = ".env"


@dataclass(frozen=True)
class LoadedFleet:
    """A valid fleet file."""

    config: FleetConfig
    """What it says."""
    path: Path
    """Where it is, absolute; of several files, the first."""
    base_dir: Path
    """What its relative paths are relative to."""
    source: YamlSource
    """Its text, and where each value is."""


def load_fleet(
    path: Path,
    *overrides: Path,
    environ: Mapping[str, str] = os.environ,
    base_dir: Path | None = None,
) -> LoadedFleet:
    """Read and check one fleet file, or several of which later ones override; `-` is standard
    input. `${VAR}` is expanded from `environ`, else from `.env` in `base_dir` (default: where the
    first file is).

    Raises:
        FleetFileError: a file is missing, unreadable or wrong. The message has one
            `path:line: problem` line per problem; `details["problems"]` has the same as a list of
            mappings with `file`, `line` and `message`.
    """
    if [path, *overrides].count(STDIN) > 1:
        raise FleetFileError("standard input can be only one of the fleet files")
    texts = [(file, _read(file)) for file in (path, *overrides)]
    directory = base_dir or (Path.cwd() if is_stream(path) else path.absolute().parent)
    if any("${" in text for _, text in texts):
        environ = {**_read_env_file(directory / ENV_FILE, environ), **environ}
    return _load(texts, environ, directory)


def is_stream(path: Path) -> bool:
    """Whether it is standard input or an open file (`<(command)`), which cannot be read again."""
    return path == STDIN or Path("/dev") in path.absolute().parents


def parse_fleet(text: str, path: Path, environ: Mapping[str, str] = os.environ) -> LoadedFleet:
    """Check the text of a fleet file that is, or will be, at `path`.

    Raises:
        FleetFileError: as `load_fleet`.
    """
    return _load([(path, text)], environ, path.absolute().parent)


def _load(
    texts: Sequence[tuple[Path, str]], environ: Mapping[str, str], base_dir: Path
) -> LoadedFleet:
    sources = [
        read_yaml(text, environ, str(path), number) for number, (path, text) in enumerate(texts)
    ]
    for source in sources:
        if (another := another_kind_of_file(source)) is not None:
            raise _error([another])
    problems = [problem for source in sources for problem in source.problems]
    if problems:
        raise _error(problems)
    source = reduce(YamlSource.overridden_by, sources)
    config, problems = _validate(source)
    if config is None or problems:
        raise _error(problems)
    path = texts[0][0].absolute()
    if any("\ud800" <= sign <= "\udfff" for sign in str(path)):  # bytes that are not text
        raise FleetFileError(f"{str(path)!a}: its path is not UTF-8", hint="move it")
    return LoadedFleet(config, path, base_dir, source)


def _read_env_file(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an env file; none where there is no such file (it may be a directory)."""
    if not path.is_file():
        return {}
    problems = list[FileProblem]()

    def complain(line: int, message: str, hint: str) -> None:
        problems.append(FileProblem(Place(0, line, str(path)), message, hint))

    values = read_assignments(_read(path), environ, complain)
    if problems:
        raise _error(problems)
    return values


def _read(path: Path) -> str:
    try:
        if path == STDIN:
            data = _standard_input()
        else:
            _refuse_what_is_no_file(path)
            with path.open("rb") as file:
                data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise FleetFileError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > LARGEST_FILE_BYTES:
        raise FleetFileError(f"{path}: larger than 1 MiB: not a fleet file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FleetFileError(f"{path}:{line}: is not UTF-8 text") from error


@cache
def _standard_input() -> bytes:
    return sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1)


def _refuse_what_is_no_file(path: Path) -> None:
    if not path.exists():
        raise FleetFileError(
            f"{path}: no such file", hint="write a first fleet file with: skyctl init"
        )
    if path.is_dir():
        inside = path / "fleet.yaml"
        raise FleetFileError(
            f"{path}: is a directory, not a fleet file",
            hint=f"give the file: -f {inside if inside.is_file() else 'FILE'}",
        )


def _validate(source: YamlSource) -> tuple[FleetConfig | None, list[FileProblem]]:
    """The configuration, or None and what is wrong with it."""
    # `x-…` is for the file's own use, mostly to hold anchors, as in Compose files
    value = {key: v for key, v in source.value.items() if not str(key).startswith("x-")}
    try:
        config = FleetConfig.model_validate(_without_empty(value, ()))
    except ValidationError as error:
        details: list[Any] = error.errors(include_url=False)
        return None, _problems_of(details, source)
    return config, [
        FileProblem(source.place(location), f"{_dotted(location[:-1])}: {reason}")
        for location, reason in refusals(config)
    ]


def _without_empty(value: Any, location: Location) -> Any:
    """`value` without the schema's keys that have no value: `health:` followed only by comments
    means the defaults. Inside `args` and `env` an empty value has a meaning of its own.
    """
    if isinstance(value, list):
        return [_without_empty(item, (*location, index)) for index, item in enumerate(value)]
    schema_keys = _known_keys(location)
    if not isinstance(value, dict) or not schema_keys:
        return value
    return {
        key: _without_empty(item, (*location, key))
        for key, item in value.items()
        if item is not None or key not in schema_keys
    }


def _dotted(location: Location) -> str:
    return ".".join(map(str, location))


def _error(problems: Sequence[FileProblem]) -> FleetFileError:
    ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.place)
    lines = [f"{problem.place}: {problem.message}" for problem in ordered]
    shown_lines = lines[:_MOST_PROBLEMS_SHOWN]
    if len(lines) > len(shown_lines):
        shown_lines.append(f"… and {len(lines) - len(shown_lines)} more")
    return FleetFileError(
        "\n".join(shown_lines),
        hint=next((problem.hint for problem in ordered if problem.hint), _LOOK_AGAIN),
        details={
            "file": ordered[0].place.file,
            "problems": [
                {"file": at.file, "line": at.line, "message": message} for at, message, _ in ordered
            ],
        },
    )


def _problems_of(errors: Sequence[Mapping[str, Any]], source: YamlSource) -> list[FileProblem]:
    """One problem per place in the file, from pydantic's `errors()`.

    A value that fits no member of a union makes one error per member: they become one problem that
    names all of them, unless a member fits well enough to have errors of its own inside.
    """
    places: dict[Location, list[Mapping[str, Any]]] = {}
    for error in errors:
        places.setdefault(_location(error, source.value), []).append(error)
    problems = []
    for location, place_errors in places.items():
        inside = any(
            other[: len(location)] == location and len(other) > len(location) for other in places
        )
        if inside and all(error["type"] in _EXPECTED for error in place_errors):
            continue
        problems.append(_problem(location, place_errors, source))
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
    place = source.place(location)
    # of a union's members, one that the value fits in kind says what is wrong with it
    error = next((error for error in errors if error["type"] == "value_error"), errors[0])
    kind = error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(place, location)
    if kind == "missing":
        missing = _dotted((*location, error["loc"][-1]))
        return FileProblem(place, f"key '{missing}' is missing", _SCHEMA_HINT)
    where = _dotted(location)
    if kind in ("value_error", "assertion_error"):
        message = str(error["ctx"]["error"])
        place = _place_of_named_key(location, message, source)
    else:
        # it may be the key itself, where the name of its variable belongs
        secret = location in (("api_key_env",), ("control_token_env",))
        got = "something else" if secret else shown(error["input"])
        message = f"{_expectation(location, errors)}, got {got}"
    return FileProblem(place, f"{where}: {message}" if where else message)


def _expectation(location: Location, errors: Sequence[Mapping[str, Any]]) -> str:
    """`expected a whole number or a list of groups`."""
    words: list[str] = []
    # a member of a union that fits in kind says more than one that does not
    fitting = [error for error in errors if error["type"] not in _EXPECTED]
    for error in fitting or errors:
        kind, context = error["type"], error.get("ctx") or {}
        if kind == "literal_error":
            word = "one of " + context["expected"].replace(" or ", ", ")
            given = str(error["input"])
            typed = "cuda" if given.lower() in ("gpu", "nvidia") else given
            choices = re.findall(r"'([^']*)'", context["expected"])
            if near := difflib.get_close_matches(typed, choices, n=1):
                word += f" (did you mean {near[0]!r}?)"
        elif kind in _LIMITS:
            word = f"{_LIMITS[kind]} {next(iter(context.values())):g}"
        elif kind == "string_pattern_mismatch":
            key = next(part for part in reversed(location) if isinstance(part, str))
            word = _PATTERNS.get(key, str(error["msg"]))
        elif kind == "too_short":
            word = "at least one entry"
        elif kind == "list_type" and location in _LISTS:
            word = _LISTS[location]
        elif isinstance(error["input"], list) and location[-1:] and location[-1] in _NOT_LISTS:
            word = _NOT_LISTS[str(location[-1])]
        else:
            word = _EXPECTED.get(kind) or str(error["msg"])
        if word not in words:
            words.append(word)
    if len(words) > 1:
        words = [*words[:-2], f"{words[-2]} or {words[-1]}"]
    return f"expected {', '.join(words)}"


def _unknown_key(place: Place, location: Location) -> FileProblem:
    key = str(location[-1])
    schema_keys = _known_keys(location[:-1])
    inside = f"{_dotted(location[:-1])}: " if len(location) > 1 else ""
    message = f"{inside}unknown key {shown(key)}"
    near = difflib.get_close_matches(key.replace("-", "_").lower(), schema_keys, n=1)
    if near:
        return FileProblem(place, f"{message}; did you mean {near[0]!r}?")
    hint = _SCHEMA_HINT
    if "args" in schema_keys:
        hint = f"arguments of the program itself go under `args:`; {hint}"
    return FileProblem(place, message, hint)


def _known_keys(location: Location) -> list[str]:
    """Keys the schema knows at `location` (a mapping in the file); [] if any key is allowed."""
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


def _place_of_named_key(location: Location, message: str, source: YamlSource) -> Place:
    """The place of a key that the message names, else of the mapping it is about."""
    for word in re.findall(r"\w+", message):
        if (*location, word) in source.places:
            return source.places[(*location, word)]
    return source.place(location)

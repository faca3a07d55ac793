"""Loads a fleet file into a FleetConfig, or raises an error a person can act on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skyctl.errors import FleetFileError
from skyctl.fleetfile.arguments import refusals
from skyctl.fleetfile.problems import another_kind_of_file, known_keys, problems_of
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.yaml_source import FileProblem, Location, YamlSource, read_yaml

LARGEST_FILE_BYTES = 1024 * 1024
_MOST_PROBLEMS_SHOWN = 20
_LOOK_AGAIN = "correct it, then look again: skyctl validate"


@dataclass(frozen=True)
class LoadedFleet:
    """A valid fleet file. `path` is absolute; relative paths in it start at `base_dir`."""

    config: FleetConfig
    path: Path
    base_dir: Path


def load_fleet(path: Path, environ: Mapping[str, str] = os.environ) -> LoadedFleet:
    """Read and check one fleet file; `${VAR}` is expanded from `environ`.

    Raises:
        FleetFileError: the file is missing, unreadable or wrong. The message has one
            `path:line: problem` line per problem; `details["problems"]` has the same as a list of
            mappings with `line` and `message`.
    """
    return parse_fleet(_read(path), path, environ)


def parse_fleet(text: str, path: Path, environ: Mapping[str, str] = os.environ) -> LoadedFleet:
    """Check the text of a fleet file that is, or will be, at `path`.

    Raises:
        FleetFileError: as `load_fleet`.
    """
    source = read_yaml(text, environ)
    config, problems = (None, source.problems) if source.problems else _validate(source)
    if config is None or problems:
        raise _error(path, problems)
    absolute = path.absolute()
    return LoadedFleet(config, absolute, absolute.parent)


def _read(path: Path) -> str:
    if not path.exists():
        raise FleetFileError(
            f"{path}: no such file", hint="write a first fleet file with: skyctl init"
        )
    try:
        if path.is_dir():
            inside = path / "fleet.yaml"
            raise FleetFileError(
                f"{path}: is a directory, not a fleet file",
                hint=f"give the file: -f {inside if inside.is_file() else 'FILE'}",
            )
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


def _validate(source: YamlSource) -> tuple[FleetConfig | None, list[FileProblem]]:
    """The configuration, or None and what is wrong with it."""
    if (another := another_kind_of_file(source)) is not None:
        return None, [another]
    # `x-…` is for the file's own use, mostly as a place of anchors, as in Compose files
    value = {key: v for key, v in source.value.items() if not str(key).startswith("x-")}
    try:
        config = FleetConfig.model_validate(_without_empty(value, ()))
    except ValidationError as error:
        details: list[Any] = error.errors(include_url=False)
        return None, problems_of(details, source)
    return config, [
        FileProblem(source.line(location), f"{_dotted(location)}: {reason}")
        for location, reason in refusals(config)
    ]


def _without_empty(value: Any, location: Location) -> Any:
    """`value` without the schema's keys that have no value: `health:` over nothing but comments
    means the defaults. Inside `args` and `env` an empty value has a meaning of its own."""
    if isinstance(value, list):
        return [_without_empty(item, (*location, index)) for index, item in enumerate(value)]
    known = known_keys(location)
    if not isinstance(value, dict) or not known:
        return value
    return {
        key: _without_empty(item, (*location, key))
        for key, item in value.items()
        if item is not None or key not in known
    }


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location[:-1])


def _error(path: Path, problems: list[FileProblem]) -> FleetFileError:
    ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
    lines = [f"{path}:{problem.line}: {problem.message}" for problem in ordered]
    shown = lines[:_MOST_PROBLEMS_SHOWN]
    if len(lines) > len(shown):
        shown.append(f"… and {len(lines) - len(shown)} more")
    return FleetFileError(
        "\n".join(shown),
        hint=next((problem.hint for problem in ordered if problem.hint), _LOOK_AGAIN),
        details={
            "file": str(path),
            "problems": [{"line": p.line, "message": p.message} for p in ordered],
        },
    )

"""Arguments of servers and router in the fleet file, and which of them skyctl keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyctl.engines import ENGINES
from skyctl.fleetfile.schema import FleetConfig, RouterSection


def flag_name(key: str) -> str:
    """`max_model_len`, `max-model-len` and `--max-model-len` are all `max-model-len`.

    Only the part before the first dot changes: in `compilation-config.cudagraph_mode` the rest
    names a field.
    """
    head, dot, rest = key.strip().lstrip("-").partition(".")
    return head.replace("_", "-") + dot + rest


def merge_arguments(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping with normalised names; later layers win, including their nulls."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update({flag_name(key): value for key, value in layer.items()})
    return merged


def refusals(config: FleetConfig) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Arguments and variables the file may not set, as (path of the key in the file, why)."""
    reserved = ENGINES[config.engine].reserved
    yield from _refused(config.args, ("args",), reserved.server_args)
    yield from _refused_env(config.env, ("env",), reserved.env)
    if isinstance(config.replicas, list):
        for index, group in enumerate(config.replicas):
            where: tuple[str | int, ...] = ("replicas", index)
            yield from _refused(group.args, (*where, "args"), reserved.server_args)
            yield from _refused_env(group.env, (*where, "env"), reserved.env)
    if isinstance(config.router, RouterSection):
        yield from _refused(config.router.args, ("router", "args"), reserved.router_args)


def server_arguments(config: FleetConfig) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every server argument of the file, as (path of the key in the file, value)."""
    yield from ((("args", key), value) for key, value in config.args.items())
    for index, group in enumerate(config.replicas if isinstance(config.replicas, list) else ()):
        where = ("replicas", index, "args")
        yield from (((*where, key), value) for key, value in group.args.items())


def _refused(
    arguments: Mapping[str, Any], where: tuple[str | int, ...], reserved: Mapping[str, str]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    seen: dict[str, str] = {}
    for key in arguments:
        name = flag_name(key)
        if not name or any(character.isspace() or character == "=" for character in name):
            yield (*where, key), f"{key!r} is not the name of an argument"
        elif name in reserved:
            yield (*where, key), f"argument {key!r} is set by skyctl: {reserved[name]}"
        elif name in seen:
            yield (*where, key), f"argument {key!r} was already written as {seen[name]!r}"
        seen.setdefault(name, key)


def _refused_env(
    env: Mapping[str, str], where: tuple[str | int, ...], reserved: Mapping[str, str]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for key, value in env.items():
        if key in reserved:
            yield (*where, key), f"variable {key!r} is set by skyctl: {reserved[key]}"
        elif not key or "=" in key or "\0" in key + value:
            yield (*where, key), f"{key!r} is not the name of an environment variable"

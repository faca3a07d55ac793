"""The wire format between a supervisor and its clients, and how both state their version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import skyctl
from skyctl import __version__
from skyctl.errors import VersionMismatch

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from skyctl.core.plan import FrontSpec, ServerSpec

T = TypeVar("T")

PROTOCOL = 19
"""Version of the supervisor's API. Increment it with every change that affects the other side."""

VERSION_HEADER = "x-skyctl"
"""On every request and answer: `version/protocol`; on answers followed by `/stamp`."""
CALLER_HEADER = "x-skyctl-caller"
"""The command that asks, percent-encoded: others are told about it."""


def own_version() -> str:
    """This skyctl's version and protocol, as in the header: `0.3.0/4`."""
    return f"{__version__}/{PROTOCOL}"


@cache
def stamp() -> str:
    """Changes with skyctl's files: a supervisor keeps running those it was started from."""
    package = Path(skyctl.__file__).parent
    return f"{max(path.stat().st_mtime_ns for path in package.rglob('*.py')):x}"


_adapters: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Carries a request or a result over the wire. Building one takes ten times as long as using
    it.
    """
    if kind not in _adapters:
        from pydantic import TypeAdapter

        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def reader(kind: type[T]) -> Callable[[bytes], T]:
    """Makes a result from its JSON; raises ValueError for anything else. A job's id is read without
    pydantic, which is imported while the push goes on.
    """
    if kind is not str:
        return adapter(kind).validate_json

    def read(body: bytes) -> T:
        value = json.loads(body)
        if not isinstance(value, kind):
            raise ValueError(f"{value!r} is not a {kind.__name__}")
        return value

    return read


def spec_hash(spec: ServerSpec | FrontSpec) -> str:
    """Changes whenever a process would have to be restarted to match the plan."""
    from skyctl.core.plan import RouterSpec, ServerSpec
    from skyctl.engines import ENGINES

    placement = ENGINES[spec.engine].variables.placement if isinstance(spec, ServerSpec) else ()

    def lasting(env: Mapping[str, str]) -> list[tuple[str, str]]:
        return sorted(item for item in env.items() if item[0] not in placement)

    server = spec if isinstance(spec, ServerSpec) else None
    argv = server.as_written(spec.argv) if server else list(spec.argv)
    material: list[Any] = [argv, lasting(spec.env)]
    if isinstance(spec, ServerSpec) and spec.node is not None:
        material.append(spec.node.target)
        if (ray := spec.node.ray) is not None:
            material.append([ray.address, ray.labels, ray.head, ray.resource, ray.count])
        for follower in spec.followers:
            material.append(
                [follower.node.target, spec.as_written(follower.argv), lasting(follower.env)]
            )
    if not isinstance(spec, ServerSpec | RouterSpec):  # the Tinker API asks the supervisor
        material.append(PROTOCOL)
    return hashlib.sha256(json.dumps(material).encode()).hexdigest()


def version_mismatch(supervisor: str, command: str) -> VersionMismatch:
    """The error of a command whose supervisor runs another skyctl; both as in the header."""
    return VersionMismatch(
        f"the supervisor of this fleet is of another skyctl ({supervisor or 'an old one'}) than "
        f"this command ({command})",
        hint="put one of this version in its place, the servers go on: skyctl recover",
    )

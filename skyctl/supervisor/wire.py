"""What crosses the wire between a supervisor and its clients, and how both tell their version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
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

PROTOCOL = 15
"""Of the supervisor's API. Count it up with every change that the other side has to know of."""

VERSION_HEADER = "x-skyctl"
"""On every request and answer: `version/protocol`, and on answers `/stamp` after it."""
CALLER_HEADER = "x-skyctl-caller"
"""Which command asks, percent-encoded: others are told of it."""


def spoken() -> str:
    """What this skyctl speaks, as in the header: `0.3.0/3`."""
    return f"{__version__}/{PROTOCOL}"


@cache
def stamp() -> str:
    """Changes when skyctl's files do: a supervisor goes on with those it was started from."""
    package = Path(skyctl.__file__).parent
    return f"{max(path.stat().st_mtime_ns for path in package.rglob('*.py')):x}"


_adapters: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """What carries a request or a result over the wire. To build one takes ten times as long as to
    use it."""
    if kind not in _adapters:
        from pydantic import TypeAdapter

        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def reader(kind: type[T]) -> Callable[[bytes], T]:
    """Makes a result of its JSON; raises ValueError for another. A job's id is read without
    pydantic: it is imported while the push goes on."""
    if kind is not str:
        return adapter(kind).validate_json

    def read(body: bytes) -> T:
        found = json.loads(body)
        if not isinstance(found, kind):
            raise ValueError(f"{found!r} is no {kind.__name__}")
        return found

    return read


def spec_hash(spec: ServerSpec | FrontSpec) -> str:
    """Changes whenever a process would have to be started anew to match the plan."""
    from skyctl.core.plan import RouterSpec, ServerSpec
    from skyctl.engines import ENGINES

    placement = ENGINES[spec.engine].placement_variables if isinstance(spec, ServerSpec) else ()
    env = sorted(item for item in spec.env.items() if item[0] not in placement)
    material: list[Any] = [list(spec.argv), env]
    if isinstance(spec, ServerSpec) and spec.node is not None:
        material.append(spec.node.target)
        if (ray := spec.node.ray) is not None:
            material.append([ray.address, ray.labels, ray.head, ray.resource, ray.count])
    if not isinstance(spec, ServerSpec | RouterSpec):  # the Tinker API asks the supervisor
        material.append(PROTOCOL)
    return hashlib.sha256(json.dumps(material).encode()).hexdigest()


def version_mismatch(supervisor: str, command: str) -> VersionMismatch:
    """The error of a command whose supervisor is of another skyctl; both as in the header."""
    return VersionMismatch(
        f"the supervisor of this fleet is of another skyctl ({supervisor or 'an old one'}) than "
        f"this command ({command})",
        hint="put one of this version in its place, the servers go on: skyctl recover",
    )

"""What crosses the wire between a supervisor and its clients, and how both tell their version."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import skyctl
from skyctl import __version__
from skyctl.core.plan import RouterSpec, ServerSpec
from skyctl.errors import VersionMismatch

PROTOCOL = 6
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


# Follows from how many replicas there are; a running server need not move when that changes.
_PLACEMENT = ("VLLM_CPU_OMP_THREADS_BIND",)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """What carries a request or a result over the wire. To build one takes ten times as long as to
    use it."""
    return TypeAdapter(kind)


def encoded(asked: object) -> bytes:
    """A request's JSON, `{}` for none. That of a plan may hold secrets: never write it to disk or a
    log."""
    # what a fleet file left out is still left out over there
    return b"{}" if asked is None else adapter(type(asked)).dump_json(asked, exclude_unset=True)


def spec_hash(spec: ServerSpec | RouterSpec) -> str:
    """Changes whenever a process would have to be started anew to match the plan."""
    env = sorted(item for item in spec.env.items() if item[0] not in _PLACEMENT)
    material = json.dumps([list(spec.argv), env])
    return hashlib.sha256(material.encode()).hexdigest()


def version_mismatch(supervisor: str, command: str) -> VersionMismatch:
    """The error of a command whose supervisor is of another skyctl; both as in the header."""
    return VersionMismatch(
        f"the supervisor of this fleet is of another skyctl ({supervisor or 'an old one'}) than "
        f"this command ({command})",
        hint="put one of this version in its place, the servers go on: skyctl recover",
    )

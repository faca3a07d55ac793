"""A launcher that starts everything on this machine, at a lower priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from skyctl.launch.base import ChildProcess
from skyctl.launch.local.host import LOCAL

NICENESS = 7


def spawn(argv: Sequence[str], env: Mapping[str, str], log: Path, token: str) -> ChildProcess:
    return LOCAL.spawn(["nice", "-n", str(NICENESS), *argv], env, log, token)


NICE = replace(LOCAL, name="nice", spawn=spawn)

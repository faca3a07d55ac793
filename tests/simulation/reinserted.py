"""Defects of the past, put back one at a time: the simulation has to find each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Defect:
    """`patches` re-create the behaviour: what to replace → by what (see `seams.installed`)."""

    kind: str
    patches: Mapping[str, Any]


DEFECTS: dict[str, Defect] = {}

"""Which digests can be compared: only those of servers whose workers hold the model alike.

A server with two tensor-parallel ranks holds other tensors than one with a single rank, and one
that quantizes what it loads holds other numbers; each is as right as the other. So a digest ends in
the version of the algorithm and the arrangement that the server's workers named
(`inside/arrangement.py`), after a colon: `5f0c…:v2-tp2-bfloat16`. Servers that name none are taken
to be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

_SEPARATOR = ":"


def arranged(digest: str, arrangement: str, version: int = 0) -> str:
    """`digest` with its arrangement, which may be "", and its algorithm's version, 0: not named."""
    named = [f"v{version}" if version else "", arrangement]
    suffix = "-".join(part for part in named if part)
    return f"{digest}{_SEPARATOR}{suffix}" if suffix else digest


def arrangement_of(digest: str) -> str:
    """What a digest ends in, its version included; "" when nothing was named."""
    return digest.partition(_SEPARATOR)[2]


def comparable(items: Iterable[T], digest: Callable[[T], str]) -> list[list[T]]:
    """`items` by their digests' arrangement, in order. Those without a digest are left out."""
    groups: dict[str, list[T]] = {}
    for item in items:
        if digest(item):
            groups.setdefault(arrangement_of(digest(item)), []).append(item)
    return list(groups.values())

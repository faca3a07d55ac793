"""Which weights digests can be compared: those of servers whose workers hold the model in the same
arrangement.

A server with two tensor-parallel ranks holds different tensors from one with a single rank, and one
that quantizes what it loads holds different numbers; all are right. A digest therefore ends in a
colon, the version of the algorithm and the arrangement that the server's workers report
(`inside/digest.py`): `5f0c…:v2-tp2-bfloat16`. Servers that report none are taken to share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

_SEPARATOR = ":"


def arranged(digest: str, arrangement: str, version: int = 0) -> str:
    """`digest` with its arrangement (may be "") and its algorithm's version (0: none given)."""
    named = [f"v{version}" if version else "", arrangement]
    suffix = "-".join(part for part in named if part)
    return f"{digest}{_SEPARATOR}{suffix}" if suffix else digest


def arrangement_of(digest: str) -> str:
    """The suffix of a digest, version included; "" if it has none."""
    return digest.partition(_SEPARATOR)[2]


def comparable(items: Iterable[T], digest: Callable[[T], str]) -> list[list[T]]:
    """Group `items` by the arrangement of their digests, in order. Those without a digest are left
    out.
    """
    groups: dict[str, list[T]] = {}
    for item in items:
        if digest(item):
            groups.setdefault(arrangement_of(digest(item)), []).append(item)
    return list(groups.values())

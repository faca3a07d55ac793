"""A server's URL and keys: all that the HTTP core needs of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FreezeOrder(StrEnum):
    """What a request does to a freeze besides what it says (`engines/inside/guard.py`)."""

    NONE = ""
    TAKE_OVER = "take-over"
    """Thaw what another fleet froze."""
    RELEASE = "release"
    """Leave the server frozen, for whoever froze it before to thaw."""


@dataclass(frozen=True)
class ServerTarget:
    """One server. Keys never show in repr or logs."""

    name: str
    """Its name in the fleet."""
    url: str
    """Its URL, without trailing slash."""
    api_key: str | None = field(default=None, repr=False)
    """The bearer of every request: the control token, or an API key if there is no token."""
    engine: str = "vllm"
    """The name of its engine."""
    inference_key: str | None = field(default=None, repr=False)
    """The API key, if known: an engine may accept no other on routes that users call too."""
    holder: str = field(default="", repr=False)
    """The fleet that control requests act for, as the server's guard knows it: an id and words for
    people; "" for none.
    """
    freeze: FreezeOrder = FreezeOrder.NONE
    """What control requests do to a freeze besides."""
    role: str = ""
    """prefill or decode; "" for a server that does both, or if unknown."""

"""A server's URL and keys: all that the HTTP core needs of a server."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    role: str = ""
    """prefill or decode; "" for a server that does both, or if unknown."""

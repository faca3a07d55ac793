"""A server's URL and keys: all that the HTTP core needs of a server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerTarget:
    """One server. `url` has no trailing slash; `engine` is the name of its engine.

    `api_key` is the bearer of every request: the control token, or an API key if there is no token.
    `inference_key` is the API key, if known: an engine may accept no other on routes that users
    call as well. They never show in repr or logs. `role` is prefill or decode, "" for a server that
    does both, or if unknown.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    engine: str = "vllm"
    inference_key: str | None = field(default=None, repr=False)
    role: str = ""

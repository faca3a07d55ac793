"""A server's URL and key: all that the HTTP core needs of a server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerTarget:
    """One server. `url` has no trailing slash; `engine` is what runs there, by name.

    `api_key` is what every request to it bears: the control token, or an API key where there is no
    token. `inference_key` is the API key, where it is known: an engine may take no other on routes
    that users ask as well. They never show in repr or logs. `role` is prefill or decode, "" for a
    server that does both, or where nobody knows.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    engine: str = "vllm"
    inference_key: str | None = field(default=None, repr=False)
    role: str = ""

"""A server's URL and key: all that the HTTP core needs of a server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerTarget:
    """One server. `url` has no trailing slash; `engine` is what runs there, by name.

    `api_key` is what every request to it bears: the control token, or an API key where there is no
    token. It never shows in repr or logs.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    engine: str = "vllm"

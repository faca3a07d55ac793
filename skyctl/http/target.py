"""A server's URL and key: all that the HTTP core knows of a server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerTarget:
    """One vLLM server. `url` has no trailing slash.

    `api_key` is what every request to it bears: the control token, or an API key where there is no
    token. It never shows in repr or logs.
    """

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)

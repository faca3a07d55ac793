"""Where one server is, and the key it wants: all that the control core knows of a server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerTarget:
    """One vLLM server. `url` has no trailing slash; `api_key` never shows in repr or logs."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)

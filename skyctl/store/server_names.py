"""Which recorded server is which. Records carry a name, and a name stands for one URL: a server
whose URL is recorded keeps its record, wherever a list or a lookup puts it now, and a server at
another URL never gets it.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from skyctl.store.state import FleetState

Located = tuple[str, str]
"""A server's name, "" if nothing gives it one, and its URL."""

_PORTS = {"http": 80, "https": 443}


@lru_cache(maxsize=4096)
def normalized(url: str) -> str:
    """The URL in the one spelling that records have: scheme and host in lower case, no default
    port, no slash at the end.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if ":" in host:
        with suppress(ValueError):
            host = ipaddress.ip_address(host).compressed
        host = f"[{host}]"
    port = "" if parts.port in (None, _PORTS.get(parts.scheme)) else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"


@dataclass(frozen=True)
class Naming:
    """The names of the servers that were located, and what that does to recorded names."""

    servers: tuple[Located, ...] = ()
    """Name and URL of each server, in the order in which they were located."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The new names of recorded servers, by their present ones."""

    def now(self, name: str) -> str:
        """The name of a recorded server from now on."""
        return self.renamed.get(name, name)


def name_servers(fleet: str, located: Sequence[Located], recorded: Mapping[str, str]) -> Naming:
    """Name the located servers. `recorded` has the URL of each recorded server, "" if unknown.

    A server without a given name keeps its recorded one; a new one is `<fleet>-N`, from its place
    upwards the first that no record has. A given name goes to the server it is given to: a record
    of that name at another URL becomes `NAME@URL`, and stays with that URL. Pure.
    """
    names = {url: name for name, url in recorded.items() if url}
    given = {normalized(url): name for name, url in located if name}
    renamed = {}
    for name, url in recorded.items():
        new = given.get(url) or (f"{name}@{url}" if name in given.values() else name)
        if new != name:
            renamed[name] = new
    taken, servers = set(recorded), []
    for place, (name, url) in enumerate(located):
        name = name or names.get(normalized(url)) or _first_free(fleet, place, taken)
        taken.add(name)
        servers.append((name, url))
    return Naming(tuple(servers), renamed)


def _first_free(fleet: str, place: int, taken: set[str]) -> str:
    numbered = (f"{fleet}-{number}" for number in itertools.count(place))
    return next(name for name in numbered if name not in taken)


def record_names(state: FleetState, naming: Naming) -> None:
    """Record which name is whose, and move records with the names that change."""
    urls = {name: normalized(url) for name, url in naming.servers}
    with state.transaction():
        for name, new in naming.renamed.items():
            state.add_event(new, f"recorded as {name} before")
        state.rename_servers(naming.renamed)
        gone = [row.name for row in state.servers() if row.located and row.name not in urls]
        state.update_servers(
            {name: {"url": url, "located": True} for name, url in urls.items()}
            | {name: {"located": False} for name in gone}
        )

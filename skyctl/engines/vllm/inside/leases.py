"""How long a prefill server keeps KV caches, as far as a decode server knows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MARGIN_S = 0.5  # for the fetch itself, and for clock differences


@dataclass
class _Renewals:
    """An unbroken series of renewals: each came before the previous one had expired."""

    first: float
    ends: float
    broken: bool = False


class Leases:
    """Renewals that were sent; each makes a lease last `extension_s` from then on. A renewal after
    the end of its lease is void: the cache is gone.
    """

    def __init__(self, extension_s: float) -> None:
        self._extension_s = extension_s
        self._sent: dict[str, dict[str, _Renewals]] = {}

    def renew(self, server: str, caches: Collection[str], now: float) -> None:
        """`caches` (all that still wait) were renewed at `now`; others are done."""
        before = self._sent.get(server, {})
        self._sent[server] = after = {}
        for cache in caches:
            row = before.get(cache) or _Renewals(now, now)
            row.broken = row.broken or now > row.ends
            row.ends = row.ends if row.broken else now + self._extension_s
            after[cache] = row

    def lasts(self, server: str, cache: str, granted: float, now: float) -> bool:
        """Whether a cache is kept long enough to fetch it, if its first lease ends at `granted`."""
        row = self._sent.get(server, {}).get(cache)
        ends = granted if row is None or row.first > granted else max(granted, row.ends)
        return now + MARGIN_S < ends

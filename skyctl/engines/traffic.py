"""What a server has answered since its start: counts, times and lengths, that can be added and
subtracted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Histogram:
    """How many values there were, and how many of them up to each bound."""

    count: int = 0
    up_to: dict[float, int] = field(default_factory=dict)

    def combined(self, other: Histogram, sign: int = 1) -> Histogram:
        """With the values of another, or without them (`sign` -1)."""
        bounds = sorted({*self.up_to, *other.up_to})
        return Histogram(
            self.count + sign * other.count,
            {b: self.up_to.get(b, 0) + sign * other.up_to.get(b, 0) for b in bounds},
        )

    def quantile(self, share: float) -> float | None:
        """The value that this share of all values does not exceed, by linear interpolation between
        bounds; the last bound if it is above that. None without values.
        """
        if self.count <= 0:
            return None
        rank, below, counted = share * self.count, 0.0, 0
        for bound, count in sorted(self.up_to.items()):
            if count >= rank and count > counted:
                return below + (bound - below) * (rank - counted) / (count - counted)
            below, counted = bound, count
        return below


@dataclass(frozen=True)
class ServerTraffic:
    """What a server has answered since its start, or in a part of that time."""

    requests: int = 0
    """Answers to requests for inference."""
    errors: int = 0
    """Those with a status of 500 or above."""
    first_token_s: Histogram = field(default_factory=Histogram)
    """Seconds until the first token."""
    latency_s: Histogram = field(default_factory=Histogram)
    """Seconds until the last token."""
    output_tokens: Histogram = field(default_factory=Histogram)
    """Generated tokens of each request."""

    def combined(self, other: ServerTraffic, sign: int = 1) -> ServerTraffic:
        """With what another has answered, or without it (`sign` -1)."""
        return ServerTraffic(
            self.requests + sign * other.requests,
            self.errors + sign * other.errors,
            self.first_token_s.combined(other.first_token_s, sign),
            self.latency_s.combined(other.latency_s, sign),
            self.output_tokens.combined(other.output_tokens, sign),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServerTraffic:
        """From its fields as JSON."""

        def read(name: str) -> Histogram:
            up_to = {float(bound): count for bound, count in data[name]["up_to"].items()}
            return Histogram(data[name]["count"], up_to)

        times = read("first_token_s"), read("latency_s"), read("output_tokens")
        return cls(data["requests"], data["errors"], *times)

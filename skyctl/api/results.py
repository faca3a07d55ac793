"""Return types of the API's verbs, where the operations below have none of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skyctl.core.requests import Outcomes
from skyctl.http.fanout import Outcome, require_all


@dataclass(frozen=True)
class VerbResult:
    """The outcome of pause, resume, sleep or wake: one per server, in fleet order."""

    verb: str
    outcomes: Outcomes

    def __iter__(self) -> Iterator[Outcome[Any]]:
        return iter(self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether every server did it."""
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def elapsed_ms(self) -> float:
        """Wall time of the slowest server, in milliseconds."""
        return max((outcome.elapsed_ms for outcome in self.outcomes), default=0.0)

    def check(self) -> None:
        """Raise unless every server did it, or was skipped for a reason.

        Raises:
            PartialFailure: some did and some did not; its `outcomes` are these.
            ServerError: none did (DeadlineExceeded if all of them ran out of time).
        """
        require_all(self.outcomes, self.verb)

"""What the API's verbs return, where the operations below have no type of their own for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skyctl.core.service import Outcomes
from skyctl.http.fanout import Outcome, require_all


@dataclass(frozen=True)
class VerbResult:
    """What pause, resume, sleep or wake came to: one outcome per server, in fleet order."""

    verb: str
    outcomes: Outcomes

    def __iter__(self) -> Iterator[Outcome[Any]]:
        return iter(self.outcomes)

    def __len__(self) -> int:
        return len(self.outcomes)

    @property
    def ok(self) -> bool:
        """True when every server did it."""
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def elapsed_ms(self) -> float:
        """Wall time of the slowest server, in milliseconds."""
        return max((outcome.elapsed_ms for outcome in self.outcomes), default=0.0)

    def check(self) -> None:
        """Raise unless every server did it, or was skipped for a reason.

        Raises:
            PartialFailure: some did and some did not; its `outcomes` are these.
            ServerError: none did (DeadlineExceeded when all of them ran out of time).
        """
        require_all(self.outcomes, self.verb)

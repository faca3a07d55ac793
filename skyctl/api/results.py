"""What the API's verbs return, where the operations below have no type of their own for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skyctl.http.fanout import Outcome, require_all
from skyctl.store.journal import PushRecord
from skyctl.store.state import ServerRow


@dataclass(frozen=True)
class VerbResult:
    """What pause, resume, sleep or wake came to: one outcome per server, in fleet order."""

    verb: str
    outcomes: tuple[Outcome[None], ...]

    def __iter__(self) -> Iterator[Outcome[None]]:
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


@dataclass(frozen=True)
class WeightsState:
    """What each server carries, as the last push recorded it, and the pushes, newest first."""

    servers: tuple[ServerRow, ...]
    pushes: tuple[PushRecord, ...]

"""What could not be written to a state file: reported once, when a command ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Unrecorded:
    """`writes` changes of `path` exist in memory only, because of `reason`. `hint`: what to do."""

    path: Path
    writes: int
    reason: str
    hint: str

    def with_all(self, others: Iterable[Unrecorded]) -> Unrecorded:
        """This record with the writes of all others for the same path."""
        return replace(self, writes=sum(other.writes for other in others))

    def __str__(self) -> str:
        changes = "one change is" if self.writes == 1 else f"{self.writes} changes are"
        return f"{changes} not recorded in {self.path}: {self.reason}; {self.hint}"


LOST: list[Unrecorded] = []
"""What this process gave up when it closed its state files."""

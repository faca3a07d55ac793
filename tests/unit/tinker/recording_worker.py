"""A worker that records what it is to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.open_models import Limits
from skyctl.tinker.training import Training
from skyctl.tinker.training_process import Refused


class Notes:
    """A worker that does everything, and refuses what is in `refused`."""

    def __init__(self) -> None:
        self.life = 1
        self.calls: list[str] = []
        self.opened: set[str] = set()
        self.turns: list[str] = []
        self.refused: set[str] = set()

    async def ensure(self) -> int:
        return self.life

    async def call(
        self, header: dict[str, Any], body: bytes = b"", *, life: int | None = None
    ) -> Any:
        self.calls.append(header["do"])
        if header["do"] == "close":
            self.opened.discard(header["model"])
        elif header["do"] not in ("save", "park"):
            self.opened.add(header["model"])
            self.turns.append(header["model"])
        if header["do"] in self.refused:
            raise Refused("no", "user")
        units = header.get("units", [])
        computed = {"units": units, "errors": [[""] * len(u) for u in units], "more": False}
        return {"metrics": {}, "size": 1, "bytes": 1, **computed}, body


def training_of(ledger: Ledger, directory: Path, worker: Notes, **limits: float) -> Training:
    kept = Limits(**limits)  # type: ignore[arg-type]
    return Training(ledger, worker, directory, Doorbell(), kept)  # type: ignore[arg-type]

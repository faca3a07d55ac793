"""A worker that records what it is to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.open_models import WITHOUT_END_S, Limits
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


class Sliced(Notes):
    """Computes a forward_backward in so many slices; closing its model drops it."""

    def __init__(self, slices: int) -> None:
        super().__init__()
        self._slices = slices
        self._begun: dict[str, tuple[int, Any]] = {}

    async def call(
        self, header: dict[str, Any], body: bytes = b"", *, life: int | None = None
    ) -> Any:
        do, model = header["do"], header["model"]
        answer = await super().call(header, body, life=life)
        if do == "close":
            self._begun.pop(model, None)
        if do not in ("forward_backward", "go_on"):
            return answer
        slices, answer = (self._slices, answer) if "units" in header else self._begun.pop(model)
        if slices == 1 or header["slice_s"] >= WITHOUT_END_S:
            return answer
        self._begun[model] = slices - 1, answer
        return {"units": [], "errors": [], "more": True}, b""


def training_of(ledger: Ledger, directory: Path, worker: Notes, **limits: float) -> Training:
    kept = Limits(**limits)  # type: ignore[arg-type]
    return Training(ledger, worker, directory, Doorbell(), kept)  # type: ignore[arg-type]

"""Workers that describe how their parameters lie, as a push asks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skyctl.errors import ServerError
from skyctl.wire.layouts import LayoutReport, ParameterLayout, Part, layout_digest
from tests.unit.push.checkpoints import filled

TENSORS = {name: filled([4, 8], seed, "BF16") for seed, name in enumerate(("g", "u", "d"))}


def part(name: str, at: int = 0) -> Part:
    return Part(name, (4, 8), 1, 32, 0, 32, at, 32)


PARAMETERS = (
    ParameterLayout("gate_up", "bfloat16", (8, 8), (part("g"), part("u", 32))),
    ParameterLayout("down", "bfloat16", (4, 8), (part("d"),)),
)
LAYOUT = layout_digest(PARAMETERS)
PROCESSED: dict[str, Any] = {
    "parameters": (replace(PARAMETERS[0], processed=True), PARAMETERS[1]),
    "spare_bytes": 7,
}
NUMBERS = {"gate_up": 17, "down": 4}


class Workers:
    """The workers of one server: what they answer to layouts, and what they were asked."""

    def __init__(self, *reports: Any, failing: str = "", refusal: str = "") -> None:
        self.reports, self.failing, self.refusal = reports, failing, refusal
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def ask_workers(self, method: str, kwargs: dict[str, Any], **_: Any) -> list[Any]:
        self.calls.append((method, kwargs))
        if self.failing:
            error = ServerError(self.failing, status=500)
            error.refusal = self.refusal
            raise error
        return list(self.reports)

    async def collective_rpc(
        self, method: str, *, kwargs: dict[str, Any] | None = None, **_: Any
    ) -> list[Any]:
        return await self.ask_workers(method, kwargs or {})

    async def extension_rpc(self, method: str, **_: Any) -> None:
        self.calls.append((method, {}))

    async def is_paused(self) -> bool:
        return True

    @property
    def asked(self) -> list[str]:
        return [method for method, _ in self.calls]


def report(rank: int = 0, *, proven: bool = True, **changes: Any) -> dict[str, Any]:
    fields = {
        "rank": rank,
        "layout": LAYOUT,
        "parameters": PARAMETERS,
        "proven": (LAYOUT,) if proven else (),
        **changes,
    }
    return LayoutReport(**fields).to_wire()

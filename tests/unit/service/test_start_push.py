"""A push that comes while a new supervisor takes its fleet over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyctl.core.registry import FleetRef
from skyctl.errors import ConflictError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.push.request import PushRequest
from skyctl.service import supervised
from skyctl.service.supervised import SupervisedFleet
from skyctl.store.paths import FleetPaths


class Busy:
    """A supervisor that is busy with these operations, one per call, and then takes the push."""

    def __init__(self, *operations: str) -> None:
        self.operations, self.asked = list(operations), 0

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        assert path == "/jobs"
        self.asked += 1
        if self.operations:
            operation = self.operations.pop(0)
            raise ConflictError(f"busy: {operation}", details={"operation": operation})
        return {"id": "push-7"}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SupervisedFleet:
    monkeypatch.setattr(supervised, "ADOPTION_POLL_S", 0.0)
    monkeypatch.setattr(supervised, "left_alone", lambda paths: False)
    config = FleetConfig(name="demo", model="m", replicas=1)
    return SupervisedFleet(FleetRef("demo", FleetPaths(tmp_path, "demo"), config, tmp_path, None))


async def begun(fleet: SupervisedFleet, busy: Busy, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fleet, "_client", busy)
    return await fleet.start_push(PushRequest(checkpoint="/runs/1"))


async def test_it_waits_until_the_fleet_is_taken_over(
    fleet: SupervisedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy("adopt", "adopt")
    assert await begun(fleet, busy, monkeypatch) == "push-7"
    assert busy.asked == 3


async def test_it_waits_for_nothing_else_and_not_for_ever(
    fleet: SupervisedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConflictError, match="busy: scale"):
        await begun(fleet, Busy("scale"), monkeypatch)
    monkeypatch.setattr(supervised, "ADOPTION_WAIT_S", 0.0)
    with pytest.raises(ConflictError, match="busy: adopt"):
        await begun(fleet, Busy(*["adopt"] * 1000), monkeypatch)

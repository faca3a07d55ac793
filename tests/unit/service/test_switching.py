"""What is refused before a fleet sleeps for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyctl.core.registry import FleetRef
from skyctl.core.status import FleetStatus, Health, ReplicaStatus
from skyctl.errors import ConflictError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.service.switching import _refuse_unable
from skyctl.states import ReplicaState
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState

CONFIG = FleetConfig.model_validate({"name": "judge", "model": "m"})


@pytest.mark.parametrize(
    ("level", "status", "message"),
    [
        (2, {}, "waking judge-0 would serve nothing"),
        (1, {"job": "push-1"}, "fleet judge is busy: push-1"),
    ],
)
def test_no_fleet_sleeps_for_one_that_could_not_serve(
    tmp_path: Path, level: int, status: dict[str, Any], message: str
) -> None:
    paths = FleetPaths(tmp_path, "judge").prepare()
    with FleetState(paths.database) as state:
        state.update_server("judge-0", sleep_level=level)
    ref = FleetRef("judge", paths, CONFIG, tmp_path, None)
    asleep = (ReplicaStatus("judge-0", ReplicaState.ASLEEP, ""),)
    seen = FleetStatus("judge", Health.HEALTHY, asleep, None, device="cuda", **status)
    with pytest.raises(ConflictError, match=message):
        _refuse_unable(ref, seen)

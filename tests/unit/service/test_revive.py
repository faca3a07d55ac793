"""The plan with which a new supervisor takes over what runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyctl.core.planning import plan_offline, ports_of, scaled
from skyctl.core.registry import FleetRef
from skyctl.fleetfile.schema import FleetConfig
from skyctl.service import revive
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_fleet_that_was_scaled_is_taken_over_with_as_many_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    config = FleetConfig.model_validate({"name": "demo", "model": "org/m", "launcher": launcher})
    ref = FleetRef("demo", FleetPaths(tmp_path, "demo").prepare(), config, tmp_path)
    with FleetState(ref.paths.database) as state:
        state.set("ports", json.dumps(ports_of(plan_offline(scaled(config, 3), tmp_path))))
    monkeypatch.setattr(revive, "planned", lambda asked, *_, **__: plan_offline(asked, tmp_path))
    names = [spec.name for spec in revive.as_it_ran(ref).servers]
    assert names == ["demo-0", "demo-1", "demo-2"]

"""Where clients find the Tinker API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyctl.core.registry import FleetRef
from skyctl.core.urls import tinker_place
from skyctl.errors import UsageError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.store.paths import FleetPaths


def ref(home: str = "/home", **config: Any) -> FleetRef:
    found = FleetConfig.model_validate({"name": "lab", "model": "m", **config})
    return FleetRef("lab", FleetPaths(Path(home), "lab"), found, Path(), None)


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "http://127.0.0.1:8790"), ("::1", "http://[::1]:8790")]
)
def test_the_exports_are_for_this_machine_and_do_not_show_the_key(host: str, url: str) -> None:
    where = tinker_place(ref("/a home", lora={"max_rank": 32}, tinker={"host": host}))
    base_url, key = where.as_env().splitlines()
    assert base_url in (f"export TINKER_BASE_URL={url}", f"export TINKER_BASE_URL='{url}'")
    assert key == "export TINKER_API_KEY=\"$(cat '/a home/fleets/lab/tinker.key')\""


def test_a_fleet_without_the_section_is_told_what_to_write() -> None:
    with pytest.raises(UsageError, match="no Tinker API") as caught:
        tinker_place(ref())
    assert "lora: {max_rank: 32}" in caught.value.hint and "skyctl up" in caught.value.hint

"""All fleets of a user: what is wrong with one hides none of the others."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from skyctl.service.listing import list_fleets
from skyctl.store.paths import fleet_paths
from skyctl.store.state import FleetState


async def test_a_fleet_of_a_later_skyctl_is_listed_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    for name in ("later", "ours"):
        paths = fleet_paths(name).prepare()
        paths.fleet_file.write_text(f"name: {name}\n")
        FleetState(paths.database).close()
    with closing(sqlite3.connect(fleet_paths("later").database)) as database:
        database.execute("PRAGMA user_version = 999")
    later, ours = await list_fleets()
    assert (later.name, later.state, ours.name, ours.state) == (
        *("later", "unreadable"),
        *("ours", "down"),
    )
    assert later.reason is not None and "was written by another skyctl" in later.reason

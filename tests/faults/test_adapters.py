"""Adapters of a fleet whose servers and supervisor die, with the real command on stubs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.stub_fleet import StubFleet
from tests.pids import kill
from tests.unit.adapters.files import lora, make_adapter
from tests.unit.push.checkpoints import write_checkpoint

MODULE = "base_model.model.model.layers.0.mlp.up_proj"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path)
    write_checkpoint(tmp_path / "model")
    for number in (1, 2, 3):
        make_adapter(tmp_path / f"x{number}", lora(MODULE), value=number / 10)
    fleet.write(extra="lora: {adapters: {first: ./x1}}\nrouter: {enabled: false}")
    write_checkpoint(tmp_path / "model")  # `write` makes an empty one
    fleet.run("up")
    yield fleet
    fleet.run("down", "--drain-timeout", "0")


def served(fleet: StubFleet) -> list[dict[str, str]]:
    """Directory by name, of each server, as the server says."""
    key = fleet.run("urls", "--show-key").stdout.strip()
    found = []
    for url in fleet.json("urls")["data"]["servers"].values():
        answer = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
        cards = answer.raise_for_status().json()["data"]
        found.append({card["id"]: card["root"] for card in cards if card["parent"]})
    return found


def replicas(fleet: StubFleet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = fleet.json("status")["data"]["replicas"]
    return rows


def test_a_server_that_starts_again_has_the_adapters_before_it_serves(fleet: StubFleet) -> None:
    fleet.run("adapters", "load", "x", "x2")
    before = served(fleet)
    assert [sorted(one) for one in before] == [["first", "x"]] * 2
    kill(replicas(fleet)[0]["pid"])
    fleet.run("wait", "--timeout", "30")
    assert served(fleet) == before
    fleet.run("restart", "stubs-1")
    assert served(fleet) == before
    fleet.run("scale", "3")
    assert served(fleet) == [before[0]] * 3
    listed = fleet.json("adapters")["data"]["adapters"]
    assert [one["servers"] for one in listed] == [["stubs-0", "stubs-1", "stubs-2"]] * 2


def test_a_fleet_that_takes_adapters_no_longer_comes_up_without_them(fleet: StubFleet) -> None:
    fleet.write(extra="router: {enabled: false}")
    write_checkpoint(fleet.directory / "model")
    fleet.run("up", "--timeout", "60")
    assert fleet.json("adapters")["data"]["adapters"] == []
    assert [row["state"] for row in replicas(fleet)] == ["ready", "ready"]


def test_a_supervisor_killed_amid_a_sync_leaves_one_version_everywhere(fleet: StubFleet) -> None:
    marker = fleet.directory / "kill"
    before = served(fleet)
    for point in ("adapters.load.call", "adapters.name.call", "adapters.commit"):
        kill(fleet.json("status")["data"]["supervisor_pid"])
        marker.write_text(point)
        fleet.environ["SKYCTL_KILL_AT"] = f"@{marker}"
        fleet.run("status")  # another supervisor takes its place, and will die at the point
        del fleet.environ["SKYCTL_KILL_AT"]
        fleet.run("adapters", "sync", "first", "x3", expect=4)
        fleet.run("wait", "--timeout", "50")
        assert served(fleet) == before, point
    fleet.run("adapters", "sync", "first", "x3")
    after = served(fleet)
    assert after[0] == after[1] != before[0]
    [listed] = fleet.json("adapters")["data"]["adapters"]
    assert (listed["version"], listed["servers"]) == (5, ["stubs-0", "stubs-1"])

"""What a user's edits of `servers:` do to records, by the real command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killing.attached import AttachedFleet, attached_fleet
from tests.faults.stub_fleet import StubFleet
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.stub.state import EngineRefused, StubEngine


def breaks(engine: StubEngine) -> None:
    """Each update of this server breaks off with a part of the weights loaded."""

    def update(info: dict[str, Any]) -> None:
        engine.fail_update()
        raise EngineRefused("Worker failed with error 'no room'")

    engine.update = update  # type: ignore[method-assign]


def mend(engine: StubEngine) -> None:
    del engine.update  # type: ignore[method-assign]


def servers(fleet: AttachedFleet, *urls: str) -> None:
    """Edit the fleet file."""
    file = fleet.directory / "fleet.yaml"
    lines = file.read_text().splitlines(keepends=True)
    listed = f"servers: [{', '.join(urls)}]\n"
    file.write_text("".join(listed if line.startswith("servers:") else line for line in lines))


async def listed(fleet: AttachedFleet, *command: str) -> dict[str, dict[str, Any]]:
    _, envelope, errors = await fleet.skyctl(*command)
    assert envelope.get("data") or envelope.get("error"), errors
    data = envelope["data"] or envelope["error"]["details"]
    key = next(key for key in ("replicas", "outcomes", "recovered", "servers") if key in data)
    return {row.get("server") or row["name"]: row for row in data[key]}


@pytest.mark.parametrize("edit", ["dropped", "reordered", "respelled"])
async def test_a_half_loaded_server_serves_nobody_whatever_becomes_of_the_list(
    tmp_path: Path, edit: str
) -> None:
    async with attached_fleet(tmp_path) as fleet:
        first, second = fleet._urls
        engine = fleet.stubs[1].engine
        breaks(engine)
        code, _, errors = await fleet.skyctl("sync-weights", fleet.trainer.next())
        assert code != 0 and engine.half_loaded, errors
        edited = {
            "dropped": [second],
            "reordered": [second, first],
            "respelled": [first, second.replace("127.0.0.1", "localhost")],
        }[edit]
        servers(fleet, *edited)
        name = "far-2" if edit == "respelled" else "far-1"
        for verb in ("resume", "pause", "resume", "wake", "recover --yes", "resume"):
            row = (await listed(fleet, *verb.split()))[name]
            assert "old weights" not in row["detail"], row
            assert engine.paused, verb
        assert (await listed(fleet, "status"))[name]["state"] == "quarantined"
        mend(engine)
        code, envelope, errors = await fleet.skyctl("sync-weights", fleet.trainer.next())
        assert code == 0, (envelope, errors)
        await fleet.skyctl("resume")
        assert not engine.paused
        for stub in fleet.stubs:
            assert set(stub.engine.served) <= fleet.committed.keys()


async def test_a_fleet_that_attached_and_starts_servers_now_does_not_take_its_records_over(
    tmp_path: Path,
) -> None:
    async with running([StubServer(), StubServer()]) as targets:
        fleet = StubFleet(tmp_path)
        file = tmp_path / "fleet.yaml"
        urls = [target.url for target in targets]
        attached = f"name: stubs\nservers: [{', '.join(urls)}]\n"
        file.write_text(attached)
        await fleet_command(fleet, "pause")
        file.write_text("name: [")
        refused = await fleet_command(fleet, "down", "--fleet", "stubs", expect=2)
        assert "fleet stubs is attached" in refused
        fleet.write()
        refused = await fleet_command(fleet, "up", expect=1)
        assert "stubs-0, stubs-1" in refused and "`name:` of its own" in refused
        assert "fleet stubs is attached" in await fleet_command(fleet, "down", expect=2)
        file.write_text(attached)
        await fleet_command(fleet, "resume")
        fleet.write()
        await fleet_command(fleet, "up")
        file.write_text(attached)
        assert "first: skyctl down" in await fleet_command(fleet, "pause", expect=1)
        await fleet_command(fleet, "down", "--fleet", "stubs")
        await fleet_command(fleet, "pause")


async def fleet_command(fleet: StubFleet, *arguments: str, expect: int = 0) -> str:
    """One command beside the servers of this process; what it says."""
    done = await asyncio.to_thread(fleet.run, *arguments, expect=expect)
    return done.stdout + done.stderr

"""A fleet from several files, from standard input and with a `.env`, as its user starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.stub_fleet import StubFleet


@pytest.fixture
def fleet(tmp_path: Path) -> StubFleet:
    fleet = StubFleet(tmp_path)
    fleet.write(replicas=1, extra="router: {enabled: false}")
    return fleet


def test_a_fleet_of_several_files_is_changed_and_undone_as_one(fleet: StubFleet) -> None:
    here = fleet.directory
    (here / "prod.yaml").write_text("env: {S_TOKEN: '${S_TOKEN}'}\n")
    (here / ".env").write_text("S_TOKEN=s3cret\n")
    files = ("-f", "fleet.yaml", "-f", "prod.yaml")
    fleet.run("up", *files)
    try:
        assert not fleet.json("status", *files)["data"]["unapplied"]
        assert not fleet.json("status", "--fleet", "stubs")["data"]["unapplied"]
        assert not fleet.json("status")["data"]["unapplied"]
        alone = fleet.json("status", "-f", "fleet.yaml")["data"]
        assert alone["unapplied"], "that file has no S_TOKEN"
        (here / "prod.yaml").write_text("env: {S_TOKEN: '${S_TOKEN}', MORE: x}\n")
        fleet.run("up", *files)
        fleet.run("rollout", "undo")
        changes = fleet.json("up", "--dry-run", *files)["data"]["changes"]
        (process,) = changes
        settings = [difference["setting"] for difference in process["differences"]]
        assert settings == ["MORE"]
        kept = [
            file
            for file in (here / "home").rglob("*")
            if file.is_file() and b"s3cret" in file.read_bytes()
        ]
        assert kept == []
    finally:
        fleet.run("down", *files)


def test_a_fleet_from_standard_input_is_operated_by_its_name(fleet: StubFleet) -> None:
    here = fleet.directory
    (here / "fleet.yaml").rename(here / "made.yaml")
    with (here / "made.yaml").open() as file:
        fleet.run("up", "-f", "-", stdin=file)
    (here / "made.yaml").unlink()
    status = fleet.json("status")["data"]  # the only one
    assert [row["state"] for row in status["replicas"]] == ["ready"]
    assert not status["unapplied"]
    fleet.run("down")


def test_nothing_is_started_from_another_tools_file(fleet: StubFleet) -> None:
    (fleet.directory / "docker-compose.yaml").write_text("services: {vllm: {image: x}}\n")
    refused = fleet.run("up", "-f", "docker-compose.yaml", expect=2)
    assert "docker-compose.yaml:1: this is a Docker Compose file" in refused.stderr
    assert "skyctl init --servers" in refused.stderr
    assert not (fleet.directory / "home" / "fleets").exists()

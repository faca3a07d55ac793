"""A freeze belongs to the fleet that made it: what others may do to a frozen server, and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from skyctl.store.in_doubt import doubt_pause, in_doubt
from skyctl.store.state import FleetState
from tests.faults.stub_fleet import StubFleet
from tests.unit.push.checkpoints import write_checkpoint


@dataclass
class Scene:
    """A fleet that skyctl started, and another, with a state directory of its own, that attached to
    the same servers.
    """

    fleet: StubFleet
    other: StubFleet
    token: str
    urls: list[str]

    def raw(self, path: str, **params: str) -> list[httpx.Response]:
        """The answers of all servers to a program that is not skyctl and has the token."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return [
            httpx.post(url + path, params=params, headers=headers, timeout=10) for url in self.urls
        ]

    def states(self) -> set[str]:
        return {row["state"] for row in self.fleet.replicas().values()}

    def paused(self) -> set[bool]:
        headers = {"Authorization": f"Bearer {self.token}"}
        answers = [httpx.get(f"{url}/is_paused", headers=headers) for url in self.urls]
        return {answer.json()["is_paused"] for answer in answers}


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    fleet = StubFleet(tmp_path)
    fleet.write(faults=getattr(request, "param", "{}"))
    fleet.run("up")
    token = (tmp_path / "home" / "fleets" / "stubs" / "control.token").read_text().strip()
    urls = list(fleet.json("urls")["data"]["servers"].values())
    monkeypatch.setenv("FAR_TOKEN", token)
    other = StubFleet(tmp_path / "elsewhere")
    other.directory.mkdir()
    text = f"name: far\nservers: {json.dumps(urls)}\ncontrol_token_env: FAR_TOKEN\n"
    (other.directory / "fleet.yaml").write_text(text)
    yield Scene(fleet, other, token, urls)
    fleet.run("down", "--drain-timeout", "0")


def test_only_the_fleet_that_froze_servers_thaws_them(scene: Scene) -> None:
    scene.fleet.run("pause", "--mode", "keep")
    for verb in ("resume", "pause", "wake"):
        refused = scene.other.json(verb, expect=1)
        assert "fleet stubs on" in json.dumps(refused) and "--force" in json.dumps(refused), verb
    weights = ("/start_weight_update", "/collective_rpc", "/v1/load_lora_adapter")
    for path in ("/resume", "/wake_up", "/pause", "/sleep", *weights):
        answers = scene.raw(path)
        assert {answer.status_code for answer in answers} == {409}, path
        assert "froze this server" in answers[0].json()["error"]["message"]
    assert scene.paused() == {True}
    scene.fleet.run("resume")
    assert scene.paused() == {False} and scene.states() == {"ready"}
    scene.other.run("pause")  # its turn now


def test_force_takes_a_freeze_over(scene: Scene) -> None:
    scene.other.run("pause")
    scene.fleet.run("resume", expect=1)
    assert scene.paused() == {True}
    scene.fleet.run("resume", "--force")
    assert scene.paused() == {False}


def test_force_takes_the_freeze_of_sleeping_servers_over(scene: Scene) -> None:
    scene.other.run("pause")
    scene.other.run("sleep")
    refused = scene.fleet.json("wake", expect=1)
    assert "skyctl resume --force" in json.dumps(refused)
    assert "skyctl wake" in json.dumps(scene.fleet.json("resume", "--force"))
    scene.fleet.run("wake")
    assert scene.paused() == {False}


def test_a_fleet_whose_state_was_lost_says_what_to_type(scene: Scene) -> None:
    scene.other.run("pause")
    for file in (scene.other.directory / "home" / "fleets" / "far").glob("state.sqlite*"):
        file.unlink()
    refused = scene.other.json("resume", expect=1)
    assert "skyctl resume --force" in json.dumps(refused)
    scene.other.run("resume", "--force")
    assert scene.paused() == {False}


def test_recovery_leaves_frozen_what_another_fleet_froze(scene: Scene) -> None:
    scene.other.run("resume")  # puts its servers on record
    database = scene.other.directory / "home" / "fleets" / "far" / "state.sqlite"
    with FleetState(database) as state:  # what a pause leaves that could not be undone
        servers = [row.name for row in state.servers()]
        doubt_pause(state, servers[0])
    scene.fleet.run("pause", "--mode", "keep")
    scene.other.run("recover", "--yes")
    with FleetState(database) as state:
        assert in_doubt(state) == {} and not any(row.quarantine for row in state.servers())
    assert scene.paused() == {True}
    scene.fleet.run("resume")
    assert scene.states() == {"ready"}


def test_what_was_frozen_by_hand_is_thawed_by_hand_after_a_push(
    scene: Scene, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "next")
    assert {answer.status_code for answer in scene.raw("/pause", mode="keep")} == {200}
    scene.fleet.run("sync-weights", str(tmp_path / "next"))
    assert scene.paused() == {True}
    assert {answer.status_code for answer in scene.raw("/resume")} == {200}
    assert scene.paused() == {False}


@pytest.mark.parametrize(
    "scene", ['{"/update_weights": {"kind": "delay", "seconds": 3}}'], indirect=True
)
def test_nobody_thaws_a_server_in_the_middle_of_a_push(scene: Scene, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "next")
    push = scene.fleet.start("sync-weights", str(tmp_path / "next"))
    try:
        while scene.paused() != {True}:
            assert push.poll() is None
        assert {answer.status_code for answer in scene.raw("/resume")} == {409}
    finally:
        _, errors = push.communicate(timeout=60)
    assert push.returncode == 0, errors
    assert scene.paused() == {False} and scene.states() == {"ready"}


def test_a_push_by_another_fleet_is_undone_and_leaves_the_freeze(
    scene: Scene, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "next")
    scene.fleet.run("pause", "--mode", "keep")
    refused = scene.other.json("sync-weights", str(tmp_path / "next"), expect=1)
    assert "fleet stubs on" in refused["error"]["message"], refused
    assert scene.paused() == {True}
    scene.fleet.run("resume")
    assert scene.states() == {"ready"}

"""A freeze belongs to the fleet that made it: two real servers, the fleet that started them, and
fleets that attached to them.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.integration.fleet_cli import FleetCli, bearer
from tests.integration.streaming import StreamingCompletion

pytestmark = pytest.mark.real

_OTHERS_TRY = (
    "/resume",
    "/wake_up",
    "/pause?mode=abort",
    "/sleep?level=1",
    "/start_weight_update",
    "/collective_rpc",
    "/reset_prefix_cache",
)


@dataclass
class Scene:
    """The servers and what a program on another machine would have of them."""

    fleet: FleetCli
    far: FleetCli
    """Attached, with a state directory of its own: as on another machine."""
    urls: list[str]
    model: str

    def paused(self) -> set[bool]:
        headers = bearer(self.fleet.control_token)
        answers = [httpx.get(f"{url}/is_paused", headers=headers, timeout=30) for url in self.urls]
        return {answer.raise_for_status().json()["is_paused"] for answer in answers}

    def attach(self, name: str, home: Path) -> FleetCli:
        directory = home / name
        directory.mkdir(parents=True)
        text = f"name: {name}\nservers: {json.dumps(self.urls)}\ncontrol_token_env: FAR_TOKEN\n"
        (directory / "fleet.yaml").write_text(text)
        return FleetCli(directory, home / "state", {"FAR_TOKEN": self.fleet.control_token})


@pytest.fixture
def scene(real_fleet: FleetCli, tmp_path: Path) -> Iterator[Scene]:
    urls = real_fleet.data("urls")
    scene = Scene(real_fleet, real_fleet, list(urls["servers"].values()), urls["model"])
    scene.far = scene.attach("far", tmp_path / "elsewhere")
    yield scene
    real_fleet.run("resume", "--force")


def test_nobody_else_thaws_what_a_fleet_froze_on_real_servers(scene: Scene) -> None:
    scene.fleet.run("pause", "--mode", "keep")
    held = [
        StreamingCompletion(url, scene.model, "hello", 8, key=scene.fleet.key) for url in scene.urls
    ]
    with httpx.Client(headers=bearer(scene.fleet.control_token), timeout=30) as stranger:
        for url in scene.urls:
            for path in _OTHERS_TRY:
                answer = stranger.post(url + path, json={})
                assert answer.status_code == 409, f"{path}: {answer.text}"
                assert "fleet tiny on" in answer.json()["error"]["message"]
    assert "--force" in json.dumps(scene.far.json("resume", expect=1))
    assert scene.paused() == {True}
    assert not any(stream.grows_within(0.5) for stream in held)
    scene.fleet.run("resume")
    assert scene.paused() == {False}
    assert [len(stream.result()) for stream in held] == [8, 8]


def test_force_takes_a_freeze_over_on_real_servers(scene: Scene) -> None:
    scene.fleet.run("pause", "--mode", "keep")
    scene.far.run("resume", expect=1)
    assert scene.paused() == {True}
    scene.far.run("resume", "--force")
    assert scene.paused() == {False}


def test_fleets_that_list_the_same_real_servers_exclude_each_other(
    scene: Scene, tmp_path: Path
) -> None:
    near, *others = (scene.attach(f"near-{n}", tmp_path / "elsewhere") for n in range(3))
    checkpoint = scene.fleet.directory / "checkpoints" / "b"
    # a wait lasts as long as the requests of one server: the push holds both, and sends nothing
    streams = [  # several: they take longer than a command to start on a busy machine
        StreamingCompletion(scene.urls[0], scene.model, "hello", 1900, key=scene.fleet.key)
        for _ in range(6)
    ]
    for stream in streams:
        stream.wait_for_tokens(1)
    push = scene.far.start("sync-weights", str(checkpoint), "--mode", "wait")
    try:
        while scene.paused() != {True}:
            assert push.poll() is None
            time.sleep(0.02)
        verbs = (["resume"], ["pause"], ["sync-weights", str(checkpoint)])
        with ExitStack() as running:  # at once: the push ends with the requests
            commands = [
                running.enter_context(fleet.start(*verb, "--json"))
                for fleet, verb in zip((near, *others), verbs, strict=True)
            ]
            for command in commands:
                answer = json.loads(command.communicate(timeout=60)[0])
                assert "fleet far has it: push-1" in answer["error"]["message"], answer
    finally:
        push.send_signal(signal.SIGINT)
        push.communicate(timeout=60)
    assert all(len(stream.result()) == 1900 for stream in streams)
    assert scene.paused() == {False}
    near.run("pause")
    near.run("resume")

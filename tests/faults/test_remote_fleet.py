"""A fleet over two machines, from `up` to `down`, and what dies meanwhile. By ssh; what a way to a
machine must do by Ray, too. `integration/test_machines.py` has the rest of that."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import torch

from skyctl.api import Fleet
from skyctl.live.outline import Outline
from skyctl.push.request import PushResult
from tests.faults.remote_fleet import A, B, RemoteFleet, words
from tests.tiny import make_tiny_checkpoint
from tests.unit.adapters.files import lora, make_adapter
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


@pytest.fixture(scope="module")
def lasting(
    way: Callable[[Path], RemoteFleet], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteFleet]:
    """One that is up; each test leaves it ready."""
    fleet = way(tmp_path_factory.mktemp("remote"))
    fleet.lay_out()
    fleet.run("up")
    yield fleet
    fleet.end()


def test_a_fleet_over_two_machines_from_up_to_down(fleet: RemoteFleet) -> None:
    fleet.lay_out(replicas=3)
    fleet.run("up")
    rows = fleet.replicas()
    nodes = [row["node"].removeprefix(fleet.user) for row in rows.values()]
    assert sorted(Counter(nodes).items()) in ([(A, 2), (B, 1)], [(A, 1), (B, 2)])
    assert [urlsplit(row["url"]).hostname for row in rows.values()] == nodes
    assert {row["pid"] for row in rows.values()} == {
        one.pid for host in (A, B) for one in fleet.servers(host)
    }
    assert all(row["routed"] and row["rss_bytes"] > 2**20 for row in rows.values())
    assert any("Started server" in line for line in fleet.json("logs")["data"]["logs"]["stubs-1"])
    checkpoint = make_tiny_checkpoint(fleet.directory / "tiny", seed=1)
    fleet.run("sync-weights", str(checkpoint))
    versions = {row["weight_version"] for row in fleet.replicas().values()}
    assert len(versions) == 1 and versions.pop().startswith("tiny@")
    fleet.run("up")  # is what the file says
    assert {name: row["pid"] for name, row in fleet.replicas().items()} == {
        name: row["pid"] for name, row in rows.items()
    }
    fleet.run("scale", "1")
    (server,) = [*fleet.servers(A), *fleet.servers(B)]
    assert server.pid == rows["stubs-0"]["pid"]
    fleet.run("down")
    assert fleet.everything() == []
    assert not any((fleet.hosts / A / ".local/state/skyctl/hosted/fleets").iterdir())


def test_a_push_has_a_sender_on_each_machine(fleet: RemoteFleet) -> None:
    fleet.lay_out(replicas=3, more="weight_transfer: {transport: shm}")
    fleet.run("up")
    checkpoint = make_tiny_checkpoint(fleet.directory / "tiny", seed=1)
    pushed = fleet.json("sync-weights", str(checkpoint))["data"]["job"]["result"]
    assert (pushed["transport"], pushed["compared"]["of_bytes"]) == ("shm", pushed["total_bytes"])
    assert all(server["ok"] for server in pushed["servers"]) and len(pushed["servers"]) == 3
    assert not [one for one in fleet.everything() if "skyctl.transfer.sender" in words(one)]
    planned = fleet.json("sync-weights", str(checkpoint), "--dry-run")["data"]["job"]["result"]
    assert planned["plan"]["reason"] == "set in the fleet file; a sender on each machine: 2"
    # the server that takes its place gets them in the same way
    psutil.Process(fleet.replicas()["stubs-1"]["pid"]).kill()
    deadline = time.monotonic() + 30
    while (row := fleet.replicas()["stubs-1"])["restarts"] == 0 or not row["reported_version"]:
        assert time.monotonic() < deadline
    assert row["weight_version"] == pushed["version"] == row["reported_version"]


async def push_from_memory(fleet: RemoteFleet) -> str:
    """The checkpoint that it becomes."""
    tensors = tiny_tensors(3)
    names = {name: torch.zeros(shape) for name, (_, shape, _) in tensors.items()}
    async with Fleet.load(fleet.directory / "fleet.yaml") as pushed_to:
        return (await pushed_to.sync_weights(names, weight_version="from memory")).checkpoint


def test_the_fleets_copies_are_where_all_machines_see_them(
    fleet: RemoteFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = fleet.directory / "shared"
    shared.mkdir()
    fleet.lay_out(more=f"lora: {{}}\nshared_dir: {shared}")
    write_checkpoint(fleet.directory / "model")
    fleet.run("up")
    (place,) = shared.iterdir()
    make_adapter(fleet.directory / "x", lora("base_model.model.model.layers.0.mlp.up_proj"))
    fleet.run("adapters", "load", "x", "x")
    (copy,) = place.glob("adapters/*/live")
    assert (copy / "adapter_config.json").exists()
    assert not copy.is_symlink(), "in memory, which other machines do not see"
    write_checkpoint(fleet.directory / "b", tiny_tensors(9))
    pushed = fleet.json("sync-weights", "b", "--keep")["data"]["job"]["result"]
    assert Path(pushed["checkpoint"]).is_relative_to(place / "kept")
    monkeypatch.setenv("SKYCTL_HOME", str(fleet.directory / "home"))
    live = Path(asyncio.run(push_from_memory(fleet)))
    assert live.is_relative_to(place / "weights") and not live.is_symlink()
    fleet.servers(B)[0].kill()
    fleet.run("wait", "--timeout", "30")
    assert {row["weight_version"] for row in fleet.replicas().values()} == {"from memory"}
    assert len(fleet.json("adapters")["data"]["adapters"][0]["servers"]) == 2

    fleet.lay_out(more="")
    refused = fleet.json("up", expect=1)["error"]
    assert f"read its copies of weights in {place}" in refused["message"]
    fleet.run("down")
    assert [entry.name for entry in place.iterdir()] == ["kept"]
    refused = fleet.json("up", expect=1)["error"]
    assert f"the fleet keeps {pushed['version']} in {place}" in refused["message"]
    fleet.run("down")
    fleet.run("weights", "forget", pushed["version"])
    fleet.run("up")
    fleet.run("down")
    assert list(shared.iterdir()) == []


def test_servers_end_by_themselves_when_nobody_is_heard_of_any_more(fleet: RemoteFleet) -> None:
    fleet.lay_out(grace_s=8)  # a busy machine needs some of it to start
    fleet.run("up")
    here = [psutil.Process(fleet.json("status")["data"]["supervisor_pid"])]
    for process in [*here, fleet.tether("stubs-0"), fleet.tether("stubs-1")]:
        process.kill()
    deadline = time.monotonic() + 30
    while fleet.everything():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    fleet.run("up")  # the record of what may run is settled first
    assert {row["state"] for row in fleet.replicas().values()} == {"ready"}


def test_secrets_are_in_no_command_line(lasting: RemoteFleet) -> None:
    token = (lasting.directory / "home/fleets/stubs/control.token").read_text().strip()
    (server,) = lasting.servers(A)
    assert server.environ()["SKYCTL_CONTROL_TOKEN"] == token
    there = [*lasting.everything(), *lasting.connections(A), lasting.tether("stubs-0")]
    assert not [one for one in there if any(token in word for word in one.cmdline())]
    assert not [one for one in lasting.connections(A) if token in str(one.environ())]


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(lambda fleet: fleet.agents(A), id="agent"),
        pytest.param(lambda fleet: fleet.connections(A), id="connection"),
        pytest.param(lambda fleet: fleet.keepers(A), id="keeper"),
        pytest.param(
            lambda fleet: [psutil.Process(fleet.json("status")["data"]["supervisor_pid"])],
            id="supervisor",
        ),
    ],
)
def test_a_server_outlives_what_only_carries_it(
    lasting: RemoteFleet, victims: Callable[[RemoteFleet], list[psutil.Process]]
) -> None:
    pid = lasting.until({"stubs-0": "ready"})["stubs-0"]["pid"]
    (victim,) = victims(lasting)
    victim.kill()
    time.sleep(3)  # more than the tether's patience
    deadline = time.monotonic() + 30
    while not all(len(found(A)) == 1 for found in (lasting.agents, lasting.keepers)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    rows = lasting.until({"stubs-0": "ready", "stubs-1": "ready"})
    assert rows["stubs-0"]["pid"] == pid and rows["stubs-0"]["restarts"] == 0
    assert [one.pid for one in lasting.servers(A)] == [pid]


@pytest.mark.parametrize(
    ("victim", "why"),
    [
        pytest.param(lambda fleet: fleet.servers(B)[0], "was killed by SIGKILL", id="server"),
        pytest.param(lambda fleet: fleet.tether("stubs-1"), "lost its connection", id="tether"),
    ],
)
def test_what_has_died_for_certain_is_started_again_on_its_machine(
    lasting: RemoteFleet, victim: Callable[[RemoteFleet], psutil.Process], why: str
) -> None:
    before = lasting.until({"stubs-1": "ready"})["stubs-1"]
    victim(lasting).kill()
    deadline = time.monotonic() + 30
    while (row := lasting.replicas()["stubs-1"])["restarts"] == before["restarts"]:
        assert time.monotonic() < deadline
    row = lasting.until({"stubs-1": "ready"})["stubs-1"]
    assert row["pid"] != before["pid"] and why in row["restart_reason"]
    assert [one.pid for one in lasting.servers(B)] == [row["pid"]]


async def push_live(fleet: RemoteFleet, seed: int) -> tuple[Outline, PushResult]:
    """The plan and the result of a trainer that has these tensors in ordinary memory."""
    tensors = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
        for name, (_, shape, data) in tiny_tensors(seed).items()
    }
    async with (
        Fleet.load(fleet.directory / "fleet.yaml") as pushed_to,
        pushed_to.trainer(tensors) as live,
    ):
        return live.plan(), await live.push(f"step-{seed}")


def test_a_trainer_sends_to_servers_on_other_machines(
    fleet: RemoteFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = fleet.directory / "shared"
    shared.mkdir()
    fleet.lay_out(more=f"shared_dir: {shared}")
    write_checkpoint(fleet.directory / "model")
    fleet.run("up")
    monkeypatch.setenv("SKYCTL_HOME", str(fleet.directory / "home"))
    plan, pushed = asyncio.run(push_live(fleet, 5))
    assert (plan.way, plan.transport, plan.memory_bytes) == ("live", "gloo", 0)
    assert "servers run on 127.0.0." in plan.reason
    assert pushed.transport == "live" and pushed.compared["of_bytes"] == pushed.total_bytes
    assert fleet.json("weights", "verify")["data"]["agree"] is True
    # no file has them: the other server writes them for it
    psutil.Process(fleet.replicas()["stubs-1"]["pid"]).kill()
    deadline = time.monotonic() + 30
    while (row := fleet.replicas()["stubs-1"])["restarts"] == 0 or not row["reported_version"]:
        assert time.monotonic() < deadline, row
    assert row["weight_version"] == "step-5" == row["reported_version"]

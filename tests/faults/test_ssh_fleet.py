"""A fleet over two machines by `launcher: ssh`, from `up` to `down`, and what dies meanwhile."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from tests.faults.ssh_fleet import SshFleet

A, B = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SshFleet]:
    fleet = SshFleet(tmp_path)
    yield fleet
    fleet.end()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshFleet]:
    """One that is up; each test leaves it ready."""
    fleet = SshFleet(tmp_path_factory.mktemp("ssh"))
    fleet.lay_out()
    fleet.run("up")
    yield fleet
    fleet.end()


def test_a_fleet_over_two_machines_from_up_to_down(fleet: SshFleet) -> None:
    fleet.lay_out(replicas=3)
    fleet.run("up")
    rows = fleet.replicas()
    assert [row["node"] for row in rows.values()] == [f"me@{A}", f"me@{B}", f"me@{A}"]
    assert [row["url"].startswith(f"http://{A}:") for row in rows.values()] == [True, False, True]
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
    assert fleet.servers(B) == []
    fleet.run("down")
    assert fleet.everything() == []
    assert not any((fleet.hosts / A / ".local/state/skyctl/hosted/fleets").iterdir())


def test_secrets_are_in_no_command_line(lasting: SshFleet) -> None:
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
    lasting: SshFleet, victims: Callable[[SshFleet], list[psutil.Process]]
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
    lasting: SshFleet, victim: Callable[[SshFleet], psutil.Process], why: str
) -> None:
    before = lasting.until({"stubs-1": "ready"})["stubs-1"]
    victim(lasting).kill()
    deadline = time.monotonic() + 30
    while (row := lasting.replicas()["stubs-1"])["restarts"] == before["restarts"]:
        assert time.monotonic() < deadline
    row = lasting.until({"stubs-1": "ready"})["stubs-1"]
    assert row["pid"] != before["pid"] and why in row["restart_reason"]
    assert [one.pid for one in lasting.servers(B)] == [row["pid"]]


def test_a_machine_that_does_not_answer_ssh_serves_on(lasting: SshFleet) -> None:
    pid = lasting.until({"stubs-1": "ready"})["stubs-1"]["pid"]
    lasting.cut(B)
    time.sleep(3)
    row = lasting.replicas()["stubs-1"]
    assert (row["state"], row["pid"]) == ("ready", pid)
    # whoever comes next plans what runs from what is known of the machine
    psutil.Process(lasting.json("status")["data"]["supervisor_pid"]).kill()
    assert lasting.until({"stubs-1": "ready"})["stubs-1"]["pid"] == pid
    lasting.mend(B)


def test_a_supervisor_is_replaced_while_a_machine_is_away(lasting: SshFleet) -> None:
    pid = lasting.until({"stubs-0": "ready", "stubs-1": "ready"})["stubs-0"]["pid"]
    lasting.cut(B)
    psutil.Process(lasting.json("status")["data"]["supervisor_pid"]).kill()
    lasting.tether("stubs-1").kill()
    rows = lasting.until({"stubs-0": "ready", "stubs-1": "unreachable"}, 60)
    assert rows["stubs-0"]["pid"] == pid
    lasting.run("restart", "stubs-0")  # nothing waits for the other machine
    lasting.mend(B)
    row = lasting.until({"stubs-1": "ready"}, 90)["stubs-1"]
    assert [one.pid for one in lasting.servers(B)] == [row["pid"]]


def test_a_machine_that_does_not_answer_at_all_is_no_dead_server(lasting: SshFleet) -> None:
    lasting.until({"stubs-1": "ready"})
    (server,) = lasting.servers(B)
    lasting.cut(B)
    server.send_signal(signal.SIGSTOP)
    row = lasting.until({"stubs-1": "unreachable"}, 60)["stubs-1"]
    assert "No route to host" in row["reason"] and row["routed"] is False
    refused = lasting.json("restart", "stubs-1", expect=1)["error"]["message"]
    assert "its server ends by itself after 60 s" in refused
    lasting.mend(B)
    server.send_signal(signal.SIGCONT)
    lasting.run("up")
    row = lasting.until({"stubs-1": "ready"}, 60)["stubs-1"]
    assert [one.pid for one in lasting.servers(B)] == [row["pid"]]


def test_other_machines_in_the_file_move_a_replica(fleet: SshFleet) -> None:
    fleet.lay_out()
    fleet.run("up")
    fleet.lay_out(hosts=[f"me@{A}"])
    fleet.run("up")
    assert [row["node"] for row in fleet.replicas().values()] == [f"me@{A}"] * 2
    assert (len(fleet.servers(A)), fleet.servers(B)) == (2, [])


def test_servers_end_by_themselves_when_nobody_is_heard_of_any_more(fleet: SshFleet) -> None:
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


def test_down_says_which_machine_it_could_not_ask_and_ends_the_rest(fleet: SshFleet) -> None:
    fleet.lay_out(grace_s=60)
    fleet.run("up")
    fleet.cut(B)
    message = fleet.json("down", expect=1)["error"]["message"]
    assert f"me@{B} cannot be asked over ssh: ssh: connect to host: No route to host" in message
    assert fleet.servers(A) == [] and len(fleet.servers(B)) == 1
    fleet.mend(B)
    fleet.run("down")
    assert fleet.everything() == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda fleet: fleet.cut(B), f"me@{B} cannot be asked over ssh", id="unreachable"
        ),
        pytest.param(
            lambda fleet: fleet.cut(B, "Host key verification failed."),
            f"me@{B}: its host key is not known here, or has changed",
            id="host key",
        ),
        pytest.param(
            lambda fleet: fleet.lay_out(python="/no/such/python"),
            f"me@{A} has no Python at /no/such/python; me@{B} has no Python",
            id="python",
        ),
    ],
)
def test_nothing_is_started_where_a_machine_lacks_something(
    fleet: SshFleet, spoil: Callable[[SshFleet], object], message: str
) -> None:
    fleet.lay_out()
    spoil(fleet)
    process = fleet.start("up", "--json")
    said, _ = process.communicate(timeout=60)
    assert process.returncode in (1, 2)
    assert message in json.loads(said)["error"]["message"]
    assert fleet.everything() == []
    assert not (fleet.directory / "home/fleets/stubs/supervisor.lock").exists()

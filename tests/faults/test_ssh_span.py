"""A replica over two machines by `launcher: ssh`: its parts have one fate. `integration/` has the
same on real servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.faults.remote_fleet import A, B
from tests.faults.ssh_fleet import SshFleet, comes_down_but_for_a_silent_machine
from tests.pids import kill
from tests.tiny import make_tiny_checkpoint

SPAN = "pipeline_parallel_size: 2\nnodes_per_replica: 2\n"
BOTH = f"me@{A}, me@{B}"


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshFleet]:
    """One that is up; each test leaves it ready."""
    fleet = SshFleet(tmp_path_factory.mktemp("span"))
    fleet.lay_out(1, more=SPAN)
    fleet.run("up")
    yield fleet
    fleet.end()


def parts(fleet: SshFleet) -> list[int]:
    return [one.pid for address in (A, B) for one in fleet.servers(address)]


def test_a_replica_over_two_machines_from_up_to_down(fleet: SshFleet) -> None:
    fleet.lay_out(1, more=SPAN)
    fleet.run("validate")
    fleet.run("up")
    row = fleet.replicas()["stubs-0"]
    assert (row["state"], row["node"], row["routed"]) == ("ready", BOTH, True)
    (leader,), (follower,) = fleet.servers(A), fleet.servers(B)
    assert row["pid"] == leader.pid
    assert row["rss_bytes"] > leader.memory_info().rss
    words = follower.cmdline()
    assert words[words.index("--node-rank") + 1] == "1" and "--port" not in words
    secrets = ("SKYCTL_CONTROL_TOKEN", "VLLM_API_KEY")
    assert all(leader.environ()[name] for name in secrets)
    assert not any(name in follower.environ() for name in secrets)
    assert any("headless:" in line for line in fleet.json("logs")["data"]["logs"]["stubs-0"])
    fleet.run("sync-weights", str(make_tiny_checkpoint(fleet.directory / "tiny", seed=1)))
    fleet.run("up")  # is what the file says
    assert parts(fleet) == [leader.pid, follower.pid]
    fleet.run("down")
    assert fleet.everything() == []
    for address in (A, B):
        assert not any((fleet.hosts / address / ".local/state/skyctl/hosted/fleets").iterdir())
    assert not any((fleet.directory / "home/remote").iterdir())


def test_a_sender_is_refused_before_anything_is_touched(lasting: SshFleet) -> None:
    checkpoint = make_tiny_checkpoint(lasting.directory / "other", seed=2)
    refused = lasting.json("sync-weights", str(checkpoint), "--transport", "shm", expect=1)
    assert "shm: stubs-0 runs on 2 machines" in refused["error"]["message"]
    assert "--transport disk" in refused["error"]["hint"]


@pytest.mark.parametrize(
    ("victim", "why"),
    [
        pytest.param(lambda f: f.servers(A)[0], "was killed by SIGKILL", id="leader"),
        pytest.param(
            lambda f: f.servers(B)[0], f"its part on me@{B} was killed by SIGKILL", id="follower"
        ),
        pytest.param(lambda f: f.tether("stubs-0"), "lost its connection", id="tether"),
    ],
)
def test_the_death_of_any_part_restarts_the_whole(
    lasting: SshFleet, victim: Callable[[SshFleet], psutil.Process], why: str
) -> None:
    before = lasting.until({"stubs-0": "ready"})["stubs-0"]
    old = parts(lasting)
    victim(lasting).kill()
    deadline = time.monotonic() + 30
    while (row := lasting.replicas()["stubs-0"])["restarts"] == before["restarts"]:
        assert time.monotonic() < deadline
    row = lasting.until({"stubs-0": "ready"})["stubs-0"]
    assert why in row["restart_reason"]
    now = parts(lasting)
    assert len(now) == 2 and not set(now) & set(old)


def test_a_connection_that_dies_costs_a_new_one(lasting: SshFleet) -> None:
    lasting.until({"stubs-0": "ready"})
    old = parts(lasting)
    for connection in lasting.connections(B):
        connection.kill()
    states, deadline = set(), time.monotonic() + 5  # more than the tether's patience
    while time.monotonic() < deadline:
        states.add(lasting.replicas()["stubs-0"]["state"])
    assert states == {"ready"} and parts(lasting) == old


def test_a_supervisor_is_replaced_and_its_parts_go_on(lasting: SshFleet) -> None:
    lasting.until({"stubs-0": "ready"})
    old = parts(lasting)
    kill(lasting.json("status")["data"]["supervisor_pid"])
    lasting.until({"stubs-0": "ready"})
    assert parts(lasting) == old


def test_a_part_that_dies_while_nobody_supervises_takes_the_others_with_it(
    lasting: SshFleet,
) -> None:
    lasting.until({"stubs-0": "ready"})
    old = parts(lasting)
    kill(lasting.json("status")["data"]["supervisor_pid"])
    lasting.servers(B)[0].kill()
    time.sleep(1)
    lasting.until({"stubs-0": "ready"})
    now = parts(lasting)
    assert len(now) == 2 and not set(now) & set(old)


def test_a_machine_that_is_cut_takes_its_replica_out_of_the_router(lasting: SshFleet) -> None:
    lasting.until({"stubs-0": "ready"})
    old = parts(lasting)
    lasting.cut(B)
    row = lasting.until({"stubs-0": "unreachable"}, 60, routed=False)["stubs-0"]
    assert f"me@{B} cannot be asked over ssh" in row["reason"]
    assert parts(lasting) == old  # nothing is started in its place: it may run
    lasting.mend(B)
    lasting.until({"stubs-0": "ready"}, 60, routed=True)
    assert parts(lasting) == old


def test_down_names_the_machine_that_it_could_not_ask_and_ends_the_rest(fleet: SshFleet) -> None:
    fleet.lay_out(1, more=SPAN)
    comes_down_but_for_a_silent_machine(fleet)


def test_every_part_ends_by_itself_when_nobody_is_heard_of_any_more(fleet: SshFleet) -> None:
    fleet.lay_out(1, grace_s=8, more=SPAN)
    fleet.run("up")
    supervisor = psutil.Process(fleet.json("status")["data"]["supervisor_pid"])
    for process in (supervisor, fleet.tether("stubs-0")):
        process.kill()
    deadline = time.monotonic() + 30
    while fleet.everything():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    fleet.run("up")
    assert fleet.replicas()["stubs-0"]["state"] == "ready"


def test_a_part_that_does_not_start_leaves_nothing(fleet: SshFleet) -> None:
    fleet.lay_out(1, more=SPAN)
    python = fleet.directory / "python"
    python.write_text(
        python.read_text().replace("*.headless) shift 2;", "*.headless) echo no room; exit 3;")
    )
    message = fleet.json("up", expect=1)["error"]["message"]
    assert f"its part on me@{B} exited with code 3" in message, json.dumps(message)
    assert fleet.servers(A) == fleet.servers(B) == []

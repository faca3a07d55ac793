"""A fleet over two machines by `launcher: ssh`: what is true of ssh alone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.faults.remote_fleet import GRACE_S, A, B
from tests.faults.ssh_fleet import SshFleet, comes_down_but_for_a_silent_machine
from tests.pids import kill
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshFleet]:
    """One that is up; each test leaves it ready."""
    fleet = SshFleet(tmp_path_factory.mktemp("ssh"))
    fleet.lay_out()
    fleet.run("up")
    yield fleet
    fleet.end()


def test_a_machine_that_does_not_answer_ssh_serves_on(lasting: SshFleet) -> None:
    pid = lasting.until({"stubs-1": "ready"})["stubs-1"]["pid"]
    lasting.cut(B)
    time.sleep(3)
    row = lasting.replicas()["stubs-1"]
    assert (row["state"], row["pid"]) == ("ready", pid)
    # whoever comes next plans what runs from what is known of the machine
    kill(lasting.json("status")["data"]["supervisor_pid"])
    assert lasting.until({"stubs-1": "ready"})["stubs-1"]["pid"] == pid
    lasting.mend(B)


def test_a_supervisor_is_replaced_while_a_machine_is_away(lasting: SshFleet) -> None:
    pid = lasting.until({"stubs-0": "ready", "stubs-1": "ready"})["stubs-0"]["pid"]
    lasting.cut(B)
    kill(lasting.json("status")["data"]["supervisor_pid"])
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
    row = lasting.until({"stubs-1": "unreachable"}, 60, routed=False)["stubs-1"]
    assert "No route to host" in row["reason"]
    refused = lasting.json("restart", "stubs-1", expect=1)["error"]["message"]
    assert f"its server ends by itself after {GRACE_S} s" in refused
    lasting.mend(B)
    server.send_signal(signal.SIGCONT)
    lasting.run("up")
    row = lasting.until({"stubs-1": "ready"}, 60)["stubs-1"]
    assert [one.pid for one in lasting.servers(B)] == [row["pid"]]


def test_a_machine_that_is_gone_leaves_the_router_before_the_probes_have_counted(
    fleet: SshFleet,
) -> None:
    fleet.lay_out()
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text().replace("health: {", "health: {failures: 1000, "))
    fleet.run("up")
    fleet.cut(B)
    (server,) = fleet.servers(B)
    kill(server.pid)
    row = fleet.until({"stubs-1": "unreachable"}, 60, routed=False)["stubs-1"]
    assert "cannot be asked over ssh" in row["reason"]
    fleet.mend(B)
    again = fleet.until({"stubs-1": "ready"}, 60)["stubs-1"]
    assert [one.pid for one in fleet.servers(B)] == [again["pid"]]


def test_other_machines_in_the_file_move_a_replica(fleet: SshFleet) -> None:
    fleet.lay_out()
    fleet.run("up")
    fleet.lay_out(hosts=[f"me@{A}"])
    fleet.run("up")
    assert [row["node"] for row in fleet.replicas().values()] == [f"me@{A}"] * 2
    assert (len(fleet.servers(A)), fleet.servers(B)) == (2, [])


def test_down_says_which_machine_it_could_not_ask_and_ends_the_rest(fleet: SshFleet) -> None:
    fleet.lay_out()
    comes_down_but_for_a_silent_machine(fleet)


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
    fleet.starts_nothing(message)


def test_a_machine_that_stops_answering_during_up_is_named(fleet: SshFleet) -> None:
    lost = fleet.directory / "lost"  # to a tether; the questions before that were answered
    lost.write_text(
        f"""#!/bin/sh
if [ "$1" = me@{B} ] && grep -q remote.tether /proc/$PPID/cmdline; then
    echo 'ssh: connect to host: Connection timed out' >&2
    exit 255
fi
exec {fleet.directory}/ssh "$@"
"""
    )
    lost.chmod(0o755)
    fleet.lay_out(command=[str(lost)])
    message = fleet.json("up", expect=1)["error"]["message"]
    assert f"me@{B} cannot be asked over ssh: ssh: connect to host: Connection timed out" in message
    rows = fleet.replicas()
    assert (rows["stubs-0"]["state"], rows["stubs-1"]["state"]) == ("ready", "failed")
    assert [one["routed"] for one in rows.values()] == [True, False]
    fleet.lay_out()
    fleet.run("up")
    assert {row["state"] for row in fleet.replicas().values()} == {"ready"}


def test_the_clocks_of_machines_do_not_matter(fleet: SshFleet) -> None:
    for address, hours in ((A, -30), (B, 30)):
        clock = fleet.hosts / address / "clock/sitecustomize.py"
        clock.parent.mkdir(parents=True)
        clock.write_text(
            f"import time\nright = time.time\ntime.time = lambda: right() + {hours * 3600}\n"
        )
    there = fleet.directory / "there"
    there.write_text(f'#!/bin/sh\nPYTHONPATH=$HOME/clock exec {fleet.directory}/python "$@"\n')
    there.chmod(0o755)
    fleet.lay_out(grace_s=8, python=str(there))
    fleet.run("up")
    pids = {name: row["pid"] for name, row in fleet.replicas().items()}
    for address in (A, B):
        (keeper,) = fleet.keepers(address)
        keeper.kill()  # another takes its place
    checkpoint = make_tiny_checkpoint(fleet.directory / "tiny", seed=1)
    fleet.run("sync-weights", str(checkpoint))
    time.sleep(10)  # more than the grace
    rows = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    assert {name: row["pid"] for name, row in rows.items()} == pids
    fleet.run("down")
    assert fleet.everything() == []

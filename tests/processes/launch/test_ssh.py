"""What an ssh that fails is to the user, and what a machine says of itself."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from skyctl import __version__
from skyctl.engines.logs import telling_line
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.base import Node
from skyctl.launch.remote import record
from skyctl.launch.remote.host import RemoteProcess, adopt
from skyctl.launch.remote.machines import read_machines
from skyctl.launch.remote.session import PROTOCOL, ask
from skyctl.launch.remote.tether import VARIABLE, Task
from skyctl.store.processes import SPAWN_VARIABLE

HELLO = json.dumps({"agent": PROTOCOL, "skyctl": __version__})
FACTS = {"address": "10.0.0.7", "gpus": [], "cpus": [{"id": 0, "core": 0}], "ports": [20001]}


def node(script: str, target: str = "me@far") -> Node:
    """A machine whose ssh is a line of shell."""
    return Node(target, "", "/opt/python", ("sh", "-c", script, "ssh"), 60.0)


@pytest.mark.parametrize(
    ("script", "message", "hint"),
    [
        pytest.param(
            "echo 'ssh: connect to host far port 22: Connection refused' >&2; exit 255",
            "me@far cannot be asked over ssh: ssh: connect to host far port 22: Connection refused",
            "ssh me@far",
            id="unreachable",
        ),
        pytest.param(
            "echo 'Host key verification failed.' >&2; exit 255",
            "its host key is not known here, or has changed",
            "look at it once by hand",
            id="host key",
        ),
        pytest.param(
            "echo 'me@far: Permission denied (publickey,password).' >&2; exit 255",
            "does not let us in without a password",
            "ssh-copy-id me@far",
            id="no key",
        ),
        pytest.param(
            "echo 'sh: 1: /opt/python: not found' >&2; exit 127",
            "me@far has no Python at /opt/python",
            "correct `ssh: {python: ...}`",
            id="no python",
        ),
        pytest.param(
            "echo '/opt/python: No module named skyctl' >&2; exit 1",
            "me@far: /opt/python has no skyctl",
            f"install skyctl {__version__} there",
            id="no skyctl",
        ),
        pytest.param(
            'echo \'{"agent": 999, "skyctl": "9.9"}\'; cat',
            f"me@far has skyctl 9.9 in /opt/python, and this machine {__version__}",
            "install the same version there",
            id="another protocol",
        ),
        pytest.param(
            f"echo '{HELLO}'; read question; exit 0",
            "me@far cannot be asked over ssh: ssh exited with code 0",
            "ssh me@far",
            id="ends before it answers",
        ),
        pytest.param(
            f"echo '{HELLO}'; read question; printf '{{\"ended\": \"was'",
            "me@far cannot be asked over ssh: ssh exited with code 0",
            "ssh me@far",
            id="ends in the middle of a line",
        ),
        pytest.param(
            f"echo '{HELLO}'; read question; echo '{{\"ended\": \"was'; cat",
            "me@far does not answer over ssh as its agent would",
            "ssh me@far",
            id="no message",
        ),
    ],
)
async def test_a_machine_that_cannot_be_asked_is_one_sentence(
    script: str, message: str, hint: str
) -> None:
    with pytest.raises(HostUnreachable) as caught:
        await ask(node(script), {"do": "facts"}, 20)
    assert message in caught.value.message and hint in caught.value.hint


async def test_nothing_is_sent_to_an_agent_of_another_protocol(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    script = f'echo \'{{"agent": 999, "skyctl": "9.9"}}\'; cat > {heard}'
    with pytest.raises(HostUnreachable):
        await ask(node(script), {"do": "keep", "env": {"KEY": "secret"}}, 20)
    assert not heard.exists() or not heard.read_text()


async def test_a_silent_machine_is_given_up_in_time() -> None:
    with pytest.raises(HostUnreachable, match="me@far does not answer over ssh"):
        await ask(node(f"echo '{HELLO}'; exec sleep 60"), {"do": "facts"}, 0.2)


async def test_what_an_agent_could_not_do_is_its_machines_sentence() -> None:
    error = json.dumps({"error": "no room"})
    with pytest.raises(SkyctlError, match="me@far: no room"):
        await ask(node(f"echo welcome; echo '{HELLO}'; echo '{error}'"), {"do": "stop"}, 20)


async def test_a_line_that_a_login_shell_leaves_open_hides_no_greeting() -> None:
    login = "printf 'Welcome> '; export SKYCTL_NODE_ADDRESS=127.0.0.1; eval \"$2\""
    shell = ("sh", "-c", login, "ssh")
    here = Node("me@far", "", sys.executable, shell, 60.0)
    facts = await ask(here, {"do": "facts", "ports": 0, "paths": []}, 60)
    assert facts["skyctl"] == __version__


def test_what_machines_have_is_kept_for_a_fleet_that_runs(tmp_path: Path) -> None:
    known = tmp_path / "machines.json"
    well = node(f"echo '{HELLO}'; echo '{json.dumps({**FACTS, 'interface': 'eth1'})}'; cat")
    gone = node("echo 'no route' >&2; exit 255")
    (machine,) = read_machines([well], ports=1, cache=known, running=False)
    assert machine.node is not None and machine.node.address == "10.0.0.7"
    assert [machine.next_port(), machine.next_port()] == [20001, 0]
    assert machine.interface == "eth1"
    (machine,) = read_machines([gone], ports=1, cache=known, running=True)
    assert machine.node is not None and machine.node.address == "10.0.0.7"
    with pytest.raises(HostUnreachable, match="me@far cannot be asked over ssh: no route"):
        machine.next_port()  # another server is to run there
    with pytest.raises(HostUnreachable, match="me@far cannot be asked over ssh: no route"):
        read_machines([gone], ports=1, cache=known, running=False)


def test_another_version_of_skyctl_is_refused_before_anything_starts(tmp_path: Path) -> None:
    hello = json.dumps({"agent": PROTOCOL, "skyctl": "0.0.1"})
    old = node(f"echo '{hello}'; echo '{json.dumps(FACTS)}'; cat")
    with pytest.raises(HostUnreachable, match=r"me@far has skyctl 0\.0\.1 in /opt/python"):
        read_machines([old], ports=1, cache=tmp_path / "machines.json", running=False)


async def test_a_server_counts_as_there_until_its_machine_has_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    gone = record.Record(node("exit 255"), str(tmp_path / "held"), begun=True, pid=7)
    record.write("t", gone)
    process = adopt(None, "t", ())
    assert isinstance(process, RemoteProcess)
    assert [one.pid for one in process.members()] == [7] and not process.alive()
    with pytest.raises(HostUnreachable, match="its server ends by itself after 60 s without us"):
        await process.stop(0.1)
    record.write("t", gone, node=node(f"echo '{HELLO}'; echo '{{\"gently\": true}}'; cat"))
    assert await process.stop(0.1)
    assert process.members() == [] and record.read("t") is None


def test_a_record_for_which_there_is_no_room_is_an_error_of_the_spawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    record.path_of("t").parent.mkdir(parents=True)
    record.path_of("t").with_suffix(f".{os.getpid()}.tmp").symlink_to("/dev/full")
    # nothing is written through it
    with pytest.raises(SkyctlError, match=r"cannot open .*t\.\d+\.tmp"):
        record.write("t", record.Record(node("true"), "x.held"))
    record.path_of("t").with_suffix(f".{os.getpid()}.tmp").unlink()
    record.path_of("t").mkdir()
    with pytest.raises(SkyctlError, match=r"cannot write .*t\.json"):
        record.write("t", record.Record(node("true"), "x.held"))


def test_a_tether_that_can_put_nothing_on_record_says_in_the_log_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    record.write("t", record.Record(node(f"echo '{HELLO}'; cat"), str(tmp_path / "held")))
    monkeypatch.setenv(VARIABLE, json.dumps(asdict(Task(["server"], {}, ()))))
    monkeypatch.setenv(SPAWN_VARIABLE, "t")
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (10, 10))  # bytes of any file
    tether = [sys.executable, "-B", "-m", "skyctl.launch.remote.tether"]
    done = subprocess.run(tether, capture_output=True, text=True, timeout=60, preexec_fn=full)
    why = telling_line(done.stdout.splitlines())
    assert "could not be started: cannot write" in why and "File too large" in why


async def test_of_a_server_on_two_machines_only_the_one_that_did_not_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    asked = tmp_path / "asked"
    well = node(f"echo . >> {asked}; echo '{HELLO}'; echo '{{\"gently\": true}}'; cat")
    first = record.Record(well, str(tmp_path / "held"), begun=True, pid=7, parts=2)
    record.write("t", first)
    gone = record.Record(node("exit 255", "me@away"), first.closed_by, begun=True, pid=8)
    record.write("t-1", gone, lost="no route")
    process = adopt(None, "t", ())
    assert [one.pid for one in process.members()] == [7, 8]
    assert process.connection_lost() == "no route"
    no_room = record.path_of("t").with_suffix(f".{os.getpid()}.tmp")
    no_room.mkdir()
    with pytest.raises(HostUnreachable, match="me@away cannot be asked"):
        await process.stop(0.1)
    no_room.rmdir()
    assert [one.pid for one in process.members()] == [7, 8]  # its answer could not be written
    for _ in range(2):
        with pytest.raises(HostUnreachable, match="me@away cannot be asked"):
            await process.stop(0.1)
        assert [one.pid for one in process.members()] == [8] and record.begun("t")
    assert asked.read_text() == ".\n.\n"
    record.write("t-1", gone, node=well)
    assert await process.stop(0.1)
    assert process.members() == [] and not any(record.path_of("t").parent.iterdir())


async def test_a_server_that_was_never_begun_asks_no_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    record.write("t", record.Record(node("exit 255"), str(tmp_path / "held")))
    process = adopt(None, "t", ())
    assert process.members() == [] and await process.stop(0.1)
    assert not list((tmp_path / "remote").iterdir())


async def test_a_record_that_cannot_be_read_is_no_record_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    record.write("t", record.Record(node("exit 255"), str(tmp_path / "held"), begun=True, pid=7))
    process = adopt(None, "t", ())
    record.path_of("t").unlink()
    record.path_of("t").mkdir()  # read_text raises an OSError that is no FileNotFoundError
    for known in (process, adopt(None, "t", ())):
        assert known.pid is None and len(known.members()) == 1
        with pytest.raises(SkyctlError, match="cannot be read"):
            await known.stop(0.1)


def test_a_record_holds_no_secret_and_is_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    record.write("t", record.Record(node("true"), "x.held", ports=(1, 2)))
    assert record.path_of("t").stat().st_mode & 0o077 == 0
    found = record.read("t")
    assert found is not None and found.ports == (1, 2) and found.node == node("true")


_ASKS = """
import asyncio, sys
from skyctl.launch.base import Node
from skyctl.launch.remote.session import ask

node = Node("far", "far", "python", ("sh", "-c", sys.argv[1], "ssh"), 60.0)
print(asyncio.run(ask(node, {"do": "facts"}, 5))["ok"])
"""


def test_what_a_client_leaves_behind_costs_no_traceback() -> None:
    """As the master of shared connections, which holds the first one's stderr."""
    script = f"sleep 3 >&2 & echo '{HELLO}'; read asked; echo '{{\"ok\": 1}}'; sleep 3"
    done = subprocess.run(
        [sys.executable, "-c", _ASKS, script], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("1\n", "")

"""One process on another machine, by its real tether, agent and keeper."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from skyctl.launch.base import Node
from skyctl.launch.remote import record
from skyctl.launch.remote.host import SSH
from skyctl.launch.remote.session import Session, ask
from skyctl.store.paths import FleetPaths
from tests.faults.ssh_fleet import SshFleet

_PROGRAM = """
import os, sys, time
print(os.environ["CLOSED_BY"], os.environ["SECRET"], flush=True)
while os.path.exists(os.environ["CLOSED_BY"]):
    time.sleep(0.02)
print("open", flush=True)
time.sleep(60)
"""


def until_said(log: Path, word: str) -> str:
    deadline = time.monotonic() + 30
    while word not in (text := log.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    return text


def there(path: str) -> bool:
    return Path(path).exists()


async def test_what_keeps_a_server_closed_here_keeps_it_closed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    paths = FleetPaths(tmp_path / "home", "f").prepare()
    machines = SshFleet(tmp_path)
    machines.lay_out()
    command, python = (str(tmp_path / "ssh"),), str(tmp_path / "python")
    node = Node("me@127.0.0.2", "127.0.0.2", python, command, 60.0)
    held = paths.hold_file("f-0")
    held.touch()
    assert SSH.on is not None
    process = SSH.on(node, ()).spawn(
        [sys.executable, "-c", _PROGRAM],
        {"CLOSED_BY": str(held), "SECRET": "hush"},
        paths.log("f-0"),
        "token",
    )
    try:
        closed_by, secret = until_said(paths.log("f-0"), "hush").split()
        assert secret == "hush" and closed_by != str(held) and there(closed_by)
        held.unlink()
        await asyncio.wait_for(process.settled(), 30)
        assert not there(closed_by)
        until_said(paths.log("f-0"), "open")
        held.touch()
        await asyncio.wait_for(process.settled(), 30)
        assert there(closed_by)
        assert await process.lost() == ""
    finally:
        assert await process.stop(5)
    assert machines.everything() == [] and record.read("token") is None


async def test_what_was_ended_is_not_started_by_a_request_that_comes_late(tmp_path: Path) -> None:
    machines = SshFleet(tmp_path)
    machines.lay_out()
    command, python = (str(tmp_path / "ssh"),), str(tmp_path / "python")
    node = Node("me@127.0.0.2", "127.0.0.2", python, command, 60.0)
    stop = {"do": "stop", "token": "token", "timeout_s": 5}
    argv = ["touch", str(tmp_path / "started")]
    keep = {"do": "keep", "token": "token", "fresh": True, "argv": argv, "env": {}}
    keep |= {"closed": False, "closed_variables": [], "grace_s": 60.0, "at": 0}
    try:
        await ask(node, stop, 30)
        async with asyncio.timeout(30), Session(node) as session:
            await session.send(keep)
            while "ended" not in (message := await session.receive(20)):
                pass
        assert message == {"ended": "was ended"} and not there(str(tmp_path / "started"))
    finally:
        await ask(node, stop, 30)
    assert machines.everything() == []

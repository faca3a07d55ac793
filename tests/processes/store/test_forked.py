"""A process that is forked, as a trainer's data loader is, has nothing of what its parent owns."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyctl.store.locks import Locks
from skyctl.store.state import FleetState
from skyctl.wire.group_store import GroupStoreClient

_FORKS = """
import os, signal, sys
from pathlib import Path

def fork():
    if not os.fork():
        print("forked", flush=True)
        sys.stdin.read()  # lives until the test ends it
        os._exit(0)
    signal.pause()
"""
_TURN = """
from skyctl.store.locks import Locks
lock = Locks(Path(sys.argv[1])).take("turn", "push-1")
signal.signal(signal.SIGUSR1, lambda *_: (lock.release(), print("released", flush=True)))
fork()
"""
_UP = """
import asyncio
from skyctl.store.locks import Locks
signal.signal(signal.SIGUSR1, lambda *_: sys.exit())
async def up():
    async with Locks(Path(sys.argv[1])).hold("turn", "skyctl up", wait_s=0.0):
        fork()
asyncio.run(up())
"""
_STAGED = """
from skyctl.checkpoints.staging import staged
with staged(Path(sys.argv[1]), needed_bytes=None) as checkpoint:
    os.link(checkpoint.parent / ".lock", Path(sys.argv[1], "turn.lock"))
    fork()
"""


def _free(directory: Path) -> bool:
    """Whether no process has a lock on the file, exclusive or shared."""
    with (directory / "turn.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def _parent(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has forked; its child lives until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKS + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_lock_that_is_released_is_free_while_a_forked_child_lives(tmp_path: Path) -> None:
    with _parent(_TURN, str(tmp_path)) as parent:
        assert not _free(tmp_path)
        parent.send_signal(signal.SIGUSR1)
        assert parent.stdout is not None
        assert parent.stdout.readline() == "released\n"
        assert Locks(tmp_path).holders("turn") == []
        Locks(tmp_path).take("turn", "push-2").release()


@pytest.mark.parametrize("script", [_TURN, _UP, _STAGED], ids=["turn", "up", "staged weights"])
def test_a_lock_ends_with_its_holder_and_not_with_a_forked_child(
    tmp_path: Path, script: str
) -> None:
    with _parent(script, str(tmp_path)) as parent:
        assert not _free(tmp_path)
        parent.kill()
        parent.wait()
        assert _free(tmp_path)


_CONNECTED = """
import asyncio
from skyctl.http.connections import KeptConnections
from skyctl.http.transport import Request

async def main():
    asked = KeptConnections().send(Request("POST", sys.argv[1], "/v1/x", {}, b""), timeout_s=60)
    task = asyncio.create_task(asked)
    while not (await asyncio.sleep(0.01) or os.path.exists(sys.argv[2])):
        pass
    fork()

asyncio.run(main())
"""


def test_a_server_notices_the_end_of_a_caller_that_has_forked(tmp_path: Path) -> None:
    accepted = tmp_path / "accepted"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        script = [sys.executable, "-c", _FORKS + _CONNECTED]
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [*script, url, str(accepted)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(30)
                connection.recv(65536)
                accepted.touch()
                assert process.stdout is not None
                assert process.stdout.readline() == "forked\n"
                process.kill()
                assert connection.recv(65536) == b""
        finally:
            process.kill()
            process.communicate()


_STORE = """
from skyctl.wire.group_store import GroupStore
store = GroupStore("127.0.0.1", bytes(32), ranks=1, timeout_s=5)
print(store.port, flush=True)
store.get("joined")
fork()
"""


def test_a_rank_that_stays_notices_the_end_of_a_trainer_that_has_forked() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKS + _STORE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        joining, staying = (
            GroupStoreClient("127.0.0.1", port, bytes(32), timeout_s=30) for _ in range(2)
        )
        ended = threading.Event()
        staying.stay(ended.set)
        joining.set("joined", b"")
        assert process.stdout.readline() == "forked\n"
        assert not ended.is_set()
        process.kill()
        assert ended.wait(30)
    finally:
        process.kill()
        process.communicate()


_HELPED = """
import asyncio
from skyctl.transfer.sender_client import SenderProcess

async def main():
    sender = await SenderProcess.spawn(sys.argv[1])
    fork()

asyncio.run(main())
"""


def test_a_sender_ends_with_a_trainer_that_has_forked(tmp_path: Path) -> None:
    helper, ended = tmp_path / "sender", tmp_path / "ended"
    os.mkfifo(ended)
    report = os.open(ended, os.O_RDONLY | os.O_NONBLOCK)
    helper.write_text(f"#!/bin/sh\ncat > /dev/null\necho ended > {ended}\n")
    helper.chmod(0o700)
    with _parent(_HELPED, str(helper)) as parent:
        parent.kill()
        assert select.select([report], [], [], 30)[0]
        os.close(report)


_WRITES = """
from skyctl.store.state import FleetState
with FleetState(Path(sys.argv[1])) as state:
    with state.transaction():
        for number in range(200):
            state.set(f"before-{number}", "x" * 100_000)
        if not os.fork():
            sys.exit()  # the interpreter ends, and closes what it has
        os.wait()
        for number in range(200):
            state.set(f"after-{number}", "y" * 100_000)
"""


def test_a_transaction_survives_a_forked_child_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    subprocess.run([sys.executable, "-c", _FORKS + _WRITES, str(path)], check=True)
    with FleetState(path, owner=True) as state:
        values = [state.get(f"{when}-{n}") for when in ("before", "after") for n in range(200)]
        assert values == ["x" * 100_000] * 200 + ["y" * 100_000] * 200

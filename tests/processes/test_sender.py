"""The sender process: real memory, real deaths."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.transfer.plan import ChunkPlan, plan_chunks
from skyctl.transfer.sender_client import SenderFailed, SenderProcess
from tests.processes.senders import start_sender
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

TIMEOUT_S = 30.0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return read_checkpoint(str(write_checkpoint(tmp_path / "c", shards=2)))


async def start(checkpoint: Checkpoint, plan: ChunkPlan, **changes: Any) -> SenderProcess:
    arguments = {"transport": "shm", "session": "ab12ab12", "slots": 2, "options": {}, **changes}
    return await start_sender(checkpoint=checkpoint, plan=plan, **arguments)


def slot_bytes(pid: int, descriptor: int, offset: int, nbytes: int) -> bytes:
    with Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as memory:
        return os.pread(memory.fileno(), nbytes, offset)


async def test_every_chunk_arrives_with_the_bytes_on_disk(checkpoint: Checkpoint) -> None:
    plan = plan_chunks(checkpoint.tensors, 600)
    expected = tiny_tensors()
    sender = await start(checkpoint, plan)
    try:
        endpoint = (await sender.opened(timeout_s=TIMEOUT_S)).endpoint
        assert endpoint["pid"] == sender.pid
        seen = set()
        for chunk in plan.chunks:
            filled = await sender.filled(chunk.index, timeout_s=TIMEOUT_S)
            for placed, checksum in zip(chunk.placed, filled.crc32, strict=True):
                data = slot_bytes(
                    sender.pid, endpoint["fds"][filled.slot], placed.offset, placed.tensor.nbytes
                )
                assert data == expected[placed.tensor.name][2]
                assert checksum == zlib.crc32(data)
                seen.add(placed.tensor.name)
            await sender.release(chunk.index)
        assert seen == set(expected)
    finally:
        await sender.close()


async def test_a_slot_is_not_refilled_before_its_release(checkpoint: Checkpoint) -> None:
    plan = plan_chunks(checkpoint.tensors, 300)
    sender = await start(checkpoint, plan)
    try:
        await sender.filled(1, timeout_s=TIMEOUT_S)
        await sender.release(0)
        await sender.filled(2, timeout_s=TIMEOUT_S)
        with pytest.raises(SenderFailed, match="did not say 'filled'"):
            await sender.filled(3, timeout_s=0.2)
    finally:
        await sender.close()


async def test_a_checkpoint_rewritten_in_the_middle_stops_the_sender(
    checkpoint: Checkpoint,
) -> None:
    plan = plan_chunks(checkpoint.tensors, 300)
    sender = await start(checkpoint, plan)
    try:
        await sender.filled(1, timeout_s=TIMEOUT_S)
        for shard in checkpoint.shards:
            os.utime(shard.path)
        await sender.release(0)
        with pytest.raises(SenderFailed, match="changed during the push") as caught:
            await sender.filled(2, timeout_s=TIMEOUT_S)
        assert caught.value.final
        assert "Traceback" in caught.value.details["traceback"]
    finally:
        await sender.close()


async def test_a_shard_replaced_before_the_sender_opens_it_is_noticed(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    write_checkpoint(checkpoint.path, shards=2)
    sender = await start(checkpoint, plan_chunks(checkpoint.tensors, 600))
    try:
        with pytest.raises(SenderFailed, match="changed"):
            await sender.opened(timeout_s=TIMEOUT_S)
    finally:
        await sender.close()


async def test_a_killed_sender_fails_every_wait_and_its_memory_is_gone(
    checkpoint: Checkpoint,
) -> None:
    sender = await start(checkpoint, plan_chunks(checkpoint.tensors, 300))
    try:
        endpoint = (await sender.opened(timeout_s=TIMEOUT_S)).endpoint
        os.kill(sender.pid, signal.SIGKILL)
        with pytest.raises(SenderFailed, match="ended with code -9"):
            await sender.filled(10, timeout_s=TIMEOUT_S)
        with pytest.raises(FileNotFoundError):
            slot_bytes(sender.pid, endpoint["fds"][0], 0, 1)
    finally:
        await sender.close()


async def test_a_sender_that_cannot_start_says_why(checkpoint: Checkpoint) -> None:
    plan = plan_chunks(checkpoint.tensors, 300)
    sender = await start(checkpoint, plan, transport="no_such_transport")
    try:
        with pytest.raises(SenderFailed, match="no_such_transport") as caught:
            await sender.opened(timeout_s=TIMEOUT_S)
        assert caught.value.details["kind"] == "ModuleNotFoundError"
    finally:
        await sender.close()


async def test_a_sender_that_takes_no_commands_is_ended_at_a_deadline(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.transfer.sender_client._COMMAND_TIMEOUT_S", 0.2)
    sender = await SenderProcess.spawn("")
    try:
        os.kill(sender.pid, signal.SIGSTOP)
        async with asyncio.timeout(TIMEOUT_S):
            # more than the pipe and its buffers hold
            await sender.warm(transport="shm", session="x" * 1_000_000, carrier={})
            with pytest.raises(SenderFailed, match="took no command"):
                await sender.warmed(timeout_s=TIMEOUT_S)
    finally:
        await sender.close()


def shell(path: Path, *lines: str) -> str:
    """What starts the interpreter as a shell on another machine would, after these lines."""
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"', ""]))
    path.chmod(0o700)
    return str(path)


async def test_a_line_that_a_login_shell_leaves_open_hides_no_event(tmp_path: Path) -> None:
    sender = await SenderProcess.spawn(shell(tmp_path / "ssh", "printf 'Welcome> '"))
    try:
        await sender.warm(transport="shm", session="ab12ab12", carrier={})
        await sender.warmed(timeout_s=TIMEOUT_S)
    finally:
        await sender.close()


async def test_a_process_that_holds_the_pipes_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """The client of ssh leaves one behind where connections are shared."""
    python = shell(tmp_path / "ssh", "sleep 20 </dev/null >/dev/null &")
    sender = await SenderProcess.spawn(python)
    await sender.warm(transport="shm", session="ab12ab12", carrier={})
    await sender.warmed(timeout_s=TIMEOUT_S)
    async with asyncio.timeout(10.0):
        await sender.close()


ORPHAN = """
import asyncio, os, sys
from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.sender_client import SenderProcess
async def main():
    checkpoint = read_checkpoint(sys.argv[1])
    sender = await SenderProcess.spawn("")
    await sender.open(transport="shm", session="ab12ab12", slots=2, checkpoint=checkpoint,
        plan=plan_chunks(checkpoint.tensors, 300), carrier={})
    await sender.opened(timeout_s=30)
    print(sender.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_sender_dies_with_its_parent(checkpoint: Checkpoint) -> None:
    command = [sys.executable, "-c", ORPHAN, str(checkpoint.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        watch = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([watch], [], [], TIMEOUT_S)
        os.close(watch)
    assert ended


async def test_a_push_goes_on_with_the_carrier_of_a_sender_that_was_warmed(
    checkpoint: Checkpoint,
) -> None:
    plan = plan_chunks(checkpoint.tensors, 1 << 20)
    sender = await SenderProcess.spawn("")
    try:
        await sender.warm(transport="shm", session="ab12ab12", carrier={})
        opening = {"transport": "shm", "session": "", "slots": 1, "carrier": None}
        await sender.open(checkpoint=checkpoint, plan=plan, **opening)  # before it is warm
        await sender.opened(timeout_s=TIMEOUT_S)
        filled = await sender.filled(0, timeout_s=TIMEOUT_S)
        assert len(filled.crc32) == len(checkpoint.tensors)
    finally:
        await sender.close()

"""Receivers of a collective transport, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.transfer.plan import ALIGNMENT, ChunkPlan, plan_chunks
from skyctl.transfer.sender_client import SenderFailed, SenderProcess
from skyctl.transfer.transports.base import Session, chunk_update
from skyctl.transfer.transports.gloo import TRANSPORT as GLOO
from tests.processes.senders import start_sender
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

pytest.importorskip("torch")

SESSION = "ab12ab12"


RECEIVER = """
import json, sys, zlib
from skyctl.engines.vllm.inside.receivers import open_receiver
from skyctl.wire.messages import ChunkUpdate, ReceiverInit
messages = (json.loads(line) for line in sys.stdin)
receiver = open_receiver(ReceiverInit(**next(messages)), 0)
for message in messages:
    found = {}
    for name, tensor in receiver.receive(ChunkUpdate(**message)):
        import torch
        found[name] = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())
    print(json.dumps(found), flush=True)
receiver.close()
"""


class GlooReceivers:
    """Two receivers, each in a process of its own."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> GlooReceivers:
        pipe = asyncio.subprocess.PIPE
        self.processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", RECEIVER, stdin=pipe, stdout=pipe, stderr=pipe
            )
            for _ in range(2)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    def tell(self, number: int, message: dict[str, Any]) -> None:
        stdin = self.processes[number].stdin
        assert stdin is not None
        stdin.write(json.dumps(message).encode() + b"\n")

    async def answer(self, number: int) -> dict[str, int]:
        stdout = self.processes[number].stdout
        assert stdout is not None
        line = await asyncio.wait_for(stdout.readline(), 60)
        return dict(json.loads(line or b"{}"))


async def gloo_sender(directory: Path, plan_size: int) -> tuple[SenderProcess, ChunkPlan]:
    checkpoint = read_checkpoint(str(write_checkpoint(directory)))
    plan = plan_chunks(checkpoint.tensors, plan_size, alignment=ALIGNMENT)
    options = GLOO.sender_options(
        world_size=3,
        server_gpus=[],
        sender_gpu=-1,
        rendezvous_timeout_s=60.0,
        update_timeout_s=60.0,
        address="127.0.0.1",
        across=False,
    )
    sender = await start_sender(
        transport="gloo",
        session=SESSION,
        checkpoint=checkpoint,
        plan=plan,
        slots=2,
        options=options,
    )
    return sender, plan


async def test_gloo_brings_every_chunk_to_two_receivers(tmp_path: Path) -> None:
    sender, plan = await gloo_sender(tmp_path / "c", 1200)
    async with GlooReceivers() as receivers:
        try:
            endpoint = (await sender.opened(timeout_s=60)).endpoint
            session = Session(SESSION, plan, 3, endpoint)
            for number in range(2):
                info = GLOO.init_info(session, rank_offset=1 + number, dialect=None)  # type: ignore[arg-type]
                receivers.tell(number, info)
            await sender.join(timeout_s=60)
            received: list[dict[str, int]] = [{}, {}]
            for chunk in plan.chunks:
                filled = await sender.filled(chunk.index, timeout_s=60)
                for number in range(2):
                    receivers.tell(number, chunk_update(chunk, filled))
                await sender.send(filled, chunk.size, timeout_s=60)
                await sender.release(chunk.index)
                for number in range(2):
                    received[number].update(await receivers.answer(number))
            expected = {name: zlib.crc32(data) for name, (_, _, data) in tiny_tensors().items()}
            assert received == [expected, expected]
        finally:
            await sender.close()


async def test_a_receiver_that_dies_ends_the_broadcast_for_the_sender(tmp_path: Path) -> None:
    sender, plan = await gloo_sender(tmp_path / "c", 1200)
    async with GlooReceivers() as receivers:
        try:
            session = Session(SESSION, plan, 3, (await sender.opened(timeout_s=60)).endpoint)
            for number in range(2):
                info = GLOO.init_info(session, rank_offset=1 + number, dialect=None)  # type: ignore[arg-type]
                receivers.tell(number, info)
            await sender.join(timeout_s=60)
            receivers.processes[1].kill()
            await receivers.processes[1].wait()
            filled = await sender.filled(0, timeout_s=60)
            with pytest.raises(SenderFailed):
                for _ in range(3):  # small sends may be buffered before the loss is seen
                    await sender.send(filled, plan.chunks[0].size, timeout_s=10)
        finally:
            await sender.close()

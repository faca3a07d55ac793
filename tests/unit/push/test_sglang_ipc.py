"""Pushes into SGLang servers by CUDA IPC, on stubs: the sender's GPU memory is a dictionary."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.engines.base import Placement, TensorHeaders
from skyctl.engines.sglang.tensors import bucket, dialect_for
from skyctl.errors import PreflightError, PushError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushFleet, PushRequest, PushServer
from skyctl.push.transaction import PushResult, push
from skyctl.transfer.plan import ChunkPlan
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import SenderProcess
from skyctl.transfer.transports.ipc import by_uuid
from tests.stub.faults import Fault
from tests.stub.sglang import STAGED, SGLangEngine, SGLangStub
from tests.stub.through_httpx import ThroughHttpx
from tests.unit.push.deliveries import ReadySender
from tests.unit.push.fleets import LoopbackTransport, Recorder

CHUNK_BYTES = 16 * 1024


def arguments(handle: bytes, size: int) -> tuple[Any, ...]:
    """Of torch's `rebuild_cuda_tensor`, for a buffer of bytes on GPU 3."""
    return (
        *(torch.Tensor, torch.Size([size]), (1,), 0, torch.UntypedStorage, torch.uint8, 3),
        *(handle, size, 0, False, b"counter", 0, b"event", False),
    )


class BucketSender(ReadySender):
    """Reads chunks into STAGED, and exports them to two servers."""

    async def open(self, *, checkpoint: Checkpoint, plan: ChunkPlan, **more: Any) -> None:
        await super().open(reserve_bytes=more["reserve_bytes"], carrier=more["carrier"])
        self._checkpoint, self._plan = checkpoint, plan

    async def filled(self, chunk: int, **_: Any) -> Filled:
        wanted, handle = self._plan.chunks[chunk], b"chunk-%d" % chunk
        content = bytearray(wanted.size)
        files = [Path(shard.path).read_bytes() for shard in self._checkpoint.shards]  # noqa: ASYNC240
        for placed in wanted.placed:
            tensor = placed.tensor
            begin, end = tensor.begin, tensor.begin + tensor.nbytes
            content[placed.offset : placed.offset + tensor.nbytes] = files[tensor.shard][begin:end]
        STAGED[handle] = bytes(content)
        exported = by_uuid("GPU-3", arguments(handle, wanted.size))
        return Filled(chunk, chunk, (), {"handles": [[exported], [exported]]})


class Fleet:
    """Two stub servers on `a`; `push` brings `b`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.a, self.b = (
            make_tiny_checkpoint(directory / name, seed=seed) for seed, name in enumerate("ab")
        )
        self.stubs = [SGLangStub(SGLangEngine(model=str(self.a))) for _ in range(2)]
        self.senders: list[BucketSender] = []

        async def spawn(*_: Any, **__: Any) -> BucketSender:
            self.senders.append(BucketSender())
            return self.senders[-1]

        monkeypatch.setattr(SenderProcess, "spawn", spawn)

    async def push(self, **changes: Any) -> PushResult:
        servers = tuple(
            PushServer(
                ServerTarget(f"s-{i}", f"http://127.0.0.1:{9000 + i}", engine="sglang"),
                "ipc",
                gpus=(i,),
            )
            for i in range(2)
        )
        fleet = PushFleet("demo", servers, chunk_size=CHUNK_BYTES)
        request = PushRequest(str(self.b), weight_version="2", **changes)
        transport = ThroughHttpx(LoopbackTransport(self.stubs))
        async with ControlClient(transport=transport) as client:
            return await push(request, fleet, client=client, observer=Recorder())

    @property
    def digests(self) -> set[str]:
        return {stub.engine.digest for stub in self.stubs}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(tmp_path, monkeypatch)


async def test_a_push_leaves_what_loading_the_checkpoint_leaves(fleet: Fleet) -> None:
    result = await fleet.push()
    assert result.transport == "ipc" and all(server.ok for server in result.servers)
    assert fleet.digests == {SGLangEngine(model=str(fleet.b)).digest}
    (sender,) = fleet.senders
    assert sender.carriers == [{"server_gpus": [[0], [1]], "by_rank": True}]
    for stub in fleet.stubs:
        updates = stub.engine.log.count("update")
        assert updates > 1 and stub.engine.weight_version == "2"
        # nothing that was cached under the old weights is left, and no update flushed by itself
        assert stub.engine.log[0] == "pause in_place" and stub.engine.log[-1] == "continue"
        assert not (stub.engine.dead or stub.engine.is_pause)


async def test_a_server_that_fails_amid_chunks_is_quarantined(fleet: Fleet) -> None:
    fleet.stubs[1].asgi.faults["/update_weights_from_tensor"] = Fault("status", calls=(2, 3, 4, 5))
    with pytest.raises(PushError) as caught:
        await fleet.push()
    states = [row["state"] for row in caught.value.details["servers"]]
    assert states == ["ready", "quarantined"]
    assert fleet.stubs[1].engine.is_pause


async def test_a_quantized_checkpoint_is_not_sent(fleet: Fleet) -> None:
    config = fleet.b / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {},', 1))
    with pytest.raises(PreflightError, match="no tensors of a quantized checkpoint"):
        await fleet.push()
    assert fleet.senders == [] and not any(stub.engine.log for stub in fleet.stubs)


async def test_there_is_no_layout_to_copy_into(fleet: Fleet) -> None:
    with pytest.raises(PreflightError, match="do not know layouts"):
        await fleet.push(layout="runtime")


class SafeUnpickler(pickle.Unpickler):
    """By SGLang's rule (`utils/common.py`), and with torch's own names."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "rebuild_cuda_tensor":
            return lambda *found: found
        if module == "sglang.srt.weight_sync.tensor_bucket":
            return lambda *found: (name, *found)
        assert f"{module}.".startswith("torch."), f"{module}.{name} is refused"
        return super().find_class(module, name)


@pytest.mark.parametrize("shapes", [((2, 3), (4,)), ((), (0,))])
def test_a_bucket_has_nothing_that_sglang_refuses(shapes: Sequence[tuple[int, ...]]) -> None:
    headers = TensorHeaders(["a.weight", "b"], ["bfloat16", "float8_e4m3fn"], shapes)
    handle = by_uuid("GPU-3", arguments(b"\x80\x00\xff", 128))
    text = bucket(handle, headers, Placement([0, 64], [12, 4]))
    found = SafeUnpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    wanted = (*arguments(b"\x80\x00\xff", 128)[:6], "GPU-3", *arguments(b"\x80\x00\xff", 128)[7:])
    assert found["flattened_tensor"] == wanted
    assert found["metadata"] == [
        ("FlattenedTensorMetadata", "a.weight", shapes[0], torch.bfloat16, 0, 12, 12),
        ("FlattenedTensorMetadata", "b", shapes[1], torch.float8_e4m3fn, 64, 68, 4),
    ]


def test_a_version_that_was_not_read_is_noted() -> None:
    assert dialect_for("0.5.14").note == ""
    assert "0.5.20 was not read" in dialect_for("0.5.20").note

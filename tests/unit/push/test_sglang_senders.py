"""Pushes into SGLang servers by CUDA IPC and by NCCL, on stubs: the sender's GPU memory and its
group are objects of this process.
"""

from __future__ import annotations

import base64
import io
import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.engines.dialect import Placement, TensorHeaders
from skyctl.engines.sglang.engine import bucket
from skyctl.errors import PreflightError, PushError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push import machine_facts
from skyctl.push.check import Checked, check
from skyctl.push.request import PushFleet, PushRequest, PushResult, PushServer, Reading
from skyctl.push.transaction import push
from skyctl.transfer.plan import ChunkPlan
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import Opened, SenderFailed, SenderProcess
from skyctl.transfer.transports.ipc import by_uuid
from tests.stub.faults import Fault
from tests.stub.sglang import GROUPS, STAGED, SGLangEngine, SGLangStub, StubGroup
from tests.stub.through_httpx import ThroughHttpx
from tests.tiny import make_tiny_checkpoint
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
    """Reads chunks into STAGED, exports them to two servers, and broadcasts them to its group."""

    async def open(self, *, checkpoint: Checkpoint, plan: ChunkPlan, **more: Any) -> None:
        await super().open(reserve_bytes=more["reserve_bytes"], carrier=more["carrier"])
        self._checkpoint, self._plan = checkpoint, plan
        if more["carrier"] and "world_size" in more["carrier"]:
            self._store = socket.create_server(("127.0.0.1", 0))
            self.port = self._store.getsockname()[1]
            self.group = GROUPS[self.port] = StubGroup(more["carrier"]["world_size"])

    async def opened(self, **_: Any) -> Opened:
        return Opened(
            {"master_address": "127.0.0.1", "master_port": getattr(self, "port", 1)},
            staged_whole=True,
        )

    async def send(self, filled: Filled, size: int, **_: Any) -> None:
        assert self.group.formed
        await self.group.broadcast(STAGED[b"chunk-%d" % filled.chunk][:size])
        if self.failure is not None:
            raise self.failure

    def kill(self, why: str) -> None:
        self.group.end()
        self.healthy, self.failure = False, SenderFailed(why)

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
    """Two stub servers on `a`; `push` brings `b` by `transport`."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, transport: str, version: str
    ) -> None:
        self.transport = transport
        monkeypatch.setattr(machine_facts, "_gpus_by_node", {})
        monkeypatch.setattr(machine_facts, "_gpus_of_this_machine", lambda: (0, 1, 2, 3, 4))
        self.a, self.b = (
            make_tiny_checkpoint(directory / name, seed=seed) for seed, name in enumerate("ab")
        )
        self.engines = [SGLangEngine(model=str(self.a), version=version) for _ in range(2)]
        self.stubs = [SGLangStub(engine) for engine in self.engines]
        self.gpus: list[tuple[int, ...]] = [(0,), (1,)]
        self.senders: list[BucketSender] = []

        self.settings: list[Any] = []

        async def spawn(*found: Any, **more: Any) -> BucketSender:
            self.settings.append(more.get("nccl_settings", found[1] if found[1:] else None))
            self.senders.append(BucketSender())
            return self.senders[-1]

        monkeypatch.setattr(SenderProcess, "spawn", spawn)

    def fleet(self) -> PushFleet:
        servers = tuple(
            PushServer(
                ServerTarget(f"s-{i}", f"http://127.0.0.1:{9000 + i}", engine="sglang"),
                self.transport,
                gpus=self.gpus[i],
            )
            for i in range(2)
        )
        return PushFleet("demo", servers, reading=Reading(chunk_size=CHUNK_BYTES))

    def client(self) -> ControlClient:
        return ControlClient(transport=ThroughHttpx(LoopbackTransport(self.stubs)))

    async def push(self, path: Path | None = None, **changes: Any) -> PushResult:
        request = PushRequest(str(path or self.b), weight_version="2", **changes)
        async with self.client() as client:
            return await push(request, self.fleet(), client=client, observer=Recorder())

    async def check(self) -> Checked:
        request = PushRequest(str(self.b), dry_run=True)
        async with self.client() as client:
            return await check(request, self.fleet(), client=client)

    @property
    def digests(self) -> set[str]:
        return {stub.engine.digest for stub in self.stubs}


@pytest.fixture(params=["0.5.14", "0.5.23"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["ipc", "nccl"])
def fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, version: str
) -> Fleet:
    return Fleet(tmp_path, monkeypatch, request.param, version)


OPTIONS = {
    "ipc": {"server_gpus": [[0], [1]], "by_rank": True},
    "nccl": {
        "world_size": 3,
        "gpu": 2,
        "server_gpus": [[0], [1]],
        "rendezvous_timeout_s": 30.0,
        "by_id": False,
        "by_torch": True,
    },
}


async def test_a_push_leaves_what_loading_the_checkpoint_leaves(fleet: Fleet) -> None:
    result = await fleet.push()
    assert result.transport == fleet.transport and all(server.ok for server in result.servers)
    assert fleet.digests == {SGLangEngine(model=str(fleet.b)).digest}
    (sender,) = fleet.senders
    assert sender.carriers == [OPTIONS[fleet.transport]]
    assert sender.joins == (fleet.transport == "nccl")
    for stub in fleet.stubs:
        updates = stub.engine.log.count("update")
        assert updates > 1 and stub.engine.weight_version == "2"
        # nothing that was cached under the old weights is left, and no update flushed by itself
        assert stub.engine.log[0] == "pause in_place" and stub.engine.log[-1] == "continue"
        assert not stub.engine.cached
        assert not (stub.engine.dead or stub.engine.is_pause)


async def test_a_server_that_fails_amid_chunks_is_quarantined(fleet: Fleet) -> None:
    path = "tensor" if fleet.transport == "ipc" else "distributed"
    fault = Fault("status", calls=(2, 3, 4, 5))
    fleet.stubs[1].asgi.faults[f"/update_weights_from_{path}"] = fault
    with pytest.raises(PushError) as caught:
        await fleet.push()
    states = [row["state"] for row in caught.value.details["servers"]]
    # what fails in a group ends it for all
    assert states == [{"ipc": "ready", "nccl": "quarantined"}[fleet.transport], "quarantined"]
    assert fleet.stubs[1].engine.is_pause


@pytest.mark.parametrize("fleet", ["nccl"], indirect=True)
async def test_ranks_follow_from_the_sizes_of_servers_and_the_last_group_is_left(
    fleet: Fleet,
) -> None:
    fleet.gpus = [(0, 1), (2, 3)]
    for engine in fleet.engines:
        engine.tp_size = 2
    for path in (fleet.b, fleet.a):  # servers of unknown instances: each push has its own sender
        await fleet.push(path=path)
        assert fleet.digests == {SGLangEngine(model=str(path)).digest}
    first, second = fleet.senders
    assert first.group.ranks == second.group.ranks == {1, 2, 3, 4}
    assert second.carriers[0]["gpu"] == 4
    for engine in fleet.engines:
        changes = [one for one in engine.log if one in ("join", "leave")]
        assert changes == ["join", "leave", "join"] and len(engine.groups) == 1


@pytest.mark.parametrize("fleet", ["nccl"], indirect=True)
async def test_servers_that_share_a_gpu_have_no_group(fleet: Fleet) -> None:
    fleet.gpus = [(0,), (0,)]
    with pytest.raises(PreflightError, match="s-0 and s-1 share GPU 0"):
        await fleet.push()


@pytest.mark.parametrize("fleet", ["nccl"], indirect=True)
async def test_the_sender_takes_over_what_sglang_sets_of_nccls_variables(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    await fleet.push()
    assert fleet.settings == [{"NCCL_CUMEM_ENABLE": "0"}]


async def test_a_dry_run_foretells_memory(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "free_gpu_memory", lambda: dict.fromkeys(range(5), 1 << 36))
    plan = (await fleet.check()).plan
    assert plan.forecasts[0].worker_gpu_bytes >= plan.sizes["largest_chunk"]


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

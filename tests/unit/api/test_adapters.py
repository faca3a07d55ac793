"""Adapters out of a trainer's GPU: into servers, and through a file where that fails."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.adapters import tensors as in_memory
from skyctl.adapters.given import MAY_PASS
from skyctl.adapters.peft import UNWRITTEN, WEIGHTS
from skyctl.errors import PreflightError
from tests.stub.app import StubServer
from tests.stub.state import StubEngine
from tests.unit.adapters.files import UP, lora
from tests.unit.api.fleets import attached
from tests.unit.push.checkpoints import write_checkpoint

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

CONFIG = {"r": 4, "lora_alpha": 8}
SHAPES = lora(UP)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Tensors on a CPU pass for those of a GPU; a file is what servers map of it."""
    exported: list[Path] = []
    mapped: list[Any] = []  # never freed, so that an address is of one buffer

    def export(_: Any, memories: list[Any]) -> Any:
        mapped.append(memories[0])
        file = tmp_path / f"gpu-{len(exported)}" / f"{memories[0].data_ptr()}"
        file.parent.mkdir()
        file.write_bytes(memories[0].numpy().tobytes())
        exported.append(file)
        return [SimpleNamespace(to_wire=lambda: [str(file), 0])], [(0, 0)]

    monkeypatch.setattr(in_memory, "on_one_gpu", lambda _: True)
    monkeypatch.setattr(in_memory, "_FREE", [])
    monkeypatch.setattr("skyctl.wire.exports.Exporter.export", export)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return exported


def trained(seed: int, dtype: Any = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    parts = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    first = next(iter(parts))
    return parts | {first: parts[first].to(dtype or torch.float32)}


def stubs(tmp_path: Path) -> list[StubServer]:
    model = str(write_checkpoint(tmp_path / "base"))
    return [StubServer(StubEngine(model=model)) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_tensors_of_a_gpu_go_into_servers_and_are_written_by_one_of_them(
    tmp_path: Path, gpu: list[Path], dtype: Any
) -> None:
    servers = stubs(tmp_path)
    async with attached(tmp_path, servers) as fleet:
        tensors = trained(1, dtype)
        change = await fleet.adapters.sync("x", tensors, CONFIG, create=True)
        assert change.adapter is not None and change.adapter.rank == 4
        [file] = gpu
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert file.stat().st_size == size
        path = Path(change.adapter.path)
        assert not (path / UNWRITTEN).exists()
        written = load_file(path / WEIGHTS)
        assert all(written[name].equal(tensor) for name, tensor in tensors.items())
        assert [[*server.adapters.served] for server in servers] == [["x"], ["x"]]
        again = await fleet.adapters.sync("x", trained(2, dtype), CONFIG)
        assert again.adapter is not None and again.adapter.digest != change.adapter.digest


@pytest.mark.parametrize(
    ("reason", "tries"),
    [("it loads no adapters", 1), (f"{MAY_PASS}: CUDA out of memory", 2)],
)
async def test_where_servers_cannot_take_what_a_gpu_has_a_file_is_sent(
    tmp_path: Path, gpu: list[Path], reason: str, tries: int
) -> None:
    servers = stubs(tmp_path)
    servers[1].adapters.cannot_take = reason
    async with attached(tmp_path, servers) as fleet:
        change = await fleet.adapters.sync("x", trained(1), CONFIG, create=True)
        assert change.adapter is not None and reason in change.notes[-1]
        written = load_file(Path(change.adapter.path) / WEIGHTS)
        assert all(written[name].equal(tensor) for name, tensor in trained(1).items())
        await fleet.adapters.sync("x", trained(2), CONFIG)
    assert len(gpu) == tries


async def test_nan_on_a_gpu_is_refused_before_a_server_is_asked(
    tmp_path: Path, gpu: list[Path]
) -> None:
    servers = stubs(tmp_path)
    tensors = trained(1)
    tensors[f"{UP}.lora_B.weight"][3, 2] = float("nan")
    async with attached(tmp_path, servers) as fleet:
        with pytest.raises(PreflightError, match=r"lora_B\.weight holds NaN"):
            await fleet.adapters.sync("x", tensors, CONFIG, create=True)
    assert not gpu and not any(server.bodies for server in servers)


async def test_memory_that_servers_were_shown_is_used_again(
    tmp_path: Path, gpu: list[Path]
) -> None:
    """torch would not free it. Nor is it lost where a server refuses it, or a tensor holds NaN."""
    servers = stubs(tmp_path)
    async with attached(tmp_path, servers) as fleet:
        await fleet.adapters.sync("x", trained(1), CONFIG, create=True)
        with pytest.raises(PreflightError, match="NaN"):
            await fleet.adapters.sync(
                "x", {n: t * torch.nan for n, t in trained(2).items()}, CONFIG
            )
        await fleet.adapters.sync("x", trained(2, torch.bfloat16), CONFIG)
        servers[0].adapters.cannot_take = "it sees no such GPU"
        await fleet.adapters.sync("x", trained(3), CONFIG)
    assert len(gpu) == 3 and len({file.name for file in gpu}) == 1


async def test_a_change_tells_of_what_no_server_could_write(
    tmp_path: Path, gpu: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = stubs(tmp_path)
    for server in servers:
        full = partial(answer, server.adapters.rpc)
        monkeypatch.setattr(server.adapters, "rpc", full)
    async with attached(tmp_path, servers) as fleet:
        change = await fleet.adapters.sync("x", trained(1), CONFIG, create=True)
    assert change.adapter is not None
    assert f"{change.adapter.path} is in servers' memory only" in change.notes[-1]
    assert "No space left" in change.notes[-1]


def answer(rpc: Any, method: str, kwargs: dict[str, Any]) -> Any:
    return "No space left" if method == "skyctl_adapter_write" else rpc(method, kwargs)


@pytest.mark.parametrize("method", ["gather", "write_adapter"])
async def test_a_sync_that_is_cancelled_has_left_the_trainers_tensors_alone_when_it_ends(
    tmp_path: Path, gpu: list[Path], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    read, begun, goes_on = getattr(in_memory, method), threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        begun.set()
        assert goes_on.wait(30)
        return read(*given)

    monkeypatch.setattr(in_memory, method, slowly)
    monkeypatch.setattr(in_memory, "on_one_gpu", lambda _: method == "gather")
    async with attached(tmp_path, stubs(tmp_path)) as fleet:
        syncing = asyncio.create_task(fleet.adapters.load("math", trained(1), CONFIG))
        assert await asyncio.to_thread(begun.wait, 30)
        syncing.cancel()
        done, _ = await asyncio.wait([syncing], timeout=0.2)
        goes_on.set()
        assert not done
        with pytest.raises(asyncio.CancelledError):
            await syncing
        assert len(in_memory._FREE) == len(gpu) == (method == "gather")
        assert not await fleet.adapters.list()


class OnGpu(torch.Tensor):
    """What is made of it is an ordinary tensor."""

    device = torch.device("cuda:0")
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("in_file", [False, True])
def test_what_another_stream_of_the_trainer_still_writes_is_waited_for(
    tmp_path: Path, gpu: list[Path], monkeypatch: pytest.MonkeyPatch, in_file: bool
) -> None:
    final = trained(1)
    (tmp_path / "a").mkdir()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in final.items()}

    def finish(*_: Any) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(final[name])

    monkeypatch.setattr(torch.cuda, "synchronize", finish)
    if in_file:
        given = [(name, tensor.as_subclass(OnGpu)) for name, tensor in tensors.items()]
        in_memory.write_adapter(given, CONFIG, tmp_path / "a")
        written = load_file(tmp_path / "a" / WEIGHTS)
        assert all(torch.equal(written[name], tensor) for name, tensor in final.items())
    else:
        in_memory.gather([*tensors.items()], CONFIG, tmp_path / "a")
        sent = b"".join(tensor.numpy().tobytes() for tensor in final.values())
        assert gpu[0].read_bytes()[: len(sent)] == sent

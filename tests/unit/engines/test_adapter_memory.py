"""A worker's copy of an adapter out of another process's memory, loaded by vLLM's own loader."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("vllm")

UP = "base_model.model.model.layers.0.mlp.up_proj"
SHAPES = {f"{UP}.lora_A.weight": [4, 8], f"{UP}.lora_B.weight": [16, 4]}


class Sent:
    """An adapter in a file, and what its sender says of it."""

    def __init__(self, directory: Path, scale: float) -> None:
        from skyctl.wire.device_digest import digest_on_device

        directory.mkdir()
        self.path = str(directory)
        self.tensors = {name: torch.randn(shape) * scale for name, shape in SHAPES.items()}
        header: dict[str, Any] = {}
        self.rows: list[list[Any]] = []
        end = 0
        for name, shape in SHAPES.items():
            begin, end = end, end + self.tensors[name].nbytes
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
            self.rows.append([name, "float32", shape, begin, end - begin])
        raw = json.dumps(header).encode()
        raw = raw.ljust(-(-len(raw) // 8) * 8)
        self.offset = 8 + len(raw)
        self.header = struct.pack("<Q", len(raw)) + raw
        self.file = directory / "adapter_model.safetensors"
        data = b"".join(tensor.numpy().tobytes() for tensor in self.tensors.values())
        self.file.write_bytes(self.header + data)
        self.numbers = digest_on_device([*self.tensors.values()])

    def into(self, given: Any, needed: tuple[str, ...] = ()) -> str:
        source = [str(self.file), self.offset]
        return str(given.take(self.path, self.rows, self.numbers, source, needed))


@pytest.fixture
def worker() -> Any:
    from vllm.lora.lora_model import LoRAModel

    manager = SimpleNamespace(_lora_model_cls=LoRAModel, _adapter_manager=SimpleNamespace())
    runner = SimpleNamespace(lora_manager=manager)
    return SimpleNamespace(device=torch.device("cpu"), model_runner=runner)


@pytest.fixture
def given(worker: Any) -> Any:
    from skyctl.engines.vllm.inside.adapter_memory import GivenAdapters

    return GivenAdapters(worker)


@pytest.fixture
def load(worker: Any) -> Callable[[str], Any]:
    """What vLLM's manager does with a path, and then with the adapter: it scales it in place."""

    def load(path: str) -> Any:
        from vllm.lora.peft_helper import PEFTHelper

        config = {"r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]}
        model = worker.model_runner.lora_manager._lora_model_cls.from_local_checkpoint(
            path,
            {"up_proj"},
            peft_helper=PEFTHelper.from_dict(config),
            lora_model_id=1,
            device="cpu",
            dtype=torch.bfloat16,
        )
        [layer] = model.loras.values()
        layer.optimize()
        return layer

    return load


def test_vllm_loads_from_memory_what_it_would_read(
    tmp_path: Path, given: Any, load: Callable[[str], Any]
) -> None:
    sent, other = Sent(tmp_path / "x", 0.1), Sent(tmp_path / "y", 0.1)
    read = load(sent.path)
    assert sent.into(given) == ""
    sent.file.unlink()
    for _ in range(2):  # vLLM drops adapters and loads them again
        loaded = load(sent.path)
        assert torch.equal(loaded.lora_a, read.lora_a) and torch.equal(loaded.lora_b, read.lora_b)
    assert load(other.path)  # other paths are read as ever
    given.release([sent.path])
    with pytest.raises(ValueError, match="doesn't contain tensors"):
        load(sent.path)


def test_one_bit_that_is_not_what_was_sent_refuses_it(
    tmp_path: Path, given: Any, load: Callable[[str], Any]
) -> None:
    sent = Sent(tmp_path / "x", 0.1)
    octets = bytearray(sent.file.read_bytes())
    octets[-5] ^= 1
    sent.file.write_bytes(octets)
    with pytest.raises(RuntimeError, match=r"lora_B\.weight is not what was sent"):
        sent.into(given)
    sent.file.unlink()
    with pytest.raises(ValueError, match="doesn't contain tensors"):
        load(sent.path)


def test_memory_that_is_not_there_is_a_reason_and_no_failure(
    tmp_path: Path, given: Any, worker: Any
) -> None:
    sent = Sent(tmp_path / "x", 0.1)
    sent.file.unlink()
    assert "cannot reach the tensors" in sent.into(given)
    worker.model_runner.lora_manager._adapter_manager.moe_ep_load_spec = object()
    assert "some of the experts" in sent.into(given)
    del worker.model_runner.lora_manager
    assert sent.into(given) == "it loads no adapters"


def test_it_writes_what_it_holds_and_only_that(tmp_path: Path, given: Any) -> None:
    sent = Sent(tmp_path / "x", 0.1)
    assert sent.into(given) == ""
    whole = sent.file.read_bytes()
    file = tmp_path / "file"
    assert given.write("/elsewhere", str(file), sent.offset) == "absent"
    state = "writing"
    while state == "writing":
        state = given.write(sent.path, str(file), sent.offset)
    assert "FileNotFoundError" in state
    file.write_bytes(sent.header.ljust(len(whole), b"\0"))
    state = "writing"
    while state == "writing":
        state = given.write(sent.path, str(file), sent.offset)
    assert state == "written" and file.read_bytes() == whole


def test_what_is_not_needed_goes_with_the_next(
    tmp_path: Path, given: Any, load: Callable[[str], Any]
) -> None:
    first, second, third = (Sent(tmp_path / name, 0.1) for name in "xyz")
    first.into(given)
    second.into(given, (first.path,))
    third.into(given, (second.path,))
    for sent in (first, second, third):
        sent.file.unlink()
    assert load(second.path) and load(third.path)
    with pytest.raises(ValueError, match="doesn't contain tensors"):
        load(first.path)

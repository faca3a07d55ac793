"""Checkpoints that must not be pushed, refused before a server is touched, by file and tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyctl.errors import PushError, SkyctlError
from skyctl.push.request import PushRequest
from skyctl.push.transaction import push
from tests.unit.push.checkpoints import (
    CONFIG,
    change_index,
    filled,
    safetensors,
    tiny_tensors,
    write_checkpoint,
)
from tests.unit.push.fleets import Recorder, Stubs

NORM = "model.norm.weight"


def truncated(path: Path) -> None:
    shard = write_checkpoint(path, shards=2) / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 8)


def cut_in_its_header(path: Path) -> None:
    os.truncate(write_checkpoint(path) / "model.safetensors", 40)


def empty_shard(path: Path) -> None:
    (write_checkpoint(path) / "model.safetensors").write_bytes(b"")


def missing_shard(path: Path) -> None:
    (write_checkpoint(path, shards=3) / "model-00002-of-00003.safetensors").unlink()


def missing_tensor(path: Path) -> None:
    tensors = tiny_tensors(2)
    del tensors[NORM]
    write_checkpoint(path, tensors)


def unknown_tensor(path: Path) -> None:
    write_checkpoint(path, {**tiny_tensors(2), "model.layers.7.extra": filled([8], 1)})


def wrong_shape(path: Path) -> None:
    write_checkpoint(path, {**tiny_tensors(2), NORM: filled([9], 1)})


def wrong_architecture(path: Path) -> None:
    config = {**CONFIG, "architectures": ["OtherForCausalLM"]}
    write_checkpoint(path, tiny_tensors(2), config=config)


def wrong_size(path: Path) -> None:
    write_checkpoint(path, tiny_tensors(2), config={**CONFIG, "num_hidden_layers": 3})


def quantized(path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    write_checkpoint(path, tiny_tensors(2), config=config)


def unknown_dtype(path: Path) -> None:
    raw = safetensors(tiny_tensors(2))
    (path).mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(raw.replace(b'"F32"', b'"F99"', 1))


def header_is_no_json(path: Path) -> None:
    write_checkpoint(path)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 16) + b"{" * 16)


def offsets_overlap(path: Path) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    write_checkpoint(path)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(12))


def index_leads_outside(path: Path) -> None:
    write_checkpoint(path, shards=2)
    index = path / "model.safetensors.index.json"
    text = index.read_text().replace("model-00001-of", "../model-00001-of")
    index.write_text(text)


def index_names_nothing(path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["model.norm.weight"]
    write_checkpoint(path, tensors, shards=2)
    change_index(path, {"model.norm.weight": "model-00001-of-00002.safetensors"})


def pickles(path: Path) -> None:
    write_checkpoint(path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def no_config(path: Path) -> None:
    (write_checkpoint(path) / "config.json").unlink()


def config_is_no_json(path: Path) -> None:
    (write_checkpoint(path) / "config.json").write_text("{")


def unreadable_link(path: Path) -> None:
    shard = write_checkpoint(path) / "model.safetensors"
    shard.unlink()
    shard.symlink_to(path / "gone")


CHECKPOINTS: dict[Callable[[Path], None], str] = {
    truncated: "model-00002-of-00002.safetensors is truncated",
    cut_in_its_header: "model.safetensors",
    empty_shard: "model.safetensors",
    missing_shard: "model-00002-of-00003.safetensors",
    missing_tensor: f"{NORM} is missing",
    unknown_tensor: r"model.layers.7.extra \[8\] is not in the model",
    wrong_shape: rf"{NORM} is \[9\] here, the servers run \[8\]",
    wrong_architecture: "architectures is OtherForCausalLM here",
    wrong_size: "num_hidden_layers is 3 here",
    quantized: "quantized",
    unknown_dtype: "F99",
    header_is_no_json: "model.safetensors",
    offsets_overlap: "model.safetensors",
    index_leads_outside: "index.json",
    index_names_nothing: r"model.norm.weight is missing",
    pickles: r"no \*.safetensors",
    no_config: "no config.json",
    config_is_no_json: "config.json",
    unreadable_link: "model.safetensors",
}


@pytest.mark.parametrize("broken", CHECKPOINTS, ids=lambda make: make.__name__)
async def test_a_bad_checkpoint_is_refused_before_pausing(
    tmp_path: Path, broken: Callable[[Path], None]
) -> None:
    stubs = Stubs(tmp_path)
    broken(tmp_path / "bad")
    async with stubs.client() as client:
        with pytest.raises(SkyctlError, match=CHECKPOINTS[broken]) as caught:
            request = PushRequest(str(tmp_path / "bad"))
            await push(request, stubs.fleet, client=client, observer=Recorder())
    assert not isinstance(caught.value, PushError)
    assert [engine.log for engine in stubs.engines] == [[], []]


async def test_another_dtype_is_cast_and_it_is_said(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path)
    tensors = {**tiny_tensors(2), NORM: filled([8], 1, "BF16")}
    half = write_checkpoint(tmp_path / "half", tensors)
    async with stubs.client() as client:
        result = await push(PushRequest(str(half)), stubs.fleet, client=client, observer=Recorder())
    assert any(f"{NORM} is BF16 here, F32" in note and "cast" in note for note in result.notes)


@pytest.fixture
def no_permission(tmp_path: Path) -> Iterator[Path]:
    shard = write_checkpoint(tmp_path / "closed") / "model.safetensors"
    shard.chmod(0)
    yield tmp_path / "closed"
    shard.chmod(0o600)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
async def test_a_shard_that_may_not_be_read_is_refused_before_pausing(
    tmp_path: Path, no_permission: Path
) -> None:
    stubs = Stubs(tmp_path)
    async with stubs.client() as client:
        with pytest.raises(SkyctlError, match=r"model\.safetensors"):
            request = PushRequest(str(no_permission))
            await push(request, stubs.fleet, client=client, observer=Recorder())
    assert [engine.log for engine in stubs.engines] == [[], []]

"""Tiny checkpoints written by hand: safetensors files without torch or the safetensors package."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.checkpoints.header import DTYPE_BITS

CONFIG = {
    "architectures": ["TinyForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "vocab_size": 16,
}


def safetensors(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    """A well-formed file: name → (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values())


def filled(shape: list[int], seed: int, dtype: str = "F32") -> tuple[str, list[int], bytes]:
    """A tensor of deterministic bytes."""
    count = DTYPE_BITS[dtype] // 8
    for size in shape:
        count *= size
    return dtype, shape, bytes((seed * 31 + i * 7) % 251 for i in range(count))


def tiny_tensors(seed: int = 1) -> dict[str, tuple[str, list[int], bytes]]:
    """A two-layer model."""
    shapes: dict[str, list[int]] = {"lm_head.weight": [16, 8], "model.norm.weight": [8]}
    for layer in (1, 0):
        prefix = f"model.layers.{layer}"
        for projection in ("v_proj", "q_proj", "o_proj", "k_proj"):
            shapes[f"{prefix}.self_attn.{projection}.weight"] = [8, 8]
        for projection in ("up_proj", "down_proj", "gate_proj"):
            shapes[f"{prefix}.mlp.{projection}.weight"] = [16, 8]
    shapes["model.embed_tokens.weight"] = [16, 8]
    return {name: filled(shape, seed + i) for i, (name, shape) in enumerate(shapes.items())}


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, tuple[str, list[int], bytes]] | None = None,
    *,
    shards: int = 1,
    index: bool = True,
    config: Mapping[str, Any] = CONFIG,
) -> Path:
    """A Hugging Face directory; several shards get an index unless told otherwise."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    items = list((tiny_tensors() if tensors is None else tensors).items())
    if shards == 1:
        (directory / "model.safetensors").write_bytes(safetensors(dict(items)))
        return directory
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(items[number::shards])
        (directory / name).write_bytes(safetensors(part))
        weight_map.update(dict.fromkeys(part, name))
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(text)
    return directory


def rewrite_unseen(directory: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """Other bytes of the same size into the only shard, in place, with its modification time put
    back, as `rsync --inplace -t` and `cp -p` do.
    """
    shard = directory / "model.safetensors"
    before = shard.stat()
    while shard.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock has coarse ticks
        with shard.open("r+b") as file:
            file.write(safetensors(tensors))
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert shard.stat().st_size == before.st_size


def change_index(directory: Path, change: Mapping[str, str | None]) -> None:
    """Name other shards, or none, for tensors of its index."""
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, shard in change.items():
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


def names_below(directory: Path) -> list[str]:
    """Names of the files and directories anywhere below, but for the roots that stay."""
    found = [p for p in directory.rglob("*") if p.name != f"skyctl-{os.getuid()}"]
    return sorted(p.name for p in found)

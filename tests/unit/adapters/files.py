"""Small models and adapters on disk, made without torch."""

from __future__ import annotations

import json
import shutil
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyctl.adapters.peft import CONFIG, UNWRITTEN, WEIGHTS
from skyctl.adapters.requests import SentTensors
from skyctl.checkpoints.header import read_header

HIDDEN, WIDE, VOCABULARY = 8, 16, 32
BASE = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (WIDE, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}
UP = "base_model.model.model.layers.0.mlp.up_proj"


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], value: float = 0.5
) -> None:
    """A file of float32 tensors, all of the same number."""
    header, data = {}, b""
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        offsets = [len(data), len(data) + 4 * count]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": offsets}
        data += array("f", [value] * count).tobytes()
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def make_model(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, **config}))
    write_safetensors(directory / "model.safetensors", BASE)
    return directory


def lora(module: str, rank: int = 4, *, rows: int = WIDE, columns: int = HIDDEN) -> dict[str, Any]:
    """The two tensors of one module."""
    return {
        f"{module}.lora_A.weight": (rank, columns),
        f"{module}.lora_B.weight": (rows, rank),
    }


def make_adapter(
    directory: Path,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    *,
    value: float = 0.5,
    **config: Any,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["up_proj"],
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    write_safetensors(directory / "adapter_model.safetensors", tensors or lora(UP), value)
    return directory


def leave_in_memory(trainer: Path, directory: Path, numbers: Sequence[int]) -> SentTensors:
    """Make an adapter in `directory` whose tensors only a trainer has: a file stands for it."""
    source = trainer / WEIGHTS
    begins = min(tensor.begin for tensor in read_header(source)[1])
    shutil.copyfile(trainer / CONFIG, directory / CONFIG)
    with (directory / UNWRITTEN).open("wb") as file:
        file.write(source.read_bytes()[:begins])
        file.truncate(source.stat().st_size)
    return SentTensors(numbers=tuple(numbers), export=(str(source), begins))

"""Checkpoints whose linear layers are quantized to FP8 in blocks, as Qwen and DeepSeek ship them
(`fp8`), and as llm-compressor writes them (`compressed-tensors`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK = 128
_LARGEST = 448.0  # of float8_e4m3fn
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [_BLOCK, _BLOCK],
}
_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                **_EIGHT_BITS,
                "strategy": "block",
                "block_structure": [_BLOCK, _BLOCK],
                "dynamic": False,
            },
            "input_activations": {
                **_EIGHT_BITS,
                "strategy": "group",
                "group_size": _BLOCK,
                "dynamic": True,
            },
        }
    },
}


def quantize(source: Path, target: Path, settings: Mapping[str, Any]) -> None:
    """Write a checkpoint's copy whose linear layers are quantized (sizes: multiples of 128).
    Routers of experts are left as they are, for `FP8` only."""
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map: dict[str, str] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(shard).items():
            if name.split(".")[-2] in _LINEAR:
                rows, columns = tensor.shape
                blocks = tensor.to(device, torch.float32).view(
                    rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK
                )
                scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / _LARGEST
                fitted = (blocks / scale[:, None, :, None]).view(rows, columns)
                tensors[name] = fitted.to(torch.float8_e4m3fn).cpu()
                suffix = "_scale_inv" if settings["quant_method"] == "fp8" else "_scale"
                tensors[f"{name}{suffix}"] = scale.cpu()
            else:
                tensors[name] = tensor
        save_file(tensors, target / shard.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = dict(settings)
    if routers := [name.removesuffix(".weight") for name in weight_map if ".gate." in name]:
        config["quantization_config"]["modules_to_not_convert"] = routers
    (target / "config.json").write_text(json.dumps(config))

"""How a server's workers hold the model: it decides which servers' digests can be equal."""

from __future__ import annotations

from typing import Any


def arrangement(config: Any) -> str:
    """Parallel sizes other than one, dtype, quantization, whether layers are wrapped for LoRA, and
    on CPU the kind of processor, of a `VllmConfig`: `tp2-bfloat16-fp8`, `float32-avx512`.

    Processors of different kinds pack weights differently, and round sums of them differently.

    It follows from how the server was started, not from what its memory holds: a half-loaded server
    stays comparable with its siblings.
    """
    parallel, model = config.parallel_config, config.model_config
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
    }
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if parallel.enable_expert_parallel:
        parts.append("ep")
    parts.append(str(model.dtype).removeprefix("torch."))
    if model.quantization:
        parts.append(str(model.quantization))
    if config.lora_config is not None:
        parts.append("lora")
    if config.device_config.device_type == "cpu":
        parts.append(_processor())
    return "-".join(parts)


def _processor() -> str:
    """What vLLM's choice of CPU kernels depends on."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        return "amx"
    if torch.cpu._is_avx512_bf16_supported():
        return "avx512bf16"
    return str(torch.backends.cpu.get_cpu_capability()).lower()

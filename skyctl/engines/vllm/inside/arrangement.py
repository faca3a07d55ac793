"""How a server's workers hold the model: what decides which servers' digests can be equal."""

from __future__ import annotations

from typing import Any


def arrangement(config: Any) -> str:
    """Parallel sizes other than one, dtype and quantization of a `VllmConfig`: `tp2-bfloat16-fp8`.

    It follows from how the server was started, not from what its memory holds: a half-loaded
    server stays comparable with its siblings.
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
    return "-".join(parts)

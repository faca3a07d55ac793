"""Models of vLLM's own classes in this process, loaded by its own loader, as any tensor-parallel
rank would have them; no server, no kernels, weights not packed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def vllm_model(
    checkpoint: Path,
    *,
    rank: int = 0,
    ranks: int = 1,
    expert_parallel: bool = False,
    quantization: str | None = None,
) -> Iterator[Any]:
    """The model that `rank` of `ranks` makes of a checkpoint; nothing of it is left behind."""
    import torch
    from safetensors.torch import load_file
    from vllm import ModelRegistry
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    for name in json.loads((checkpoint / "config.json").read_text())["architectures"]:
        # a class is inspected here; a name in a process, whose answer goes to the user's cache
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    arguments = EngineArgs(
        model=str(checkpoint), max_model_len=64, enforce_eager=True, quantization=quantization
    )
    config = arguments.create_engine_config()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{_free_port()}", 0, "gloo"
        )
        try:
            parallel_state.initialize_model_parallel(1)
            group = parallel_state.get_tp_group()
            group.world_size, group.rank_in_group = ranks, rank
            config.parallel_config.tensor_parallel_size = ranks
            config.parallel_config.enable_expert_parallel = expert_parallel
            with set_default_torch_dtype(config.model_config.dtype):
                model = initialize_model(vllm_config=config)
            for shard in sorted(checkpoint.glob("*.safetensors")):
                model.load_weights(list(load_file(shard).items()))
            yield model
        finally:
            if (group := parallel_state._TP) is not None:
                group.world_size, group.rank_in_group = 1, 0
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            torch._dynamo.reset()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port

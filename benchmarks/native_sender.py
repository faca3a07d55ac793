"""vLLM's own trainer-side sender pushing a checkpoint: the alternative to compare with.

Pause (keep), read the checkpoint with `safe_open(device=cuda)` into vLLM's packed trainer engine,
resume: what its examples do. Run where vLLM is installed; speaks 0.26's static API and 0.33's.

    python -m benchmarks.native_sender --backend ipc --url http://127.0.0.1:8000 CKPT [CKPT]

Prints one JSON object: the seconds of each push (process start and rendezvous excluded).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any


def tensors(checkpoint: Path, device: str) -> Iterator[tuple[str, Any]]:
    """Every tensor of the checkpoint on the GPU, shard by shard."""
    from safetensors import safe_open

    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, framework="pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


def metadata(checkpoint: Path) -> list[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of every tensor in the order `tensors` yields them."""
    from safetensors import safe_open

    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    found = []
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found.append((name, names[part.get_dtype()], list(part.get_shape())))
    return found


def post(url: str, path: str, body: dict[str, Any] | None = None, **params: Any) -> None:
    import requests

    answer = requests.post(f"{url}{path}", json=body, params=params, timeout=300)
    answer.raise_for_status()


def send_token_with_every_request() -> None:
    """vLLM's own client has no way to be told a token; it calls `requests.post`."""
    import requests

    bare = requests.post
    headers = {"Authorization": f"Bearer {os.environ['BENCHMARK_TOKEN']}"}
    requests.post = lambda url, **options: bare(url, **{"headers": headers, **options})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EngineSender:
    """0.28 and newer: a TrainerWeightTransferEngine over a WeightSource. `memory` gives tensors by
    name instead of a checkpoint's; by IPC each `rank` of a trainer has a sender.
    """

    def __init__(
        self,
        backend: str,
        url: str,
        world_size: int,
        device: str,
        first: Path,
        memory: Callable[[], Iterator[tuple[str, Any]]] | None = None,
        rank: int = 0,
    ) -> None:
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        class Source(WeightSource):  # type: ignore[misc]
            checkpoint = first  # all have the same tensors

            def _metadata(self) -> list[Any]:
                return [
                    ParamMeta(name, getattr(torch, dtype), tuple(shape))
                    for name, dtype, shape in metadata(self.checkpoint)
                ]

            # vLLM calls a method up to 0.32, and reads a property from 0.33 on
            reads = hasattr(WeightSource, "iter_full")
            metadata = cached_property(_metadata) if reads else _metadata

            def iter_full(self) -> Iterator[tuple[str, Any]]:
                return tensors(self.checkpoint, device) if memory is None else memory()

            __iter__ = iter_full  # up to 0.32

        self._source = Source()
        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=2 << 30)
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            info = NCCLTrainerInitInfo("127.0.0.1", free_port(), world_size + 1, rank=0)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            info, client=HTTPVLLMWeightSyncClient(url), source=self._source
        )

    def send(self, checkpoint: Path | None = None) -> None:
        self._source.checkpoint = checkpoint or self._source.checkpoint
        self._engine.send_weights()


class StaticSender:
    """0.26: static trainer_send_weights(iterator, args)."""

    def __init__(self, backend: str, url: str, world_size: int, device: str, first: Path) -> None:
        self._backend, self._url, self._device = backend, url, device
        self._group: Any = None
        if backend == "ipc":
            post(url, "/init_weight_transfer_engine", {"init_info": {}})
            return
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        address = {"master_address": "127.0.0.1", "master_port": free_port()}
        init_info = {**address, "rank_offset": 1, "world_size": world_size + 1}
        joining = threading.Thread(
            target=post,
            args=(url, "/init_weight_transfer_engine", {"init_info": init_info}),
        )
        joining.start()
        self._group = NCCLWeightTransferEngine.trainer_init(
            {**address, "world_size": world_size + 1}
        )
        joining.join()

    def send(self, checkpoint: Path) -> None:
        post(self._url, "/start_weight_update", {"is_checkpoint_format": True})
        stream = tensors(checkpoint, self._device)
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import (
                IPCTrainerSendWeightsArgs,
                IPCWeightTransferEngine,
            )

            IPCWeightTransferEngine.trainer_send_weights(
                iterator=stream,
                trainer_args=IPCTrainerSendWeightsArgs(
                    send_mode="http",
                    url=self._url,
                    packed=True,
                    packed_buffer_size_bytes=2 << 30,
                ),
            )
        else:
            self._send_nccl(checkpoint, stream)
        post(self._url, "/finish_weight_update")

    def _send_nccl(self, checkpoint: Path, stream: Iterator[tuple[str, Any]]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerSendWeightsArgs,
            NCCLWeightTransferEngine,
        )

        headers = metadata(checkpoint)
        update_info = {
            "names": [name for name, _, _ in headers],
            "dtype_names": [dtype for _, dtype, _ in headers],
            "shapes": [shape for _, _, shape in headers],
            "packed": True,
        }
        updating = threading.Thread(
            target=post, args=(self._url, "/update_weights", {"update_info": update_info})
        )
        updating.start()
        NCCLWeightTransferEngine.trainer_send_weights(
            iterator=stream,
            trainer_args=NCCLTrainerSendWeightsArgs(group=self._group, packed=True),
        )
        updating.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--backend", choices=["ipc", "nccl"], required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--world-size", type=int, default=1, help="workers of the server")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=1)
    options = parser.parse_args()

    import torch
    import vllm

    if os.environ.get("BENCHMARK_TOKEN"):
        send_token_with_every_request()
    torch.cuda.set_device(options.device)
    modern = tuple(int(part) for part in vllm.__version__.split(".")[:2]) >= (0, 28)
    kind = EngineSender if modern else StaticSender
    first = options.checkpoints[0]
    sender = kind(options.backend, options.url, options.world_size, options.device, first)
    seconds = []
    for run in range(options.warmups + options.runs):
        checkpoint = options.checkpoints[run % len(options.checkpoints)]
        began = time.perf_counter()
        post(options.url, "/pause", mode="keep")
        sender.send(checkpoint)
        post(options.url, "/resume")
        if run >= options.warmups:
            seconds.append(round(time.perf_counter() - began, 4))
    print(json.dumps({"vllm": vllm.__version__, "backend": options.backend, "runs_s": seconds}))


if __name__ == "__main__":
    main()

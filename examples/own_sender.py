"""Send weights with vLLM's own trainer engines (NCCL), inside one of skyctl's transactions.

    CUDA_VISIBLE_DEVICES=1 python examples/own_sender.py -f fleet.yaml CKPT step-12
    CUDA_VISIBLE_DEVICES=1 python examples/own_sender.py -f fleet.yaml NEXT step-13 --since CKPT

The fleet file has `weight_transfer: {backend: nccl}`, for the second command `sparse_nccl`, and
leaves a GPU to this process. The second one sends only the elements that differ from those of CKPT.
The weights come from a checkpoint here; a trainer yields its own, gathered one by one. Written for
vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)
from vllm.distributed.weight_transfer.sparse_nccl_engine import (
    SparseNCCLTrainerInitInfo,
    SparseNCCLTrainerWeightTransferEngine,
    SparseWeightPatch,
)

from skyctl import Fleet
from skyctl.api import PushResult, SendTarget, Update

TIMEOUT_S = 120.0
PATCHES = 16  # tensors that are sent at a time
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weights(WeightSource):  # type: ignore[misc]  # vLLM has no types
    """Named tensors on this GPU, as the Hugging Face checkpoint names them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def _metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    # vLLM calls a method up to 0.32, and reads a property from 0.33 on
    metadata = cached_property(_metadata) if hasattr(WeightSource, "iter_full") else _metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    __iter__ = iter_full  # up to 0.32


class Servers:
    """vLLM's `VLLMWeightSyncClient` for every server of an update: each call goes to all at once.

    The engine believes that there is one server, whose workers follow the sender: each gets its own
    ranks here.
    """

    def __init__(self, update: Update) -> None:
        self._targets = update.servers
        self._client = httpx.Client(headers=update.headers, timeout=TIMEOUT_S, trust_env=False)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post(
            "init_weight_transfer_engine",
            lambda one: {"init_info": {**init_info, "rank_offset": one.rank_offset}},
        )

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("update_weights", lambda one: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update")  # skyctl labels what it has verified

    def shutdown_weight_transfer_engine(self) -> None:
        self._post("shutdown_weight_transfer_engine")

    def _post(self, route: str, body: Callable[[SendTarget], Any] = lambda one: None) -> None:
        def post(target: SendTarget) -> None:
            self._client.post(f"{target.url}/{route}", json=body(target)).raise_for_status()

        with ThreadPoolExecutor(len(self._targets)) as pool:
            list(pool.map(post, self._targets))


def rendezvous(update: Update) -> dict[str, Any]:
    """Where this process, rank 0, meets the workers."""
    return {
        "master_address": update.master_address,
        "master_port": update.master_port,
        "world_size": update.world_size,
        "rank": 0,
    }


def send(update: Update, weights: WeightSource) -> None:
    """All of the weights into every server of the update, over a group of this update's own."""
    servers = Servers(update)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(
        NCCLTrainerInitInfo(**rendezvous(update)),
        client=servers,
        source=weights,
    )
    engine.send_weights()
    servers.shutdown_weight_transfer_engine()


def changes(
    old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> Iterator[SparseWeightPatch]:
    """The elements of `new` whose bits are not those of `old`, tensor by tensor."""
    for name, tensor in new.items():
        bits = _AS_BITS[tensor.element_size()]
        before, after = old[name].flatten(), tensor.flatten()
        places = (before.view(bits) != after.view(bits)).nonzero().flatten()
        if places.numel():
            yield SparseWeightPatch(
                name, places.to(torch.int32), after[places], tuple(tensor.shape)
            )


def send_changes(update: Update, patches: Iterable[SparseWeightPatch]) -> None:
    """Into every server of the update, which writes each element where it is."""
    servers = Servers(update)
    engine = SparseNCCLTrainerWeightTransferEngine.trainer_init(
        SparseNCCLTrainerInitInfo(**rendezvous(update)),
        client=servers,
    )
    servers.start_weight_update()
    left = iter(patches)
    while some := list(islice(left, PATCHES)):
        engine.send_weight_chunk(some)
    servers.finish_weight_update()
    servers.shutdown_weight_transfer_engine()


async def update(
    fleet: Fleet, send: Callable[[Update], None], version: str, checkpoint: Path | None = None
) -> PushResult:
    """One update; `checkpoint` has the same weights on disk."""
    async with fleet.update(version, checkpoint=checkpoint) as opened:
        sending = asyncio.create_task(asyncio.to_thread(send, opened))
        try:
            await asyncio.shield(sending)
        finally:  # a cancelled wait does not end the thread, and nobody may send after the block
            await asyncio.wait({sending})
    assert opened.result is not None
    return opened.result


def load(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, on this GPU."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(shard, device="cuda")
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-f", "--file", default="fleet.yaml")
    parser.add_argument("--keep", action="store_true", help="restarted servers load the checkpoint")
    parser.add_argument("--since", type=Path, help="send what differs from this checkpoint")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("version")
    asked = parser.parse_args()
    kept = asked.checkpoint if asked.keep else None
    tensors = load(asked.checkpoint)
    if asked.since is None:
        sends = partial(send, weights=Weights(tensors))
    else:
        sends = partial(send_changes, patches=changes(load(asked.since), tensors))
    result = asyncio.run(update(Fleet.load(asked.file), sends, asked.version, kept))
    print(f"{result.version}: frozen for {result.freeze_window_s:.2f} s")


if __name__ == "__main__":
    main()

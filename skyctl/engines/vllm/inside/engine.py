"""The weight-transfer engine `skyctl` inside a vLLM worker: loads what a receiver fetches.

States, per push:  init ─► start ─► update … update ─► finish `finish` closes a session that was
opened and never finished (its pusher died). A session that broke off in an update is scrubbed by
the next `start`, which fails once to say so: layers that were left half loaded must not be built
upon.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

try:
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
except ImportError:  # vLLM 0.26, which does not check
    from contextlib import nullcontext as disable_mtp_completeness_check

from skyctl.engines.vllm.inside.completeness import (
    half_open,
    missing_parameters,
    require_complete,
    watch_biases,
)
from skyctl.engines.vllm.inside.experts import (
    pack_after_updates,
    repack_tied_layers,
    tied_layers,
    update_problem,
)
from skyctl.engines.vllm.inside.receivers import Receiver, open_receiver
from skyctl.wire.copies import octets_of
from skyctl.wire.messages import ChunkUpdate, ReceiverInit

_SHOWN = 3
pack_after_updates()  # a server can have this engine without the worker extension


class SkyctlWeightTransferEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Receives checkpoint tensors from a skyctl sender; layerwise reload as in vLLM's engines."""

    init_info_cls = ReceiverInit
    update_info_cls = ChunkUpdate

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver: Receiver | None = None
        self._announced: set[str] = set()
        self._partial = False
        self._received: set[str] = set()
        self._next_chunk = 0
        self._tied = {name for name, _ in tied_layers(model)}

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Connect to the sender. The sender of an earlier push is released, and its session
        forgotten: finishing what it left open then reports nothing as missing.

        Raises:
            RuntimeError: an update of this model would not load all of it.
        """
        self.shutdown()
        if problem := update_problem(self.model):
            raise RuntimeError(problem)
        self._received = set()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receiver = open_receiver(init_info, rank)
        self._announced = set(init_info.tensors)

    def start_weight_update(self) -> None:
        """Open a session: layers become meta tensors until their weights are complete.

        Raises RuntimeError: an earlier one broke off midway. It is scrubbed, so that the next start
        succeeds; the caller is told, because the old weights are gone.
        """
        self._received = set()
        if half_open(self.model):
            finalize_layerwise_reload(self.model, self.model_config)
            raise RuntimeError("an earlier weight update broke off half-way; start again")
        self._next_chunk = 0
        initialize_layerwise_reload(self.model)
        watch_biases(self.model)

    def receive_weights(self, update_info: ChunkUpdate) -> None:
        """Fetch one chunk, check it and load it.

        Raises:
            RuntimeError: out of order, or the bytes are not those that the sender read.
        """
        if self._receiver is None:
            raise RuntimeError("no sender: call init_weight_transfer_engine first")
        if update_info.chunk != self._next_chunk:
            raise RuntimeError(f"chunk {update_info.chunk} came, {self._next_chunk} is next")
        tensors = self._receiver.receive(update_info)
        for (name, tensor), expected in zip(tensors, update_info.crc32, strict=True):
            if _crc32(tensor) != expected:
                raise RuntimeError(f"{name} was damaged on its way (chunk {update_info.chunk})")
        if self.device.type != "cpu":
            tensors = [(name, tensor.to(self.device)) for name, tensor in tensors]
        with disable_mtp_completeness_check():
            self.model.load_weights(tensors)
        self._received.update(update_info.names)
        self._next_chunk += 1

    def finish_weight_update(self) -> None:
        """Close the session; raise if it has received chunks and is incomplete.

        A session that received nothing leaves the old weights in place. The layers are put back in
        order in any case, so that a further finish (by a new pusher) succeeds.
        """
        received, announced = self._received, self._announced
        self._received = set()
        missing = missing_parameters(self.model, self._tied) if received else []
        finalize_layerwise_reload(self.model, self.model_config)
        if not received:
            return
        repack_tied_layers(self.model)
        if received != announced:
            lost = sorted(announced - received)
            raise RuntimeError(
                f"only {len(received)} of {len(announced)} announced tensors were received; "
                f"missing: {', '.join(lost[:_SHOWN])}"
            )
        require_complete(missing)
        self.shutdown()

    def load_whole(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load all of a model at once: what an update that broke off has left does not matter.

        Raises:
            RuntimeError: they are not all of the model, or vLLM cannot load them.
        """
        if problem := update_problem(self.model):
            raise RuntimeError(problem)
        if half_open(self.model):
            finalize_layerwise_reload(self.model, self.model_config)
        self._announced = set(tensors)
        self.start_weight_update()
        with disable_mtp_completeness_check():
            self.model.load_weights(list(tensors.items()))
        self._received = set(tensors)
        self.finish_weight_update()

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Abstract in vLLM 0.26: what a trainer would call, and skyctl's senders do not."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Release the sender and free buffers."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


def _crc32(tensor: torch.Tensor) -> int:
    flat = octets_of(tensor.contiguous())
    return zlib.crc32(memoryview(flat.numpy())) if flat.numel() else 0

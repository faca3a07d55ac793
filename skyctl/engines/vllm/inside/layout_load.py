"""Copy chunks into a running model's parameters, in place: pointers stay, CUDA graphs hold.

Per push:  open ─► load … load | receive
Nothing is loaded by a program that this process has not seen proven (`trust`): a description of
the model that was compared with what vLLM's loader made of a checkpoint, every byte.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from skyctl.engines.vllm.inside.completeness import half_open
from skyctl.engines.vllm.inside.layout import describe, ignored_tensors, whole_problem
from skyctl.engines.vllm.inside.layout_copy import copy_runs, octets_of, paired_runs
from skyctl.engines.vllm.inside.layout_wire import (
    Copy,
    LayoutReport,
    ParameterLayout,
    Program,
    layout_digest,
)

_NUM_BUFFERS = 2


class LayoutLoader:
    """One worker's end of pushes in its own layout. Lives as long as the worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._proven: set[str] = set()
        self._description: tuple[Any, str, tuple[ParameterLayout, ...]] | None = None
        self._program: Program | None = None
        self._copies: dict[int, list[Copy]] = {}
        self._pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._addresses: list[tuple[torch.Tensor, int]] = []
        self._buffers: list[torch.Tensor] = []

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._worker.device
        return device

    @property
    def rank(self) -> int:
        """Counts this server's workers from 0."""
        parallel = self._worker.vllm_config.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def report(self, known: Sequence[str] = ()) -> LayoutReport:
        """How the model is made, as it is now; layouts of `known` digests are not spelt out.

        Asked for as a push begins: what an earlier one mapped and never closed, because it was
        killed, is let go of, or the sender's memory would stay on this GPU.
        """
        self.close()
        model = self._model
        if self._device.type != "cuda":
            return LayoutReport(self.rank, reason="its model is not on a GPU")
        if self._worker.vllm_config.parallel_config.data_parallel_size > 1:
            # of calls to all ranks only the first rank's failure would be heard
            return LayoutReport(self.rank, reason="it has data-parallel ranks")
        if half_open(model):
            return LayoutReport(self.rank, reason="an earlier update broke off half-way")
        layout, parameters = self._described()
        return LayoutReport(
            self.rank,
            layout,
            () if layout in known else parameters,
            tuple(sorted(self._proven)),
            tuple(ignored_tensors(model)),
            whole_problem(model),
        )

    def open(
        self, program: Program, payload: str, offsets: Sequence[int], buffer_bytes: int
    ) -> None:
        """Get ready without touching a parameter: map the sender's slots, or allocate buffers.

        Args:
            program: all that will be copied.
            payload: IPC handle of the sender's slots; "" where chunks are broadcast.
            offsets: where each slot begins; chunk k lies in slot k modulo their number.
            buffer_bytes: size of the buffers that chunks are broadcast into, 0 for none.

        Raises:
            RuntimeError: the model is not the one that the program was planned for.
        """
        self.close()
        if self._described()[0] != program.layout or half_open(self._model):
            raise RuntimeError("the model's parameters are not what the program was planned for")
        self._program = program
        for copy in program.copies:
            self._copies.setdefault(copy.chunk, []).append(copy)
        try:
            if payload:
                self._pair(self._map(payload), offsets)
            if buffer_bytes:
                self._buffers = [
                    torch.empty(buffer_bytes, dtype=torch.uint8, device=self._device)
                    for _ in range(_NUM_BUFFERS)
                ]
        except BaseException:
            self.close()
            raise

    def load(self, chunks: Sequence[int], last: bool) -> None:
        """Copy chunks out of their slots on this GPU. `last`: there are no more; let go of it.

        Raises:
            RuntimeError: parameters are not where they were when the program was opened.
        """
        self._require_proven()
        if not self._pairs or any(p.data_ptr() != at for p, at in self._addresses):
            raise RuntimeError("the model's parameters are not where they were")
        for chunk in chunks:
            for target, source in self._pairs[chunk]:
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(self._device)
        if last:
            self._finish()

    def receive(self, sizes: Sequence[int]) -> None:
        """Copy chunks of these sizes out of broadcasts, in their order: one is received while the
        one before it is copied."""
        targets = self._targets(self._require_proven())
        group = self._worker.weight_transfer_engine.model_update_group
        if group is None or getattr(group, "disabled", False):
            raise RuntimeError("this worker is in no group with a sender")
        receiving, copying = torch.cuda.Stream(self._device), torch.cuda.current_stream()
        free = [copying.record_event() for _ in self._buffers]
        for chunk, size in enumerate(sizes):
            turn = chunk % len(self._buffers)
            buffer = self._buffers[turn][:size]
            receiving.wait_event(free[turn])
            with torch.cuda.stream(receiving):
                group.broadcast(buffer, src=0, stream=receiving)
            copying.wait_event(receiving.record_event())
            copy_runs(self._copies.get(chunk, ()), buffer, targets)
            free[turn] = copying.record_event()
        torch.cuda.synchronize(self._device)
        self._finish()

    def trust(self, layout: str) -> None:
        """vLLM's loader left in every parameter what this layout says. It holds as long as the
        model is still described like this."""
        if self._described()[0] == layout:
            self._proven.add(layout)

    def close(self) -> None:
        """Let go of the sender's memory and of buffers."""
        self._program = None
        self._copies, self._pairs, self._addresses, self._buffers = {}, {}, [], []

    def _finish(self) -> None:
        """Let go of the sender, and do what vLLM's own update does at its end."""
        self.close()
        if reset := getattr(self._worker.model_runner, "reset_lora_state", None):
            reset()

    def _described(self) -> tuple[str, tuple[ParameterLayout, ...]]:
        """The model's layout and its digest; made anew when parameters are others, or elsewhere."""
        model = self._model
        parameters = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
        if self._description is None or self._description[0] != parameters:
            described = tuple(describe(model))
            self._description = (parameters, layout_digest(described), described)
        return self._description[1:]

    def _require_proven(self) -> Program:
        if self._program is None:
            raise RuntimeError("no program: call skyctl_layout_open first")
        if self._program.layout not in self._proven:
            raise RuntimeError("this layout has not been proven on this worker")
        return self._program

    def _targets(self, program: Program) -> dict[int, torch.Tensor]:
        parameters = dict(self._model.named_parameters())
        self._addresses = [
            (parameters[name], parameters[name].data_ptr()) for name, _, _ in program.parameters
        ]
        return {place: octets_of(parameter) for place, (parameter, _) in enumerate(self._addresses)}

    def _pair(self, slots: torch.Tensor, offsets: Sequence[int]) -> None:
        """Make views of all that will be copied, which takes longer than to enqueue the copies."""
        if self._program is None:
            return
        targets = self._targets(self._program)
        ends = [*offsets[1:], slots.numel()]
        for chunk in range(max(self._copies, default=-1) + 1):
            slot = chunk % len(offsets)
            octets = slots[offsets[slot] : ends[slot]]
            self._pairs[chunk] = list(paired_runs(self._copies.get(chunk, ()), octets, targets))

    def _map(self, payload: str) -> torch.Tensor:
        """The sender's slots in this GPU's memory, as flat bytes; not a copy."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor
        from vllm import envs

        if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            raise RuntimeError("IPC handles need VLLM_ALLOW_INSECURE_SERIALIZATION=1")
        index = self._device.index
        handles = pickle.loads(base64.b64decode(payload))
        arguments = list(handles[str(torch.cuda.get_device_properties(index).uuid)])
        arguments[6] = index  # the device as this process counts
        mapped: torch.Tensor = rebuild_cuda_tensor(*arguments)
        return mapped

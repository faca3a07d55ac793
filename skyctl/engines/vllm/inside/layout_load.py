"""Copy chunks into a running model's parameters, in place: pointers stay, CUDA graphs remain valid.

Per push:  open ─► process … process ─► load … load | receive
                    beside serving           frozen
           open stays for the pushes of a trainer whose exports it maps: ─► stage ─► load
Nothing is loaded by a program that this process has not seen proven (`trust`): a description of the
model that was compared, byte for byte, with what vLLM's loader made of a checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skyctl.engines.vllm.inside import layout_process
from skyctl.engines.vllm.inside.completeness import half_open
from skyctl.engines.vllm.inside.layout import describe, ignored_tensors, whole_problem
from skyctl.engines.vllm.inside.layout_memory import (
    Beside,
    Pair,
    PreparedCopies,
    copy_pairs,
    require_free,
    sender_slots,
    suits_staging,
)
from skyctl.engines.vllm.inside.worker_part import WorkerPart
from skyctl.wire.copies import copy_runs, octets_of, paired_runs
from skyctl.wire.device_digest import as_it_lies, digest_on_device, plain_tensors
from skyctl.wire.exports import Export, opened
from skyctl.wire.layouts import (
    Copy,
    LayoutReport,
    ParameterLayout,
    Program,
    layout_digest,
)
from skyctl.wire.messages import NOT_ON_GPU

_NUM_BUFFERS = 2


@dataclass(frozen=True)
class _Made:
    """What a layer made of a parameter: the number of that parameter, and those of the products."""

    number: int
    products: Mapping[str, int]


class LayoutLoader(WorkerPart):
    """One worker's end of pushes in its own layout."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._proven: set[str] = set()
        self._description: tuple[Any, str, tuple[ParameterLayout, ...]] | None = None
        self._program: Program | None = None
        self._copies: dict[int, list[Copy]] = {}
        self._pairs: dict[int, list[Pair]] = {}
        self._prepared: PreparedCopies | None = None
        self._addresses: list[tuple[torch.Tensor, int]] = []
        self._buffers: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self._dtypes: list[torch.dtype] = []
        self.key = ""
        """Of the trainer whose memory is mapped."""
        self._mapped: dict[tuple[Any, ...], torch.Tensor] = {}
        self._beside: Beside | None = None
        self.lock = threading.RLock()
        """For what maps memory, copies out of it, or lets go of it."""
        self._layers: dict[str, Any] = {}
        self._products: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made: dict[str, _Made] = {}

    @property
    def rank(self) -> int:
        """This worker's number within its server, from 0."""
        parallel = self._worker.vllm_config.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def report(self, described: Sequence[str] = (), key: str = "") -> LayoutReport:
        """How the model is made, as of now; layouts whose digest is in `described` are not.

        Called as a push begins: what an earlier, killed push mapped and never closed is released,
        or the sender's memory would stay on this GPU. What was mapped under this `key` stays, if
        it still fits.
        """
        if not (key and key == self.key and self._in_place()):
            self.close()
        self._made = {}
        model = self._model
        if self._device.type != "cuda":
            return LayoutReport(self.rank, reason=NOT_ON_GPU, opened=self.key)
        if self._worker.vllm_config.parallel_config.data_parallel_size > 1:
            # of a call to all ranks, only the first rank's failure is reported
            return LayoutReport(self.rank, reason="it has data-parallel ranks")
        if half_open(model):
            return LayoutReport(self.rank, reason="an earlier update broke off half-way")
        before = self._description
        layout, parameters = self._described()
        if self._description is not before:
            self.close()  # it would copy into parameters that the model had before
        return LayoutReport(
            self.rank,
            layout,
            () if layout in described else parameters,
            tuple(sorted(self._proven)),
            tuple(ignored_tensors(model)),
            whole_problem(model),
            layout_process.spare_bytes(model),
            self.key,
            self._beside is not None,
        )

    def open(
        self, program: Program, payload: str, offsets: Sequence[int], buffer_bytes: int
    ) -> None:
        """Get ready without touching a parameter: map the sender's slots, or allocate buffers.

        Args:
            program: all that will be copied.
            payload: IPC handle of the sender's slots; "" if chunks are broadcast.
            offsets: where each slot begins; chunk k is in slot k modulo their number.
            buffer_bytes: size of the buffers that chunks are broadcast into, 0 for none.

        Raises:
            RuntimeError: the model is not the one that the program was planned for; or parameters
                are to be processed, and not all chunks have a slot, or memory is short.
        """
        self.close()
        try:
            self._begin(program, slots=len(offsets))
            if payload:
                slots = self._map(payload)
                ends = [*offsets[1:], slots.numel()]
                self._slots = [slots[a:b] for a, b in zip(offsets, ends, strict=True)]
                self._pair(self._targets(program))
            if buffer_bytes:
                self._buffers = [
                    torch.empty(buffer_bytes, dtype=torch.uint8, device=self._device)
                    for _ in range(_NUM_BUFFERS)
                ]
        except BaseException:
            self.close()
            raise

    def map(
        self,
        program: Program,
        exports: Sequence[Sequence[Any]],
        key: str,
        staged: bool | None = None,
    ) -> bool:
        """Get ready for the pushes of a trainer without touching a parameter: map its memory.
        Returns whether a push must call `stage`.

        Args:
            program: all that each push copies.
            exports: the `Export` that is chunk k, as it travels.
            key: identifies these exports and the program; they stay mapped until `close`.
            staged: a push is first copied beside the parameters, by `stage`. None: if the trainer
                is on another GPU, and there is room on this one.

        Raises:
            RuntimeError: as `open`; or memory is not there, or is too short.
        """
        before = self._mapped
        self.close()
        try:
            self._begin(program, slots=len(exports))
            for row in map(tuple, exports):
                self._mapped[row] = (
                    before[row] if row in before else opened(Export.from_wire(row), self._device)
                )
            self._slots = [self._mapped[tuple(row)] for row in exports]
            self._dtypes = [getattr(torch, dtype) for _, dtype, _ in program.parameters]
            targets = self._targets(program)
            if staged is None:
                staged = suits_staging(targets, exports, self._device)
            if staged:
                self._beside = Beside(targets, self._device)
                targets = self._beside.parameters
            self._pair(targets)
            self._prepared = PreparedCopies(self._pairs, exports, self._device)
            self.key = key
            return bool(self._layers) or self._beside is not None
        except BaseException:
            self.close()
            raise

    def stage(self) -> None:
        """Begin to copy all that was mapped to beside the parameters, on a stream of its own; what
        layers process is processed. The model serves meanwhile.
        """
        self._require_proven()
        if self._beside is not None and self._prepared is not None:
            self._beside.fill(self._prepared)
        self._products = []
        for chunk in range(len(self._slots)) if self._layers else ():
            self.process(chunk, True)

    def process(self, chunk: int, keep: bool) -> None:
        """Process the parameters that this chunk completes as their layers would. Chunks come in
        order, each once it is staged.

        Args:
            keep: `load` will copy the result; else only its numbers are remembered.

        Raises:
            RuntimeError: a layer makes something other than it has.
        """
        program = self._opened()
        last = {copy.parameter: copy.chunk for copy in program.copies}
        for place, (name, _, _) in enumerate(program.parameters):
            if name not in self._layers or last[place] != chunk:
                continue
            layer = self._layers[name]
            loaded = layout_process.empty_weight(layer, self._device)
            self._fill(place, loaded)
            made = layout_process.process(layer, loaded)
            number, *others = digest_on_device([loaded, *map(as_it_lies, made.values())])
            path = name.rpartition(".")[0]
            products = (f"{path}.{product}" for product in made)
            self._made[name] = _Made(number, dict(zip(products, others, strict=True)))
            if keep:
                running = layout_process.products(layer)
                self._products += [(running[product], made[product]) for product in made]

    def load(self, chunks: Sequence[int] | None, last: bool) -> None:
        """Copy chunks out of their slots on this GPU; None: all, or what was staged of them.
        `last`: there are no more; release them, unless they are a trainer's.

        Raises:
            RuntimeError: parameters are not where they were when the program was opened.
        """
        self._require_proven()
        if not (self._pairs and self._in_place()):
            raise RuntimeError("the model's parameters are not where they were")
        if self._beside is not None:
            self._beside.move()
        elif self._prepared is not None:
            self._prepared.enqueue()
        else:  # the last chunks may hold nothing of this worker's
            for chunk in self._pairs if chunks is None else chunks:
                copy_pairs(self._pairs.get(chunk, ()))
        copy_pairs(self._products if last else ())
        torch.cuda.synchronize(self._device)
        if last:
            self._finish()

    def receive(self, sizes: Sequence[int]) -> None:
        """Copy chunks of these sizes out of broadcasts, in order: each is received while the
        previous one is copied.
        """
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

    def mark_proven(self, layout: str) -> None:
        """vLLM's loader left in every parameter what this layout predicts. Holds as long as the
        model's description stays the same.
        """
        if self._described()[0] == layout:
            self._proven.add(layout)

    def close(self) -> None:
        """Release the sender's or the trainer's memory, and buffers."""
        if self._beside is not None:
            self._beside.wait()
        self._program = None
        self._copies, self._pairs, self._addresses, self._buffers = {}, {}, [], []
        self._slots, self._layers, self._products = [], {}, []
        self._prepared = None
        self.key, self._mapped, self._beside, self._dtypes = "", {}, None, []

    def running_names(self, names: Iterable[str]) -> list[str]:
        """The running parameters that show what these, of a program, hold."""
        return [product for name in names for product in self._made_of(name)]

    def numbers_of(self, names: Iterable[str], numbers: Mapping[str, int]) -> dict[str, int]:
        """The numbers of these parameters, of a program, from those of the running ones. For a
        processed parameter it is the number of the weight it was made of, if the layer holds what
        was made.
        """
        from_program = {}
        for name in names:
            made = self._made.get(name)
            if made is None:
                from_program[name] = numbers[name]
            elif all(numbers[product] == number for product, number in made.products.items()):
                from_program[name] = made.number
        return from_program

    def _made_of(self, name: str) -> list[str]:
        made = self._made.get(name)
        return [name] if made is None else list(made.products)

    def _begin(self, program: Program, *, slots: int) -> None:
        """Raises RuntimeError where `open` does."""
        self._made = {}
        if self._described()[0] != program.layout or half_open(self._model):
            raise RuntimeError("the model's parameters are not what the program was planned for")
        self._program = program
        for copy in program.copies:
            self._copies.setdefault(copy.chunk, []).append(copy)
        self._layers = layout_process.layers(self._model)
        if self._layers:
            self._require_room(slots=slots)

    def _in_place(self) -> bool:
        """Whether parameters are where they were when the program was opened."""
        with plain_tensors():
            return all(p.data_ptr() == at for p, at in self._addresses)

    def _finish(self) -> None:
        """Release a sender, and do what vLLM's own update does at its end."""
        self._products = []
        if not self.key:
            self.close()
        self._reset_adapters()

    def _described(self) -> tuple[str, tuple[ParameterLayout, ...]]:
        """The model's layout and its digest; renewed when parameters were replaced or moved."""
        model = self._model
        with plain_tensors():
            parameters = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
        if self._description is None or self._description[0] != parameters:
            described = tuple(describe(model))
            self._description = (parameters, layout_digest(described), described)
        return self._description[1:]

    def _opened(self) -> Program:
        if self._program is None:
            raise RuntimeError("no program: call skyctl_layout_open first")
        return self._program

    def _require_proven(self) -> Program:
        program = self._opened()
        if program.layout not in self._proven:
            raise RuntimeError("this layout has not been proven on this worker")
        return program

    def _require_room(self, *, slots: int) -> None:
        if slots <= max(self._copies, default=-1):
            raise RuntimeError("what is processed before a freeze must be staged as a whole")
        require_free(layout_process.spare_bytes(self._model), self._device)

    def _targets(self, program: Program) -> dict[int, torch.Tensor]:
        """Flat views of the parameters that are copied unprocessed, by their index."""
        parameters = dict(self._model.named_parameters())
        copied = {
            place: parameters[name]
            for place, (name, _, _) in enumerate(program.parameters)
            if name not in self._layers
        }
        made_anew = [
            product
            for layer in self._layers.values()
            for product in layout_process.products(layer).values()
        ]
        self._addresses = [(p, p.data_ptr()) for p in (*copied.values(), *made_anew)]
        return {place: octets_of(parameter) for place, parameter in copied.items()}

    def _pair(self, targets: Mapping[int, torch.Tensor]) -> None:
        """Prepare views of all that will be copied, which takes longer than enqueueing copies."""
        for chunk in range(max(self._copies, default=-1) + 1):
            elements = self._slots[chunk % len(self._slots)]
            copies = [c for c in self._copies.get(chunk, ()) if c.parameter in targets]
            self._pairs[chunk] = list(paired_runs(copies, elements, targets, self._dtypes))

    def _fill(self, place: int, parameter: torch.Tensor) -> None:
        """Copy one parameter's bytes out of the slots; padding is zero."""
        octets = octets_of(parameter).zero_()
        for copy in self._opened().copies:
            if copy.parameter == place:
                copy_runs([copy], self._slots[copy.chunk], {place: octets}, self._dtypes)

    def _map(self, payload: str) -> torch.Tensor:
        return sender_slots(payload, self._device)

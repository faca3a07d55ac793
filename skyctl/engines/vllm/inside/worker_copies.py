"""Weights from the workers of one server into those of another that runs the same model, through
two buffers of the first: each tensor as it lies, in chunks.

    sibling   share ─► fill 0 ─► fill 1 ─► fill 2 … ─► close     serves meanwhile
    replica   open  ─►           copy 0 ─► copy 1 … ─► close     frozen

A parameter may lie in the pool of vLLM's sleep mode, which no other process can map; a buffer does
not. Only models of which nothing is derived from the weights are copied so.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from skyctl.engines.inside.ended import when_ended
from skyctl.engines.vllm.inside.adapter_memory import mapped
from skyctl.engines.vllm.inside.completeness import half_open
from skyctl.engines.vllm.inside.digest import (
    arrangement,
    distinct,
    input_size,
    is_packed,
    packed_values,
)
from skyctl.engines.vllm.inside.layout import EXPERT_BACKENDS, PLAIN_METHODS, whole_problem
from skyctl.engines.vllm.inside.layout_memory import SPARE_BYTES
from skyctl.engines.vllm.inside.worker_part import WorkerPart
from skyctl.wire.copies import octets_of
from skyctl.wire.device_digest import as_it_lies, plain_tensors
from skyctl.wire.exports import Export, Exporter, opened
from skyctl.wire.messages import WeightsOffer

_NUM_BUFFERS = 2
_GPU_BUFFER_BYTES = 1 << 30
_LEAST_BUFFER_BYTES = 32 << 20
_ALIGNMENT = 256
_COLUMNS = 512
"""As many columns of a layer that a CPU has packed are read at a time."""


@dataclass(frozen=True)
class _Content:
    """A tensor that is copied."""

    name: str
    """In the running model."""
    dtype: str
    """torch's name of it."""
    shape: tuple[int, ...]
    """() for a single value."""
    stride: tuple[int, ...]
    """In elements; () for a weight that a CPU has packed."""
    nbytes: int
    """Its size."""
    begin: int
    """Where it begins in the sequence of all tensors, in bytes."""


class WorkerCopies(WorkerPart):
    """One worker's end of a copy, on either side."""

    def __init__(self, worker: Any, *, cpu_buffer_bytes: int = 64 << 20) -> None:
        super().__init__(worker)
        self._cpu_buffer_bytes = cpu_buffer_bytes
        self._lock = threading.RLock()
        self._exporter = Exporter()
        self._owned: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._buffer_bytes = 0
        self._sources: list[list[Any]] = []
        self._contents: list[_Content] = []
        self._end = 0
        self._octets: dict[str, torch.Tensor] = {}
        self._packed: dict[str, Any] = {}
        self._matrix: tuple[str, torch.Tensor] | None = None
        self._key = ""
        self._driver = 0
        self._watched: set[int] = set()

    def share(self, key: str, directory: str, pid: int) -> WeightsOffer:
        """Get ready to be copied from. The buffers are this worker's until `close`, or some seconds
        after the process `pid`, which drives the copy, has ended.

        Args:
            key: identifies the copy.
            directory: where a CPU's buffers are files.
        """
        with self._lock:
            self.close()
            self._watch(pid)
            if reason := self._problem():
                return WeightsOffer(reason=reason)
            try:
                self._describe()
                self._reserve(Path(directory))
            except (RuntimeError, OSError) as error:
                self.close()
                return WeightsOffer(reason=str(error))
            self._key = key
            return WeightsOffer(self._form(), self._end, self._buffer_bytes, self._sources)

    def fill(self, key: str, chunk: int) -> None:
        """Copy a chunk into its buffer, whose earlier chunk was copied out. Raises RuntimeError: it
        was given up.
        """
        with self._lock:
            self._require(key)
            with self._copying():
                for content, part, octets in self._parts(chunk):
                    octets.copy_(self._bytes_of(content, self._unpacked)[part], non_blocking=True)

    def open(self, key: str, offer: WeightsOffer, pid: int) -> None:
        """Get ready to copy what the worker of this rank offers, without touching a parameter.
        `pid` as for `share`.

        Raises:
            RuntimeError: this worker's tensors are not those of the other, or it cannot map its
                memory.
        """
        with self._lock:
            self.close()
            self._watch(pid)
            if reason := self._problem():
                raise RuntimeError(reason)
            self._describe()
            if offer.form != self._form():
                self.close()
                raise RuntimeError("its tensors differ in name, shape, dtype or layout")
            self._buffer_bytes = offer.buffer_bytes
            self._buffers = [
                mapped(*source)
                if len(source) == 2
                else opened(Export.from_wire(source), self._device)
                for source in offer.sources
            ]
            self._key = key

    def copy(self, key: str, chunk: int, last: bool) -> None:
        """Copy a chunk into the parameters; after the `last` one the model can compute.

        Raises:
            RuntimeError: it was given up; parameters hold parts of both.
        """
        with self._lock:
            self._require(key)
            with self._copying():
                for content, part, octets in self._parts(chunk):
                    self._bytes_of(content, _empty)[part].copy_(octets, non_blocking=True)
                    if part.stop == content.nbytes and content.name in self._packed:
                        self._pack(content)
            if last:
                self._finish()

    def close(self) -> None:
        """Release the buffers, mapped or owned.

        torch frees memory that was exported once its reader lets go of it. That of a reader that
        died stays until this process ends, at most the two buffers: they are used again.
        """
        with self._lock:
            self._key, self._buffers, self._contents = "", [], []
            self._octets, self._packed, self._matrix = {}, {}, None

    def release(self) -> None:
        """The reader has let go of the buffers: free them."""
        with self._lock:
            self.close()
            self._owned = []
            if self._device.type == "cuda":
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()

    def _watch(self, pid: int) -> None:
        """Before anything is taken: a process that has ended by now is not seen."""
        self._driver = pid
        if pid not in self._watched:
            self._watched.add(pid)
            when_ended([pid], lambda: self._forget(pid))

    def _forget(self, pid: int) -> None:
        with self._lock:
            self._watched.discard(pid)
            if pid == self._driver:  # another may drive the next copy by now
                self.release()

    def _problem(self) -> str:
        """Why the model cannot be copied tensor by tensor; "" if it can."""
        config, model = self._worker.vllm_config, self._model
        if config.parallel_config.data_parallel_size > 1:
            return "it has data-parallel ranks"
        if config.model_config.quantization:
            return f"it is quantized ({config.model_config.quantization})"
        if half_open(model):
            return "an earlier update broke off half-way"
        for path, layer in model.named_modules():
            method = getattr(layer, "quant_method", None)
            if method is None:
                continue
            if type(method).__name__ not in PLAIN_METHODS:
                return f"{path}: {type(method).__name__} processes its weights"
            backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
            if backend and backend not in EXPERT_BACKENDS:
                return f"{path}: its backend {backend} may rearrange experts"
        return whole_problem(model)

    def _describe(self) -> None:
        """Note what is copied, in the same order in both workers. Raises RuntimeError: a tensor has
        gaps.
        """
        model, self._end = self._model, 0
        with torch.no_grad(), plain_tensors():
            for name, tensor in distinct(sorted(model.state_dict(keep_vars=True).items())):
                if tensor.is_meta or not as_it_lies(tensor).is_contiguous():
                    raise RuntimeError(f"{name} is empty, or has gaps")
                self._octets[name] = octets_of(as_it_lies(tensor))
                self._add(name, tensor.dtype, tensor.shape, tensor.stride(), tensor.nbytes)
            for path, layer in model.named_modules():
                if is_packed(layer) and not layer.weight.numel():
                    height = packed_values(layer, slice(None), 0, 1).shape[0]
                    shape, dtype = (height, input_size(layer)), layer.weight.dtype
                    name = f"{path}.weight"
                    self._packed[name] = layer
                    self._add(name, dtype, shape, (), shape[0] * shape[1] * dtype.itemsize)

    def _add(self, name: str, dtype: Any, shape: Any, stride: Any, nbytes: int) -> None:
        form = str(dtype).removeprefix("torch."), tuple(shape), tuple(stride)
        self._contents.append(_Content(name, *form, nbytes, self._end))
        self._end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def _form(self) -> str:
        """Equal for workers whose tensors can be copied into each other's."""
        config = self._worker.vllm_config
        rows = [list(astuple(content)) for content in self._contents]
        form = [arrangement(config), config.parallel_config.rank, rows]
        return hashlib.blake2b(json.dumps(form).encode(), digest_size=16).hexdigest()

    def _reserve(self, directory: Path) -> None:
        """Take the buffers. Raises RuntimeError: there is no memory for them."""
        if self._device.type != "cuda":
            self._buffer_bytes = min(self._cpu_buffer_bytes, self._end)
            self._sources = [
                [str(directory / f"rank-{self._worker.vllm_config.parallel_config.rank}-{n}"), 0]
                for n in range(_NUM_BUFFERS)
            ]
            for path, _ in self._sources:
                with Path(path).open("xb") as file:
                    file.truncate(self._buffer_bytes)
            self._buffers = [mapped(*source) for source in self._sources]
            return
        if not self._owned:
            free = torch.cuda.mem_get_info(self._device)[0] - SPARE_BYTES
            size = min(_GPU_BUFFER_BYTES, free // _NUM_BUFFERS, self._end)
            size -= size % _ALIGNMENT
            if size < min(_LEAST_BUFFER_BYTES, self._end):
                raise RuntimeError(f"{max(free, 0) >> 20} MiB of its GPU are free for buffers")
            self._owned = [
                torch.empty(size, dtype=torch.uint8, device=self._device)
                for _ in range(_NUM_BUFFERS)
            ]
            # what was freed there before may still be read
            torch.cuda.current_stream(self._device).synchronize()
        self._buffers, self._buffer_bytes = self._owned, self._owned[0].numel()
        with torch.cuda.device(self._device):
            exports, places = self._exporter.export(self._owned)
        if places != [(0, 0), (1, 0)]:
            raise RuntimeError("its buffers do not have memory of their own")
        self._sources = [export.to_wire() for export in exports]

    def _require(self, key: str) -> None:
        if not key or key != self._key:
            raise RuntimeError("this copy was given up")

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copies enqueued within are done at its end; they run on a stream of their own."""
        with torch.no_grad(), plain_tensors():
            if self._device.type != "cuda":
                yield
                return
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()

    def _parts(self, chunk: int) -> Iterator[tuple[_Content, slice, torch.Tensor]]:
        """Each tensor that lies in a chunk, which bytes of it do, and where they are there."""
        begin = chunk * self._buffer_bytes
        buffer = self._buffers[chunk % _NUM_BUFFERS]
        for content in self._contents:
            first = max(begin, content.begin)
            last = min(begin + self._buffer_bytes, content.begin + content.nbytes)
            if first < last:
                part = slice(first - content.begin, last - content.begin)
                yield content, part, buffer[first - begin : last - begin]

    def _bytes_of(
        self, content: _Content, matrix_of: Callable[[_Content], torch.Tensor]
    ) -> torch.Tensor:
        """Where its bytes lie: those of a weight that a CPU has packed in a matrix, which
        `matrix_of` makes.
        """
        if content.name not in self._packed:
            return self._octets[content.name]
        if self._matrix is None or self._matrix[0] != content.name:
            self._matrix = content.name, matrix_of(content)
        return octets_of(self._matrix[1])

    def _unpacked(self, content: _Content) -> torch.Tensor:
        layer, width = self._packed[content.name], content.shape[1]
        columns = [
            packed_values(layer, slice(None), first, min(first + _COLUMNS, width))
            for first in range(0, width, _COLUMNS)
        ]
        return torch.cat(columns, 1)

    def _pack(self, content: _Content) -> None:
        """Have a CPU's layer pack the weight that has arrived, as vLLM's loader does."""
        assert self._matrix is not None
        layer, (_, matrix), self._matrix = self._packed[content.name], self._matrix, None
        layer.weight = torch.nn.Parameter(matrix, requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)

    def _finish(self) -> None:
        """Do what vLLM's own update does at its end."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for layer in self._model.modules():
            if is_packed(layer) and layer.weight.numel():  # a packed copy beside the weight
                layer.quant_method.process_weights_after_loading(layer)
        self._reset_adapters()


def _empty(content: _Content) -> torch.Tensor:
    return torch.empty(content.shape, dtype=getattr(torch, content.dtype))

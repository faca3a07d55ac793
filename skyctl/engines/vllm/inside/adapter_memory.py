"""LoRA adapters that a worker was given out of another process's memory.

    take ─► held, compared ─► vLLM loads it as from its path ─► write ─► release
            └ on this device, a second later in host memory ┘  └ a file is at the path from here on

vLLM reads an adapter when it is loaded, and again if it has dropped it meanwhile, so the tensors
stay until a file has them. vLLM's own loader builds the adapter; only what it reads is replaced.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from skyctl.engines.vllm.inside.worker_part import WorkerPart
from skyctl.wire.device_digest import digest_on_device
from skyctl.wire.exports import Export, opened

_SPARE_BYTES = 1 << 30
"""What stays free on a GPU at least: adapters are held in host memory otherwise."""
_ON_GPU_S = 1.0
"""How long an adapter stays on the GPU beside its slot: its first answers come first."""

Row = tuple[str, str, Sequence[int], int, int]
"""A tensor: name, torch dtype, shape, first byte and number of bytes."""


class HeldAdapter:
    """The tensors of one adapter, as they were sent, in one piece of memory."""

    def __init__(self, memory: torch.Tensor, rows: Sequence[Row], numbers: Sequence[int]) -> None:
        self._rows = rows
        self._numbers = list(numbers)
        self._lock = threading.Lock()
        self._models: list[weakref.ref[Any]] = []
        self._ready: Any = None
        self.memory = memory
        self.state = ""
        """Of its file: "", "writing", "written", or why it was not written."""

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor, in memory that has the bytes of all."""
        return {
            name: memory[begin : begin + size].view(getattr(torch, dtype)).view(list(shape))
            for name, dtype, shape, begin, size in self._rows
        }

    def require_sent(self, memory: torch.Tensor) -> None:
        """Raise RuntimeError unless this memory holds what was sent."""
        numbers = digest_on_device([*self.views(memory).values()])
        for row, number, sent in zip(self._rows, numbers, self._numbers, strict=True):
            if number != sent:
                raise RuntimeError(f"{row[0]} is not what was sent")

    def built(self, model: Any) -> None:
        """vLLM has made an adapter of the tensors: it does not stay on the GPU for long."""
        self._models.append(weakref.ref(model))
        if self.memory.is_cuda:
            self._ready = torch.cuda.current_stream(self.memory.device).record_event()
            timer = threading.Timer(_ON_GPU_S, self._to_host)
            timer.daemon = True
            timer.start()

    def write(self, file: str, offset: int) -> None:
        """Begin to write the tensors into a file that has room for them, in a thread."""
        self.state = "writing"
        threading.Thread(target=self._write, args=(file, offset), daemon=True).start()

    def _write(self, file: str, offset: int) -> None:
        try:
            self._to_host()
            with open(file, "r+b") as opened_file:  # noqa: PTH123 - unbuffered by pwrite
                data, done = memoryview(self.memory.numpy()), 0
                while done < len(data):  # one call moves at most 2 GiB
                    done += os.pwrite(opened_file.fileno(), data[done:], offset + done)
            self.require_sent(mapped(file, offset))
            self.state = "written"
        except Exception as error:
            self.state = f"{type(error).__name__}: {error}"

    def _to_host(self) -> None:
        """Move all that is on the GPU to host memory, on a stream of its own."""
        with self._lock:
            if not self.memory.is_cuda:
                return
            stream = torch.cuda.Stream(self.memory.device)
            if self._ready is not None:
                stream.wait_event(self._ready)
            with torch.cuda.stream(stream):
                for model in filter(None, (reference() for reference in self._models)):
                    _copy_out(model)
                self.memory = self.memory.cpu()


class GivenAdapters(WorkerPart):
    """Those of one worker, by the path that vLLM knows each by."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._adapters: dict[str, HeldAdapter] = {}

    def take(
        self,
        path: str,
        rows: Sequence[Row],
        numbers: Sequence[int],
        source: Sequence[Any],
        needed: Collection[str],
    ) -> str:
        """Copy an adapter's tensors and compare them with what was sent. Others than the `needed`
        are dropped.

        Args:
            source: an `Export`, or a file and the offset of the tensors in it.

        Returns:
            why this worker cannot take it; "" if it has.

        Raises:
            RuntimeError: what arrived is not what was sent.
        """
        for other in self._adapters.keys() - set(needed):
            del self._adapters[other]
        manager = getattr(self._worker.model_runner, "lora_manager", None)
        if manager is None or not hasattr(manager, "_lora_model_cls"):
            return "it loads no adapters"
        if getattr(manager._adapter_manager, "moe_ep_load_spec", None) is not None:
            return "each of its workers has some of the experts"
        size = sum(row[4] for row in rows)
        try:
            memory = self._copied(source, size)
        except (RuntimeError, OSError) as error:
            return f"it cannot reach the tensors: {error}"
        adapter = HeldAdapter(memory, rows, numbers)
        adapter.require_sent(memory)
        _load_from(manager, self._adapters)
        self._adapters[path] = adapter
        return ""

    def write(self, path: str, file: str, offset: int) -> str:
        """Begin to write an adapter's tensors into a file; returns how far that is: "writing",
        "written", "absent" if this worker does not hold them, or why it failed. After a failure
        the next call begins again.
        """
        adapter = self._adapters.get(path)
        if adapter is None:
            return "absent"
        state = adapter.state
        if not state:
            adapter.write(file, offset)
        elif state not in ("writing", "written"):
            adapter.state = ""
        return state or "writing"

    def release(self, paths: Iterable[str]) -> None:
        """Drop adapters of which files exist."""
        for path in paths:
            self._adapters.pop(path, None)

    def _copied(self, source: Sequence[Any], size: int) -> torch.Tensor:
        device = self._device
        if len(source) == 2:
            memory = mapped(*source)[:size]
        else:
            memory = opened(Export.from_wire(source), device)[:size]
        if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < 2 * size + _SPARE_BYTES:
            device = torch.device("cpu")
        return memory.to(device, copy=True)


def mapped(file: str, offset: int) -> torch.Tensor:
    """The bytes of a file from an offset on, in place."""
    size = os.stat(file).st_size  # noqa: PTH116 - beside the line that maps it
    return torch.from_file(file, shared=True, size=size, dtype=torch.uint8)[offset:]


def _load_from(manager: Any, adapters: dict[str, HeldAdapter]) -> None:
    """Let this manager of vLLM's load the adapters of these paths from memory."""
    loader = manager._lora_model_cls
    if hasattr(loader, "skyctl_held"):
        return

    class FromMemory(loader):  # type: ignore[misc, valid-type]
        """vLLM's adapter; the same for all paths but these."""

        skyctl_held = adapters

        @classmethod
        def from_local_checkpoint(
            cls, lora_dir: str, expected_lora_modules: Any, peft_helper: Any, **options: Any
        ) -> Any:
            adapter = adapters.get(lora_dir)
            if adapter is None:
                return super().from_local_checkpoint(
                    lora_dir, expected_lora_modules, peft_helper=peft_helper, **options
                )
            options.pop("moe_ep_spec", None)
            memory = adapter.memory.clone()  # vLLM scales in place
            options["device"] = str(memory.device)
            model = cls.from_lora_tensors(
                tensors=adapter.views(memory), peft_helper=peft_helper, **options
            )
            adapter.built(model)
            return model

    manager._lora_model_cls = FromMemory


def _copy_out(model: Any) -> None:
    """Move an adapter's tensors to the host; vLLM may read them meanwhile."""
    for layer in list(model.loras.values()):
        for part in ("lora_a", "lora_b"):
            tensors = getattr(layer, part)
            if isinstance(tensors, list):
                setattr(layer, part, [None if t is None else t.cpu() for t in tensors])
            elif tensors is not None:
                setattr(layer, part, tensors.cpu())

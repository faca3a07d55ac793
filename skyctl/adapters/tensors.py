"""LoRA tensors in a trainer's memory, under PEFT's names: written as a PEFT directory, or left on
their GPU, in one piece of memory that servers copy.
"""

from __future__ import annotations

import atexit
import json
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.adapters.peft import CONFIG, PART, UNWRITTEN, WEIGHTS, module_of
from skyctl.adapters.requests import SentTensors
from skyctl.checkpoints.header import safetensors_name
from skyctl.checkpoints.live import memory_of, synchronize
from skyctl.errors import PreflightError, SkyctlError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from skyctl.wire.exports import Exporter

Named = Sequence[tuple[str, Any]]


def on_one_gpu(tensors: Named) -> bool:
    """Whether all of them lie on the same GPU."""
    devices = {getattr(tensor, "device", None) for _, tensor in tensors}
    return len(devices) == 1 and all(getattr(tensor, "is_cuda", False) for _, tensor in tensors)


def write_adapter(tensors: Named, config: Mapping[str, Any] | None, directory: Path) -> SentTensors:
    """Write tensors into an empty directory; returns what they are, as they were in memory.

    `config` has PEFT's keys; `r` and `lora_alpha` are required. `target_modules` default to those
    of the tensors.

    Raises:
        PreflightError: a tensor holds NaN or infinity.
        UsageError: something that is not a tensor was given, or `config` lacks a key.
        SkyctlError: it cannot be written.
    """
    ordered = _in_file_order(tensors)
    synchronize(tensor for _, tensor in ordered)
    plain = [(name, tensor.detach().to("cpu").contiguous()) for name, tensor in ordered]
    header = _header(plain)
    _write_config(config, plain, directory)
    sent = _examined(plain)
    try:
        with (directory / WEIGHTS).open("xb") as file:
            file.write(header)
            for _, tensor in plain:
                file.write(memory_of(tensor))
    except OSError as error:
        raise _unwritten(directory, error) from error
    return sent


@dataclass(frozen=True)
class GatherBuffer:
    """Memory of a GPU that servers copy adapters from. torch does not free memory that was shared
    before each of its readers is counted, and here their number is unknown: it is used again.
    """

    memory: Tensor
    exporter: Exporter

    @classmethod
    def reserved(cls, device: torch.device, size: int) -> GatherBuffer:
        """The smallest free one of at least this many bytes, or a new one."""
        import torch

        from skyctl.wire.exports import Exporter

        with _LOCK:
            fitting = [b for b in _FREE if b.memory.device == device and b.memory.nbytes >= size]
            if fitting:
                smallest = min(fitting, key=lambda buffer: buffer.memory.nbytes)
                _FREE.remove(smallest)
                return smallest
        return cls(torch.empty(size, dtype=torch.uint8, device=device), Exporter())

    def free(self) -> None:
        """Servers have copied what it holds."""
        with _LOCK:
            _FREE.append(self)


_FREE: list[GatherBuffer] = []
atexit.register(_FREE.clear)  # while torch can still free them
_LOCK = threading.Lock()


def gather(
    tensors: Named, config: Mapping[str, Any] | None, directory: Path
) -> tuple[SentTensors, GatherBuffer]:
    """Copy tensors of one GPU into one piece of its memory, and write all else of the adapter into
    an empty directory. The caller frees the memory once servers have copied it. Raises as
    `write_adapter`.
    """
    ordered = _in_file_order(tensors)
    header = _header(ordered)
    _write_config(config, ordered, directory)
    total = sum(tensor.nbytes for _, tensor in ordered)
    buffer = GatherBuffer.reserved(ordered[0][1].device, total)
    try:
        sent = _copied(ordered, buffer)
        with (directory / UNWRITTEN).open("xb") as file:
            file.write(header)
            file.truncate(len(header) + total)
    except BaseException as error:
        buffer.free()
        if isinstance(error, OSError):
            raise _unwritten(directory, error) from error
        raise
    return sent, buffer


def _copied(tensors: Sequence[tuple[str, Tensor]], buffer: GatherBuffer) -> SentTensors:
    """Copy tensors into it, one after the other. Raises PreflightError for NaN and infinity."""
    import torch

    memory, copies, begin = buffer.memory, [], 0
    with torch.no_grad(), torch.cuda.device(memory.device):
        torch.cuda.synchronize()  # the trainer's other streams may still write
        for name, tensor in tensors:
            view = memory[begin : (begin := begin + tensor.nbytes)].view(tensor.dtype)
            copies.append((name, view.view(tensor.shape).copy_(tensor)))
        sent = _examined(copies)
        [export], _ = buffer.exporter.export([memory])
        torch.cuda.synchronize()
    return replace(sent, export=tuple(export.to_wire()))


def _examined(tensors: Sequence[tuple[str, Tensor]]) -> SentTensors:
    """What servers must hold. Raises PreflightError for NaN and infinity."""
    import torch

    from skyctl.wire.device_digest import digest_on_device
    from skyctl.wire.finite import finite_flags

    names, contents = [name for name, _ in tensors], [tensor for _, tensor in tensors]
    if not contents:
        return SentTensors(numbers=())
    finite = finite_flags(contents)
    if not all(finite):
        raise PreflightError(
            f"{names[finite.index(False)]} holds NaN or infinity",
            hint="load an earlier version of the adapter",
        )
    some = torch.stack([tensor.any() for tensor in contents]).tolist()
    zeros = {module_of(name) for name, value in zip(names, some, strict=True) if not value}
    return SentTensors(
        numbers=tuple(digest_on_device(contents)),
        is_zero=zeros == {module_of(name) for name in names},
    )


def _in_file_order(tensors: Named) -> list[tuple[str, Tensor]]:
    """Wider elements first, so that each tensor begins at a multiple of its element's size."""
    import torch

    for name, tensor in tensors:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UsageError(
                "an adapter is pairs of a name and a torch.Tensor",
                hint="give peft.get_peft_model_state_dict(model)",
            )
        if not tensor.numel():
            raise PreflightError(f"{name} is empty", hint="give tensors of at least one element")
    return sorted(tensors, key=lambda pair: -pair[1].element_size())


def _header(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors:
        dtype = safetensors_name(str(tensor.dtype).removeprefix("torch."), name)
        offsets = [end, end := end + tensor.nbytes]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    raw = json.dumps(entries).encode()
    raw = raw.ljust(-(-len(raw) // 8) * 8)  # so that tensors begin aligned
    return struct.pack("<Q", len(raw)) + raw


def _write_config(config: Mapping[str, Any] | None, tensors: Named, directory: Path) -> None:
    missing = [key for key in ("r", "lora_alpha") if key not in (config or {})]
    if missing:
        raise UsageError(
            f"tensors need a configuration with {' and '.join(missing)}",
            hint='give config={"r": 8, "lora_alpha": 32}, or what adapter_config.json would have',
        )
    modules = {m["module"].rpartition(".")[2] for name, _ in tensors if (m := PART.match(name))}
    whole = {"peft_type": "LORA", "bias": "none", "target_modules": sorted(modules)}
    try:
        (directory / CONFIG).write_text(json.dumps({**whole, **(config or {})}))
    except (OSError, TypeError, ValueError) as error:
        raise _unwritten(directory, error) from error


def _unwritten(directory: Path, error: Exception) -> SkyctlError:
    return SkyctlError(f"the adapter cannot be written to {directory}: {error}")

"""The sender's GPUs: which there are, what is free on them, and buffers that other GPUs mirror."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def uuid_of(device: int) -> str:
    """The physical identity of a GPU, as vLLM's IPC engine keys its handles."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


class MirroredSlots:
    """Equal buffers on several GPUs. The first is filled from the host; `mirror` copies a slot to
    the others over NVLink, which is several times faster than a second copy from the host.

    Memory per GPU: slots x slot_bytes, one allocation.
    """

    def __init__(self, devices: Sequence[int], slots: int, slot_bytes: int) -> None:
        import torch

        self.devices = list(devices)
        self.slot_bytes = slot_bytes
        self._buffers = [
            torch.empty(slots * slot_bytes, dtype=torch.uint8, device=f"cuda:{device}")
            for device in self.devices
        ]
        self._streams = [torch.cuda.Stream(device=device) for device in self.devices]
        for device in self.devices:
            torch.cuda.synchronize(device)

    def addresses(self) -> list[int]:
        """Device address of every slot on the first GPU."""
        first = self._buffers[0]
        base: int = first.data_ptr()
        return [base + offset for offset in range(0, first.numel(), self.slot_bytes)]

    def view(self, device: int, slot: int) -> Any:
        """One slot on one GPU: a uint8 tensor of slot_bytes."""
        begin = slot * self.slot_bytes
        return self._buffers[self.devices.index(device)][begin : begin + self.slot_bytes]

    def mirror(self, slot: int) -> None:
        """Copy a slot from the first GPU to all others, side by side; returns when it is there."""
        import torch

        source = self.view(self.devices[0], slot)
        for device, stream in list(zip(self.devices, self._streams, strict=True))[1:]:
            with torch.cuda.stream(stream):
                self.view(device, slot).copy_(source, non_blocking=True)
        for stream in self._streams[1:]:
            stream.synchronize()

    def free(self) -> None:
        """Give the memory back to the GPUs."""
        import torch

        self._buffers.clear()
        self._streams.clear()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

"""GPU load of this machine: from NVML if its Python package is installed, else from nvidia-smi."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,utilization.gpu,memory.used,memory.total",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True)
class GpuUsage:
    """One GPU now. `index` is nvidia-smi's; `utilization` is 0..1, None if not reported."""

    index: int
    utilization: float | None
    memory_used_bytes: int
    memory_bytes: int


def gpu_reader() -> Callable[[], dict[int, GpuUsage]]:
    """A function that reads all GPUs by index, and returns {} if there are none."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML has its own error classes
        return read_nvidia_smi
    return lambda: _read_nvml(pynvml)


def read_nvidia_smi(
    timeout_s: float = 5.0, *, command: Sequence[str] = _QUERY
) -> dict[int, GpuUsage]:
    """All GPUs by index, as nvidia-smi shows them; {} if it does not answer."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}
    found = [usage for line in result.stdout.splitlines() if (usage := _parse(line)) is not None]
    return {usage.index: usage for usage in found}


def _parse(line: str) -> GpuUsage | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 4 or not fields[0].isdigit():
        return None
    # some machines report "[N/A]"
    index, busy, used, total = (int(f) if f.isdigit() else None for f in fields)
    return GpuUsage(
        index or 0,
        None if busy is None else busy / 100,
        (used or 0) * 1024**2,
        (total or 0) * 1024**2,
    )


def _read_nvml(nvml: Any) -> dict[int, GpuUsage]:
    found = {}
    # the second version leaves out what the driver reserves, as nvidia-smi does
    memory_version = {"version": nvml.nvmlMemory_v2} if hasattr(nvml, "nvmlMemory_v2") else {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, **memory_version)
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            found[index] = GpuUsage(index, busy / 100, int(memory.used), int(memory.total))
    except nvml.NVMLError:
        return found
    return found

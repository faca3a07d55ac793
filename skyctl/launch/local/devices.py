"""The GPUs, CPU cores, memory and network interfaces of this machine, and how busy its GPUs are."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from skyctl.launch.base import Cpu, Gpu


def gpu_query(fields: str) -> list[str]:
    """The command that asks the driver for these, `index` first."""
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


_QUERY = gpu_query("index,uuid,name,memory.total")
_FREE_QUERY = gpu_query("index,uuid,name,memory.free")
_USAGE_QUERY = gpu_query("index,utilization.gpu,memory.used,memory.total")


def discover_gpus(timeout_s: float = 10.0, *, command: Sequence[str] = _QUERY) -> list[Gpu]:
    """The machine's NVIDIA GPUs in index order; [] without a driver or if it does not answer."""
    gpus = [_gpu(fields) for fields in gpu_rows(command, timeout_s) if len(fields) >= 4]
    return sorted(gpus, key=lambda gpu: gpu.index)


def free_gpu_memory() -> dict[int, int]:
    """Free bytes of each GPU now, by index; {} without a driver or if it does not answer."""
    return {gpu.index: gpu.memory_bytes for gpu in discover_gpus(command=_FREE_QUERY)}


def gpu_rows(command: Sequence[str], timeout_s: float) -> list[list[str]]:
    """The fields of each GPU by a `gpu_query`; [] if nvidia-smi does not answer."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines()]
    return [row for row in rows if row[0].isdigit()]


def _gpu(fields: list[str]) -> Gpu:
    # some machines with unified memory report "[N/A]"
    mebibytes = int(fields[-1]) if fields[-1].isdigit() else 0
    return Gpu(int(fields[0]), fields[1], ",".join(fields[2:-1]), mebibytes * 1024**2)


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that an inherited CUDA_VISIBLE_DEVICES leaves to us.

    A batch scheduler assigns GPUs this way while nvidia-smi still lists all of them. Entries are
    indices or UUIDs (or their prefixes); anything else, such as a MIG instance, is ignored.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    entries = [entry.strip() for entry in listed.split(",") if entry.strip()]
    uuids = tuple(entry for entry in entries if entry.startswith("GPU-"))
    return [gpu for gpu in gpus if str(gpu.index) in entries or gpu.uuid.startswith(uuids)]


@dataclass(frozen=True)
class GpuUsage:
    """One GPU now. `index` is nvidia-smi's; `utilization` is 0..1, None if not reported."""

    index: int
    utilization: float | None
    memory_used_bytes: int
    memory_bytes: int


def gpu_reader() -> Callable[[], dict[int, GpuUsage]]:
    """A function that reads all GPUs by index, and returns {} if there are none: from NVML if its
    Python package is installed, else from nvidia-smi.
    """
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML has its own error classes
        return read_nvidia_smi
    return lambda: _read_nvml(pynvml)


def read_nvidia_smi(
    timeout_s: float = 5.0, *, command: Sequence[str] = _USAGE_QUERY
) -> dict[int, GpuUsage]:
    """All GPUs by index, as nvidia-smi shows them; {} if it does not answer."""
    usages = [_usage(fields) for fields in gpu_rows(command, timeout_s) if len(fields) == 4]
    return {usage.index: usage for usage in usages}


def _usage(fields: list[str]) -> GpuUsage:
    # some machines report "[N/A]"
    index, busy, used, total = (int(f) if f.isdigit() else None for f in fields)
    return GpuUsage(
        index or 0,
        None if busy is None else busy / 100,
        (used or 0) * 1024**2,
        (total or 0) * 1024**2,
    )


def _read_nvml(nvml: Any) -> dict[int, GpuUsage]:
    usages = {}
    # the second version leaves out what the driver reserves, as nvidia-smi does
    memory_version = {"version": nvml.nvmlMemory_v2} if hasattr(nvml, "nvmlMemory_v2") else {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, **memory_version)
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            usages[index] = GpuUsage(index, busy / 100, int(memory.used), int(memory.total))
    except nvml.NVMLError:
        return usages
    return usages


def discover_cpus(*, topology: Path = Path("/sys/devices/system/cpu")) -> list[Cpu]:
    """The logical CPUs this process may use (its affinity mask), in order."""
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    return [Cpu(cpu, _first_sibling(topology, cpu)) for cpu in allowed]


def _first_sibling(topology: Path, cpu: int) -> int:
    try:
        siblings = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        return int(siblings.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def interface_of(address: str) -> str:
    """The network interface that has an address, or else its network; "" where none does."""
    import psutil

    every = psutil.net_if_addrs()
    addresses = [(name, entry) for name, entries in every.items() for entry in entries]
    for name, entry in addresses:
        if entry.address == address:
            return name
    for name, entry in addresses:
        with contextlib.suppress(ValueError):  # another kind of address
            if ip_address(address) in ip_network(f"{entry.address}/{entry.netmask}", strict=False):
                return name
    return ""


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that can still be used, within the container's limit if there is one."""
    try:
        lines = meminfo.read_text().splitlines()
        free = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        # the page cache counts as used, but is freed when needed
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, min(free, limit - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):  # no limit: memory.max says "max"
        return free

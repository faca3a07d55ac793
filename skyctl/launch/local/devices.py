"""The GPUs, CPU cores and network interfaces of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path

from skyctl.launch.base import Cpu, Gpu

_QUERY = [
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total",
    "--format=csv,noheader,nounits",
]


def discover_gpus(timeout_s: float = 10.0, *, command: Sequence[str] = _QUERY) -> list[Gpu]:
    """The machine's NVIDIA GPUs in index order; [] without a driver or if it does not answer."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    gpus = [gpu for line in result.stdout.splitlines() if (gpu := _parse_gpu(line)) is not None]
    return sorted(gpus, key=lambda gpu: gpu.index)


_FREE_QUERY = [word.replace("memory.total", "memory.free") for word in _QUERY]


def free_gpu_memory() -> dict[int, int]:
    """Free bytes of each GPU now, by index; {} without a driver or if it does not answer."""
    return {gpu.index: gpu.memory_bytes for gpu in discover_gpus(command=_FREE_QUERY)}


def _parse_gpu(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) < 4 or not fields[0].isdigit():
        return None
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
    wanted = [entry.strip() for entry in listed.split(",") if entry.strip()]
    return [
        gpu
        for gpu in gpus
        if any(entry == str(gpu.index) or _names_uuid(entry, gpu.uuid) for entry in wanted)
    ]


def _names_uuid(entry: str, uuid: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)


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

    found = [(name, one) for name, every in psutil.net_if_addrs().items() for one in every]
    for name, one in found:
        if one.address == address:
            return name
    for name, one in found:
        with contextlib.suppress(ValueError):  # another kind of address
            if ip_address(address) in ip_network(f"{one.address}/{one.netmask}", strict=False):
                return name
    return ""

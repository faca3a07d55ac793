"""Shared memory that vLLM's CPU workers leave behind: found while they live, removed after them.

Ranks of a CPU server exchange tensors through `/dev/shm/<rendezvous>-<group>-cpushm_<rank>`, 4 MiB
each (`cpu_communicator.py`, `csrc/cpu/shm.cpp`; x86 without AVX-512 has none), and never unlink
them. Two things identify the owner: a process of the server had it mapped, or its name begins with
that of a rendezvous file in the fleet's own temporary directory (`file://$TMPDIR/vllm_dist_<uuid>`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_RENDEZVOUS = "vllm_dist_"
# address, permissions, offset, device, inode, path
_MAPPED = re.compile(
    r"^\S+ \S+ \S+ \S+ (?P<inode>\d+) +/dev/shm/(?P<name>[^/\n]+-cpushm_\d+)$", re.MULTILINE
)

Segment = tuple[str, int]
"""File name and inode: a name that another file has taken since is no longer ours."""


def mapped_by(pids: Iterable[int], proc: Path = Path("/proc")) -> frozenset[Segment]:
    """Segments of CPU ranks that these processes have mapped; [] if /proc does not say."""
    segments: set[Segment] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = (proc / str(pid) / "maps").read_text(errors="replace")
            segments.update((m["name"], int(m["inode"])) for m in _MAPPED.finditer(maps))
    return frozenset(segments)


def remove(segments: Iterable[Segment], root: Path = SHARED_MEMORY) -> None:
    """Unlink segments whose processes have ended."""
    for name, inode in segments:
        path = root / name
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == inode:
                path.unlink()


def remove_left(scratch: Path, root: Path = SHARED_MEMORY) -> None:
    """Unlink the segments of every rendezvous in `scratch` that has no users left."""
    names = list[str]()
    with contextlib.suppress(FileNotFoundError):  # two `down` at once: the other has removed it
        names += [rendezvous.name for rendezvous in scratch.glob(f"{_RENDEZVOUS}*")]
    for name in names:
        for segment in root.glob(f"{name}-*-cpushm_*"):
            with contextlib.suppress(OSError):
                segment.unlink()

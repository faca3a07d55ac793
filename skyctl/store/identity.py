"""Identifies a process: a pid alone is reused, pid + create time + boot id is not."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

# loaded on demand: psutil takes longer to load than most commands take to ask their servers


def peer(connection: socket.socket) -> tuple[int, int]:
    """pid and uid of the other end of a unix socket, from the kernel. The pid is 0 if that is in
    another container.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", packed)
    return int(pid), int(uid)


@cache
def boot_id() -> str:
    """Identifies this boot of the machine; the boot time if the kernel offers no id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"boot-{psutil.boot_time():.0f}"


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one boot. `create_time` is the value of `create_time()`."""

    pid: int
    create_time: float
    boot_id: str

    def alive(self) -> bool:
        """Whether exactly this process still runs, if only one of its threads."""
        return self.process() is not None

    def process(self) -> psutil.Process | None:
        """The live process, or None if it is gone or its pid now belongs to another."""
        if self.boot_id != boot_id():
            return None
        import psutil

        created = create_time(self.pid)
        if created is None or abs(created - self.create_time) > 0.05:
            return None
        try:
            process = psutil.Process(self.pid)
            return None if has_ended(process) else process
        except psutil.Error:
            return None


def has_ended(process: psutil.Process) -> bool:
    """Whether no thread of it runs any more. Its first thread may be a zombie before the others
    have ended: until then they keep its locks, its ports, and its memory on a GPU.

    Raises:
        psutil.Error: there is no such process.
    """
    return process.status() == "zombie" and process.num_threads() <= 1


def create_time(pid: int) -> float | None:
    """When a process was created, in seconds; None if there is none with this pid.

    On Linux since boot. psutil adds the boot time, which the kernel derives from the clock in whole
    seconds: it shifts by one when the clock is corrected slightly, by more when it is set, and
    every process would seem to be another. Elsewhere it is psutil's, since the epoch.
    """
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        # the third field follows the name, which may hold spaces and parentheses
        return int(stat.rpartition(b")")[2].split()[22 - 3]) / os.sysconf("SC_CLK_TCK")
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def identify(pid: int) -> ProcessIdentity | None:
    """Identity of a running process, None if there is none with this pid."""
    created = create_time(pid)
    return None if created is None else ProcessIdentity(pid, created, boot_id())


def own_processes() -> Iterator[psutil.Process]:
    """Every process of this user except this one."""
    import psutil

    own = os.getuid()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.uids().real == own:
                yield process
        except psutil.Error:
            continue


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; nothing where it has ended, or is not ours to look at.

    On Linux without psutil: a look for what is left of a server reads that of every process.
    """
    if sys.platform == "linux":
        try:
            content = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return {}
        pairs = (item.partition("=") for item in os.fsdecode(content.rstrip(b"\0")).split("\0"))
        return {name: value for name, equals, value in pairs if equals}
    import psutil

    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}


def own_identity() -> ProcessIdentity:
    """Identity of this very process."""
    own = identify(os.getpid())
    assert own is not None  # this process runs
    return own

"""Which process is meant: a pid alone is reused, pid + create time + boot id is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

# psutil takes longer to load than most commands take to ask their servers: where it is needed


@cache
def boot_id() -> str:
    """Identifies this boot of the machine; the boot time where the kernel offers no id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"boot-{psutil.boot_time():.0f}"


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one boot. `create_time` is in seconds since the epoch."""

    pid: int
    create_time: float
    boot_id: str

    def alive(self) -> bool:
        """True when exactly this process still runs (a zombie does not)."""
        return self.process() is not None

    def process(self) -> psutil.Process | None:
        """The live process, or None when it is gone or its pid now means another."""
        if self.boot_id != boot_id():
            return None
        import psutil

        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.create_time) > 0.05:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.Error:
            return None


def identify(pid: int) -> ProcessIdentity | None:
    """Identity of a running process, None when there is none with this pid."""
    import psutil

    try:
        return ProcessIdentity(pid, psutil.Process(pid).create_time(), boot_id())
    except psutil.Error:
        return None


def own_processes() -> Iterator[psutil.Process]:
    """Every process of this user but this one."""
    import psutil

    own = os.getuid()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.uids().real == own:
                yield process
        except psutil.Error:
            continue


def own_identity() -> ProcessIdentity:
    """Identity of this very process."""
    import psutil

    return ProcessIdentity(os.getpid(), psutil.Process().create_time(), boot_id())

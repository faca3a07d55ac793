"""CPU and memory of process trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    pass

# finding children reads all of /proc, so it is done rarely; servers seldom get new ones
TREES_EVERY_S = 5.0


@dataclass(frozen=True)
class TreeUsage:
    """Usage of one process tree. `cpu_percent` is 100 per busy core, None in the first sample.

    `rss_bytes` counts shared memory once for each process that shares it.
    """

    cpu_percent: float | None
    rss_bytes: int
    processes: int


class ProcessTrees:
    """Watches trees by the pid of their first process. Not for several threads at once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[int, list[psutil.Process]] = {}
        self._looked_at = float("-inf")
        self._cpu: dict[tuple[int, float], float] = {}
        self._measured_at: float | None = None

    def usage(self, roots: Iterable[int]) -> dict[int, TreeUsage]:
        """Usage by root pid since the last call; roots that are gone are left out."""
        now = self._clock()
        watched = set(roots)
        if now - self._looked_at >= TREES_EVERY_S or watched - self._members.keys():
            self._members, self._looked_at = _trees(watched), now
        before, since = self._cpu, self._measured_at
        self._cpu, self._measured_at = {}, now
        usages = {}
        for root in watched:
            usage = self._measure(self._members.get(root, []), before, since and now - since)
            if usage.processes:
                usages[root] = usage
        return usages

    def _measure(
        self,
        members: Iterable[psutil.Process],
        before: Mapping[tuple[int, float], float],
        seconds: float | None,
    ) -> TreeUsage:
        spent, rss, count, measured_before = 0.0, 0, 0, False
        for process in members:
            try:
                with process.oneshot():
                    key = (process.pid, process.create_time())
                    times = process.cpu_times()
                    rss += process.memory_info().rss
            except psutil.Error:
                continue
            count += 1
            self._cpu[key] = times.user + times.system
            if key in before:
                measured_before = True
                spent += self._cpu[key] - before[key]
        percent = 100 * spent / seconds if measured_before and seconds else None
        return TreeUsage(percent, rss, count)


def _trees(roots: Iterable[int]) -> dict[int, list[psutil.Process]]:
    """Each root with all its descendants."""
    children: dict[int, list[psutil.Process]] = {}
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            parent = process.ppid()
        except psutil.Error:
            continue
        processes[process.pid] = process
        children.setdefault(parent, []).append(process)
    trees = {}
    for root in roots:
        members: list[psutil.Process] = []
        waiting = [processes[root]] if root in processes else []
        while waiting:
            process = waiting.pop()
            members.append(process)
            waiting += children.get(process.pid, [])
        trees[root] = members
    return trees

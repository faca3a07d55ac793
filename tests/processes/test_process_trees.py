"""CPU and memory of process trees, on this test's own processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from skyctl.monitoring.process_trees import TREES_EVERY_S, ProcessTrees

# a parent that waits, and a child that works until its standard input ends
_PARENT = """
import subprocess, sys
script = "import sys; print(1, flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
sys.stdin.read()
child.communicate()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # the child runs
    yield process
    process.communicate()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_tree_is_its_root_and_everything_below(parent: subprocess.Popen[bytes]) -> None:
    usage = ProcessTrees().usage([parent.pid])[parent.pid]
    assert usage.processes == 2
    both = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()]
    assert usage.rss_bytes == pytest.approx(sum(p.memory_info().rss for p in both), rel=0.2)


def test_cpu_is_known_from_the_second_look_on_and_is_per_core(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    trees = ProcessTrees(clock=clock)
    assert trees.usage([parent.pid])[parent.pid].cpu_percent is None
    spent = trees._cpu
    trees._cpu = {key: seconds - 0.5 for key, seconds in spent.items()}  # half a second each
    clock.now += 2.0
    percent = trees.usage([parent.pid])[parent.pid].cpu_percent
    assert percent == pytest.approx(2 * 0.5 / 2.0 * 100, abs=10)


def test_the_whole_process_table_is_read_seldom(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, reads = Clock(), []
    every = psutil.process_iter

    def counted() -> Iterator[psutil.Process]:
        reads.append(clock.now)
        return every()

    monkeypatch.setattr(psutil, "process_iter", counted)
    trees = ProcessTrees(clock=clock)
    for _ in range(4):
        trees.usage([parent.pid])
        clock.now += TREES_EVERY_S / 4
    assert len(reads) == 1
    trees.usage([parent.pid])
    assert len(reads) == 2


def test_a_process_that_is_gone_is_left_out(parent: subprocess.Popen[bytes]) -> None:
    trees = ProcessTrees()
    trees.usage([parent.pid])
    parent.communicate()
    assert trees.usage([parent.pid]) == {}

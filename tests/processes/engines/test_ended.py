"""A process that ends is noticed; one that cannot be seen is not waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.inside import ended
from skyctl.wire.layouts import Program
from skyctl.wire.peer_group import Meeting

WAIT = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_the_end_of_any_of_several_processes_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "GRACE_S", 0.0)
    processes = [subprocess.Popen(WAIT, stdin=subprocess.PIPE) for _ in range(2)]
    acted = threading.Event()
    try:
        ended.when_ended([1 << 30, *(process.pid for process in processes)], acted.set)
        assert not acted.is_set()
        assert processes[1].stdin is not None
        processes[1].stdin.close()
        assert acted.wait(30)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_processes_of_another_container_are_not_watched() -> None:
    before = threading.active_count()
    ended.when_ended([1 << 30], lambda: pytest.fail("acted"))
    assert threading.active_count() == before


def worker_with(monkeypatch: pytest.MonkeyPatch, leave_group: Callable[[], object]) -> Any:
    """On a CPU, in groups that it leaves by this."""
    torch = pytest.importorskip("torch")
    from skyctl.engines.vllm.inside import peers
    from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension

    arrivals = SimpleNamespace(close=leave_group)
    monkeypatch.setattr(ended, "GRACE_S", 0.0)
    monkeypatch.setattr(peers, "Arrivals", lambda *_: arrivals)
    worker: Any = SkyctlWorkerExtension()
    worker.device = torch.device("cpu")
    worker.weight_transfer_engine = SimpleNamespace(load_whole=lambda tensors: None)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    worker.vllm_config = SimpleNamespace(parallel_config=parallel)
    return worker


def map_for(worker: Any, key: str, trainer: subprocess.Popen[bytes]) -> None:
    group = Meeting("group", "gloo", "127.0.0.1", 1, "00", 2, 1.0, 1.0).to_wire()
    program = Program("layout", (), ()).to_wire()
    worker.skyctl_layout_map([program], [[]], key, [trainer.pid], None, group, 1)


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "skyctl-ended"]


def test_a_worker_leaves_the_group_of_a_trainer_that_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even one that waits in a freeze for what the trainer sends."""
    left_group = threading.Event()
    worker = worker_with(monkeypatch, left_group.set)
    loader = worker._skyctl_loader()
    with subprocess.Popen(WAIT, stdin=subprocess.PIPE) as trainer:
        map_for(worker, "key", trainer)
        [thread] = watching()
        with loader.lock:  # as a load has it
            trainer.kill()
            assert left_group.wait(30)
            assert loader.key == "key"
        thread.join(30)
    assert loader.key == ""


def test_a_trainer_that_is_mapped_at_each_push_is_watched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = worker_with(monkeypatch, lambda: None)
    with subprocess.Popen(WAIT, stdin=subprocess.PIPE) as trainer:
        for key in ("first", "second", "third"):
            map_for(worker, key, trainer)
        threads = watching()
        trainer.kill()
        for thread in threads:
            thread.join(30)
    assert len(threads) == 1 and worker._skyctl_loader().key == ""

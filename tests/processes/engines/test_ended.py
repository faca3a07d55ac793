"""A process that ends is noticed; one that cannot be seen is not waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.inside import ended
from skyctl.wire.layouts import Program
from skyctl.wire.peer_group import Meeting


def test_the_end_of_any_of_several_processes_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "GRACE_S", 0.0)
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    processes = [subprocess.Popen(wait, stdin=subprocess.PIPE) for _ in range(2)]
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


def test_a_worker_leaves_the_group_of_a_trainer_that_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even one that waits in a freeze for what the trainer sends."""
    torch = pytest.importorskip("torch")
    from skyctl.engines.vllm.inside import peers
    from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension

    left_group = threading.Event()
    arrivals = SimpleNamespace(close=left_group.set)
    monkeypatch.setattr(ended, "GRACE_S", 0.0)
    monkeypatch.setattr(peers, "Arrivals", lambda *_: arrivals)
    worker: Any = SkyctlWorkerExtension()
    worker.device = torch.device("cpu")
    worker.weight_transfer_engine = SimpleNamespace(load_whole=lambda tensors: None)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    worker.vllm_config = SimpleNamespace(parallel_config=parallel)
    loader = worker._skyctl_loader()
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE) as trainer:
        group = Meeting("group", "gloo", "127.0.0.1", 1, "00", 2, 1.0, 1.0).to_wire()
        program = Program("layout", (), ()).to_wire()
        worker.skyctl_layout_map([program], [[]], "key", [trainer.pid], None, group, 1)
        [watching] = (t for t in threading.enumerate() if t.name == "skyctl-ended")
        with loader.lock:  # as a load has it
            trainer.kill()
            assert left_group.wait(30)
            assert loader.key == "key"
        watching.join(30)
    assert loader.key == ""

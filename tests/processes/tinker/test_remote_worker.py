"""A training worker on another machine: behind an ssh that runs its command here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("google.protobuf")
import torch

from skyctl.launch.base import Node
from skyctl.tinker import wire
from skyctl.tinker.connection import BEAT_S
from skyctl.tinker.training_process import Refused, Worker, WorkerDied, WorkerSettings
from tests.faults.ssh_fleet import write_ssh
from tests.pids import gone
from tests.processes.tinker import forked_ranks
from tests.processes.tinker.forked_ranks import fork_ranks
from tests.tiny import make_tiny_checkpoint
from tests.unit.tinker.passes import LORA, ROWS, request

TARGET = "me@127.0.0.2"


@pytest.fixture(autouse=True)
def ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Worker]]:
    """Makes workers, there or here."""
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", seed=1)
    environ = {"127.0.0.2": {"PYTHONPATH": str(Path(__file__).parents[3])}}
    ssh = write_ssh(tmp_path / "ssh", tmp_path / "hosts", environ=environ)
    python = tmp_path / "python"  # of the other machine
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -P -m {forked_ranks.__name__}\n")
    python.chmod(0o755)
    made: list[Worker] = []

    def worker_of(
        ranks: int = 1, *, grace_s: float = 60.0, there: bool = True, seen: str = ""
    ) -> Worker:
        settings = WorkerSettings(
            "org/tiny", str(checkpoint), ["cpu"] * ranks, "float32", threads=1
        )
        if there:
            node = Node(TARGET, "127.0.0.2", str(python), (str(ssh),), grace_s)
            settings = replace(settings, node=node, seen=seen)
        made.append(Worker(settings))
        return made[-1]

    yield worker_of
    for worker in made:
        await worker.stop()


async def answers_of(worker: Worker) -> list[Any]:
    """The answers of two steps."""
    await worker.ensure()
    await worker.call({"do": "create", "model": "m", "config": LORA})
    answers = []
    for _ in range(2):
        data = [(row[:-1], {"target_tokens": torch.tensor(row[1:])}) for row in ROWS]
        body = request("cross_entropy", data)
        header = {"do": "forward_backward", "model": "m", "units": [[len(body)]], "slice_s": 1e9}
        _, content = await worker.call(header, body)
        await worker.call({"do": "optim_step", "model": "m", "params": {"learning_rate": 0.01}})
        answers.append(wire.message("ForwardBackwardOutput").FromString(content))
    return answers


def pids(worker: Worker) -> list[int]:
    """Of its ranks."""
    return [rank["pid"] for rank in worker.report()["ranks"]]


def connection_of(worker: Worker) -> int:
    return worker._ranks[0].process.pid


@pytest.mark.parametrize("ranks", [1, 2])
async def test_it_computes_the_same_bits_as_here_and_ends_with_its_api(
    make: Callable[..., Worker], ranks: int
) -> None:
    there = make(ranks)
    assert await answers_of(there) == await answers_of(make(ranks, there=False))
    assert [rank["device"] for rank in there.report()["ranks"]] == [f"cpu of {TARGET}"] * ranks
    with pytest.raises(Refused, match="no operation 'nothing'"):
        await there.call({"do": "nothing"})
    before_pids = pids(there)
    await there.stop()
    assert all(gone(pid, within_s=20) for pid in before_pids)


@pytest.mark.parametrize("victim", ["connection", "rank"])
async def test_a_death_is_the_workers_and_the_next_one_repeats_all(
    make: Callable[..., Worker], victim: str
) -> None:
    worker = make(2)
    before, before_pids = await answers_of(worker), pids(worker)
    os.kill(connection_of(worker) if victim == "connection" else before_pids[1], signal.SIGKILL)
    assert all(gone(pid, within_s=20) for pid in before_pids)
    with pytest.raises(WorkerDied):
        await worker.call({"do": "close", "model": "m"}, life=worker.life)
    assert await answers_of(worker) == before and not {*pids(worker)} & {*before_pids}


async def test_it_ends_when_its_api_is_silent_for_the_grace(make: Callable[..., Worker]) -> None:
    worker = make(grace_s=2.0 * BEAT_S)
    await worker.ensure()
    before_pids, connection = pids(worker), connection_of(worker)
    os.kill(connection, signal.SIGSTOP)  # as a network that drops everything
    try:
        assert all(gone(pid, within_s=30) for pid in before_pids)
    finally:
        os.kill(connection, signal.SIGCONT)


async def test_a_storage_that_it_does_not_see_is_named(
    make: Callable[..., Worker], tmp_path: Path
) -> None:
    worker = make(seen=str(tmp_path / "storage" / "seen"))
    with pytest.raises(WorkerDied, match="put `tinker: storage` where both share it"):
        await worker.ensure()
    assert f"does not see {tmp_path / 'storage'}" in worker.report()["fault"]

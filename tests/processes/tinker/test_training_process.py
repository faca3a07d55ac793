"""What the API process knows of its training worker: a program that stands in for the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from skyctl.tinker import training_process
from skyctl.tinker.training_process import Worker, WorkerDied, WorkerSettings

STAND_IN = """
import socket, sys
from skyctl.tinker import worker_messages
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall(worker_messages.pack({}))
stream = connection.makefile("rb")
while message := worker_messages.read(stream):
    while message[0]["do"] == "work":
        pass
    connection.sendall(worker_messages.pack({}))
"""
spawn = asyncio.create_subprocess_exec


@pytest.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    def stand_in(*words: str, **options: Any) -> Any:
        return spawn(sys.executable, "-c", STAND_IN, words[3], **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", stand_in)
    monkeypatch.setattr(training_process, "HUNG_AFTER_S", 0.3)
    made = Worker(WorkerSettings("org/tiny", "none", ["cuda:7"], "float32"))
    yield made
    await made.stop()


def pids_of(worker: Worker) -> list[int]:
    return [rank["pid"] for rank in worker.report()["ranks"]]


async def fault(worker: Worker, looks: int) -> str:
    """What it reports at the last of so many looks, unless it reports one earlier."""
    for _ in range(looks):
        if said := str(worker.report()["fault"]):
            return said
        await asyncio.sleep(0.05)
    return ""


async def test_a_worker_that_starts_is_reported_with_what_it_does(worker: Worker) -> None:
    assert worker.report()["ranks"] == []
    await worker.start()
    idle = worker.report()
    [rank] = idle["ranks"]
    assert (rank["device"], idle["operation"], idle["operation_s"]) == ("cuda:7", None, None)
    os.kill(rank["pid"], 0)
    await worker.call({"do": "save"})
    assert worker.report() == idle
    work = asyncio.create_task(worker.call({"do": "work"}))
    assert await fault(worker, looks=12) == ""  # for longer than one that hangs gets
    busy = worker.report()
    assert busy["operation"] == "work" and busy["operation_s"] > 0.3
    os.kill(rank["pid"], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await work
    assert (worker.report()["ranks"], worker.report()["operation"]) == ([], None)


async def test_a_worker_without_progress_is_reported_until_it_goes_on(worker: Worker) -> None:
    await worker.start()
    [pid] = pids_of(worker)
    assert await fault(worker, looks=12) == ""  # it has nothing to do
    os.kill(pid, signal.SIGSTOP)
    save = asyncio.create_task(worker.call({"do": "save"}))
    await asyncio.sleep(0)
    said = await fault(worker, looks=200)
    assert said.startswith(f"the training worker (pid {pid}) has done nothing for ")
    assert said.endswith(" s of save")
    os.kill(pid, signal.SIGCONT)
    await save
    assert worker.report()["fault"] == ""
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGSTOP)
    save = asyncio.create_task(worker.call({"do": "save"}))
    await asyncio.sleep(0.05)
    assert (worker.report()["operation"], worker.report()["fault"]) == ("save", "")  # not yet
    os.kill(pid, signal.SIGCONT)
    await save


async def test_a_worker_that_does_not_start_is_reported_until_one_does(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        await worker.start()
    assert "the training worker did not start" in worker.report()["fault"]
    await worker.ensure()
    assert worker.report()["fault"] == ""

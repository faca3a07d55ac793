"""Ranks of training jobs for tests: each job is forked from this process, which has loaded torch.

    python -m tests.faults.live_ranks FLEET_FILE

Reads a job per line, and answers with a line: what became of each rank (`Job`, `Ended`).
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

Way = Literal["auto", "gloo", "apart"]
BOUND_S = 40.0
ROWS = 12


@dataclass(frozen=True)
class Job:
    """`versions` are pushed one after the other, each with values of its own. At the last, `rank`
    is killed at `point`, or stops there and is never seen again (`stops`). They send as the trainer
    chooses, by gloo, or each as if on a machine of its own (`apart`). Of real servers, `models` are
    checkpoints with the values of the versions in turn."""

    versions: tuple[str, ...]
    ranks: int = 3
    rank: int = -1
    point: str = ""
    stops: bool = False
    patience_s: float = 20.0
    way: Way = "auto"
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How one rank of a job ended: the versions that it was told are pushed, and its error."""

    rank: int
    pushed: tuple[str, ...]
    error: str = ""
    seconds: float = 0.0
    killed: bool = False


def values(version: str, models: Sequence[str] = ()) -> dict[str, Any]:
    """The tensors of a version; the same for everybody who makes them."""
    if models:
        from safetensors.torch import load_file

        return load_file(Path(model_of(version, models)) / "model.safetensors")
    import torch

    number = float(int.from_bytes(version.encode()[-4:], "little") % 997)
    return {"w": torch.full((ROWS, 4), number)}


def model_of(version: str, models: Sequence[str]) -> str:
    """The checkpoint of a version `step-N`."""
    return models[int(version.rpartition("-")[2]) % len(models)]


class Client:
    """The process that forks ranks, as tests use it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, job: Job) -> list[Ended]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return [
            Ended(**{**row, "pushed": tuple(row["pushed"])})
            for row in json.loads(self._process.stdout.readline())
        ]


@contextmanager
def forking_ranks(file: Path, env: dict[str, str]) -> Iterator[Client]:
    """It ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.live_ranks", str(file)],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield Client(process)
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(timeout=20)


# --- the process that forks -----------------------------------------------------------------------


def _rank(file: Path, job: Job, rank: int, address: Any, told: Connection) -> None:
    """One rank, from its start to its end."""
    import torch

    from skyctl import Fleet, kill_points
    from skyctl.api.trainer import open_trainer
    from skyctl.errors import SkyctlError
    from skyctl.live.options import TrainerOptions
    from skyctl.live.ranks import Hub, Link

    torch.set_num_threads(1)
    weights = values(job.versions[0], job.models)

    def own(name: str, shape: tuple[int, ...]) -> Iterator[Any]:
        rows = -(-shape[0] // job.ranks)
        part = weights[name][rank * rows : (rank + 1) * rows]
        yield (min(rank * rows, shape[0]), *(0 for _ in shape[1:])), part

    async def train() -> None:
        apart = job.way == "apart"
        machines = [f"machine {number}" if apart else "" for number in range(job.ranks)]
        if rank == 0:
            ranks: Any = Hub(machines)
            await ranks.listen("127.0.0.1")
            for _ in range(1, job.ranks):
                address.put(ranks.address)
        else:
            ranks = await Link.connect(await asyncio.to_thread(address.get), rank, machines)
        options = TrainerOptions(
            own, patience_s=job.patience_s, transport="gloo" if job.way == "gloo" else "auto"
        )
        live = await open_trainer(Fleet.load(file), ranks, options)
        for version in job.versions:
            weights.update(values(version, job.models))
            if rank == job.rank and version == job.versions[-1]:
                kill_points._point, kill_points._request = job.point, job.point
                kill_points._remaining = 1
                if job.stops:
                    kill_points.os = Stopping  # type: ignore[attr-defined]
            await live.push(version)
            pushed.append(version)
        await live.close()

    pushed: list[str] = []
    began, error = time.monotonic(), ""
    try:
        asyncio.run(train())
    except SkyctlError as failure:
        error = f"{failure.kind}: {failure.message}"
    except Exception as failure:
        error = repr(failure)
    told.send(asdict(Ended(rank, tuple(pushed), error, time.monotonic() - began)))


class Stopping:
    """What `kill_points` does with `os`, but for the signal."""

    getpid = staticmethod(os.getpid)

    @staticmethod
    def kill(pid: int, _: int) -> None:
        os.kill(pid, signal.SIGSTOP)


def _run(file: Path, job: Job) -> list[Ended]:
    """Fork the ranks of a job, and end those that are left after a while."""
    fork = multiprocessing.get_context("fork")
    address: Any = fork.SimpleQueue()
    pipes = [fork.Pipe(duplex=False) for _ in range(job.ranks)]
    processes = [
        fork.Process(target=_rank, args=(file, job, rank, address, pipes[rank][1]))
        for rank in range(job.ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + BOUND_S
    alive = dict(enumerate(processes))
    if job.stops:
        del alive[job.rank]
    while alive and (left_s := until - time.monotonic()) > 0:
        wait([process.sentinel for process in alive.values()], left_s)
        alive = {rank: process for rank, process in alive.items() if process.is_alive()}
    ended = []
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
        process.join()
        late = f"it had not ended after {BOUND_S:g} s" if rank in alive else ""
        killed = Ended(rank, (), late, killed=True)
        there = pipes[rank][0].poll()
        ended.append(Ended(**pipes[rank][0].recv()) if there else killed)
    return ended


def main() -> None:
    import torch  # noqa: F401

    import skyctl.api.trainer
    import skyctl.live.file
    import skyctl.service.supervised  # noqa: F401

    for line in sys.stdin:
        given = json.loads(line)
        job = Job(**{**given, **{name: tuple(given[name]) for name in ("versions", "models")}})
        answer = [asdict(row) for row in _run(Path(sys.argv[1]), job)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""Ranks of a training worker that are forked: by themselves each imports torch and transformers.

`python -m tests.processes.tinker.forked_ranks` is a `skyctl.tinker.remote_worker` whose ranks are.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest

from skyctl.tinker import remote_worker
from tests.forking import TRAINING_MODULES, TrainingCommand
from tests.processes.tinker.serving import fork_worker

RANK = """
import json, os, sys
from skyctl.tinker import passes, trainer, worker

settings = json.loads(sys.argv[2])
sys.argv[2] = json.dumps({**settings, "parent": os.getppid()})  # which has forked it

def fails(error):
    def fail(*arguments):
        raise error
    return fail

if settings["rank"] == 1:
    FAULT
sys.exit(worker.main())
"""


class RankProcess:
    """In place of asyncio's, of a rank that is forked from a process with its imports."""

    def __init__(self, process: TrainingCommand) -> None:
        self.pid, self.kill, self._process = process.pid, process.kill, process

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)


def fork_ranks(monkeypatch: pytest.MonkeyPatch, fault: str = "pass") -> None:
    """Workers of this process have forked ranks from here on; rank 1 runs `fault`, a line, before
    it begins."""
    spawn, program = asyncio.create_subprocess_exec, RANK.replace("FAULT", fault)

    async def start(*words: str, **options: Any) -> Any:
        python, *module = words[:3]
        if module != ["-m", "skyctl.tinker.worker"]:
            return await spawn(*words, **options)
        return RankProcess(TrainingCommand([python, "-c", program, *words[3:]], **options))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)


if __name__ == "__main__":
    for name in TRAINING_MODULES:  # before beats are due: they are not read meanwhile
        importlib.import_module(name)
    asyncio.create_subprocess_exec = fork_worker  # type: ignore[assignment]
    remote_worker.main()

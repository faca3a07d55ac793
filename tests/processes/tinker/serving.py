"""The API process as tests run it:
`python -m tests.processes.tinker.serving DIRECTORY PORT CHECKPOINT`.

Its worker is the real one. Its servers are not: they answer with fixed tokens, and what they were
asked is in a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import httpx

from skyctl.core.tinker import TinkerSettings
from skyctl.errors import ServerError
from skyctl.tinker import __main__ as tinker
from skyctl.tinker import housekeeping
from skyctl.tinker.open_models import Limits
from tests.forking import command

BASE, KEY = "org/tiny", "tml-" + "0" * 32


class FixedServers:
    """Answers 65, 66, 67 … to whatever it is asked; notes calls in `asked.jsonl`."""

    base, context = "served", 256

    def __init__(self, directory: Path) -> None:
        self._file = directory / "asked.jsonl"

    def _note(self, **what: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(what) + "\n")

    async def complete(
        self, body: Mapping[str, Any], weights: str | None, session: str
    ) -> dict[str, Any]:
        self._note(complete=dict(body), weights=weights, session=session)
        if body["prompt"] == [13]:
            raise ServerError("no", status=400)
        if body["prompt"] == [14]:
            await asyncio.sleep(600)
        tokens = list(range(65, 65 + body["max_tokens"]))
        top = [{f"token_id:{token}": -0.5} for token in tokens]
        logprobs = {"token_logprobs": [-0.5] * len(tokens), "top_logprobs": top}
        choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": "length"}
        return {"choices": [{**choice, "index": index} for index in range(body["n"])]}

    @asynccontextmanager
    async def using(self, name: str, directory: str) -> AsyncIterator[None]:
        self._note(load=name, directory=directory)
        yield

    async def unload(self, name: str) -> None:
        self._note(unload=name)

    @asynccontextmanager
    async def leaving(self, directory: str) -> AsyncIterator[None]:
        self._note(leave=directory)
        yield


class ServingProcess:
    """One API process over a directory that outlives it. Where it is often started, it is `forked`
    from a process that has its worker's imports, and forks its workers."""

    def __init__(
        self,
        directory: Path,
        checkpoint: Path,
        *,
        port: int = 0,
        forked: bool = False,
        ranks: int = 1,
        **limits: float,
    ) -> None:
        self.directory, self.checkpoint, self.limits = directory, checkpoint, limits
        self.forked = forked
        self.ranks = ranks
        directory.mkdir(exist_ok=True, mode=0o700)
        with socket.socket() as free:
            free.bind(("127.0.0.1", port))  # 0: one that is free now
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            start: Any = command if self.forked else subprocess.Popen
            self.process = start(
                [
                    sys.executable,
                    "-m",
                    "tests.processes.tinker.serving",
                    str(self.directory),
                    str(self.port),
                    str(self.checkpoint),
                    json.dumps(self.limits),
                    str(self.ranks),
                ],
                cwd=Path(__file__).parents[3],
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                assert self.get("healthz")["status"] == "ok"
                return
            except httpx.TransportError:
                assert self.process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", headers={"X-API-Key": KEY})
        answer.raise_for_status()
        return answer.json()

    def rank_pids(self) -> list[int]:
        """Those of the live worker, in the order of their ranks."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_rank(self, rank: int = 0) -> None:
        for pid in self.rank_pids()[rank : rank + 1]:
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)

    def asked(self) -> list[dict[str, Any]]:
        """What the servers were asked."""
        file = self.directory / "asked.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def sampled(self) -> dict[str, Any]:
        """The last of these that was a completion; others may come after it."""
        return [asked for asked in self.asked() if "complete" in asked][-1]


class ForkedWorker:
    """In place of the process of a worker: one forked from the API's own, with its imports."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ended = pid, asyncio.Event()
        self.returncode: int | None = None
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode


async def fork_worker(*words: str, pass_fds: list[int], **streams: int) -> ForkedWorker:
    """As `asyncio.create_subprocess_exec` starts it."""
    pid = os.fork()
    if not pid:
        _work(words[2:], pass_fds)
    return ForkedWorker(pid)


def _work(argv: Sequence[str], keeps: Sequence[int]) -> NoReturn:
    """Be a worker, in a process that was an API."""
    code = 1
    try:
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_DFL)
        for descriptor in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2 and descriptor not in keeps:
                with suppress(OSError):  # that of the list itself
                    os.close(descriptor)
        sys.argv = list(argv)
        from skyctl.tinker.worker import main as work

        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    directory, port, checkpoint, limits, ranks = sys.argv[1:]
    if "skyctl.tinker.worker" in sys.modules:
        asyncio.create_subprocess_exec = fork_worker  # type: ignore[assignment]
    settings = TinkerSettings(
        fleet="tiny",
        model=checkpoint,
        base_model=BASE,
        host="127.0.0.1",
        port=int(port),
        storage=directory,
        devices=["cpu"] * int(ranks),
        machine=None,
        shard_base=None,
        dtype="float32",
        threads=1,
        batch_tokens=4096,
        gradient_checkpointing=False,
        max_rank=64,
        full_parameters=True,
        join_requests=False,
        open_models=16,
        parked_memory=1 << 30,
        keep_runs_s=86400.0,
        keep_samplers=32,
        keep_samplers_s=7200.0,
        max_body=1_000_000,
        max_adapters=4,
        context=256,
        entry="",
        served_model_name="served",
        key_source=None,
    )
    given = json.loads(limits)
    haste = given.pop("haste", 1.0)  # how much sooner what is old goes
    housekeeping.INTERVAL_S /= haste
    tinker.Keep = partial(
        housekeeping.Keep,
        recent_s=housekeeping.RECENT_S / haste,
        finished_s=housekeeping.FINISHED_S / haste,
    )
    servers, found = FixedServers(Path(directory)), Limits(**given)
    asyncio.run(tinker.serve(settings, Path(directory), KEY, servers, found))


if __name__ == "__main__":
    main()

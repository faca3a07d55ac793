"""The training worker on another machine: `python -m skyctl.tinker.remote_worker`, started there by
the connection that carries its messages, as ssh starts an agent.

    API ── settings, requests, beats ──► remote_worker ── the same requests ──► its ranks
        ◄── hello, answers ─────────────              ◄── answers ─────────────

To the API it is one rank, which ends when any of those there does. It ends with its connection, or
when no beat came for the grace of the fleet's servers, and the ranks end with it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from skyctl import __version__
from skyctl.tinker import worker_messages
from skyctl.tinker.connection import CHUNK, GREET_S, GREETING
from skyctl.tinker.training_process import Refused, Worker, WorkerSettings


class _Relay:
    """The process on the other machine."""

    def __init__(self, reader: asyncio.StreamReader, channel: int) -> None:
        self._reader = reader
        self._channel = channel
        self._requests: asyncio.Queue[tuple[dict[str, Any], bytes]] = asyncio.Queue()

    async def run(self) -> int:
        """Until either side ends."""
        async with asyncio.timeout(GREET_S):
            start, _ = await worker_messages.read_async(self._reader)
        if problem := _unseen(start["seen"]):
            await self._send({"error": problem})
            return 1
        worker = Worker(WorkerSettings(**start["settings"]))
        tasks = [
            asyncio.create_task(work)
            for work in (self._listen(start["grace_s"]), self._serve(worker))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if error := task.exception():
                    sys.stderr.write(f"the trainer ends: {error!r}\n")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await worker.stop()
        return 0

    async def _listen(self, grace_s: float) -> None:
        """Raises EOFError once the connection ends, TimeoutError if no message comes for so long:
        a network that is gone ends no connection.
        """
        while True:
            async with asyncio.timeout(grace_s):
                header, body = await worker_messages.read_async(self._reader)
            if header["do"] != "beat":
                self._requests.put_nowait((header, body))

    async def _serve(self, worker: Worker) -> None:
        """Raises WorkerDied once a rank has ended, or does not start."""
        await worker.ensure()
        report: Sequence[Mapping[str, Any]] = worker.report()["ranks"]
        await self._send({**worker.hello, "ranks": report})
        while True:
            header, body = await self._requests.get()
            try:
                answer = await worker.call(header, body, life=1)
            except Refused as error:
                answer = {"error": str(error), "category": error.category}, b""
            await self._send(*answer)

    async def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        message = memoryview(worker_messages.pack(header, body))
        while message:
            message = message[await asyncio.to_thread(os.write, self._channel, message) :]


def _unseen(path: str) -> str:
    """What is wrong where a file of the API's is not here, or ""."""
    if not path or Path(path).exists():
        return ""
    return (
        f"{os.uname().nodename} does not see {Path(path).parent} as the API's machine does: "
        "put `tinker: storage` where both share it"
    )


async def _run(channel: int) -> NoReturn:
    reader = asyncio.StreamReader(limit=CHUNK)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb"))
    code = await _Relay(reader, channel).run()
    # not by returning: that waits for a thread which may write to a connection that is gone
    os._exit(code)


def main() -> None:
    channel = os.dup(1)
    os.dup2(2, 1)  # what ranks print goes to the log
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # numbered as nvidia-smi does, and the plan
    os.write(channel, f"\n{GREETING} {__version__}\n".encode())
    asyncio.run(_run(channel))


if __name__ == "__main__":
    main()

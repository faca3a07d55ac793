"""A sender without a process: its own code in a thread of this one, behind `SenderProcess`.

What it cannot show is a death of its own, which `tests/processes` is for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TextIO

from skyctl.launch.base import Node
from skyctl.transfer.sender import Channel, Sender
from skyctl.transfer.sender_client import SenderProcess


class _Channel(Channel):
    """Ends its sender where that of a process would end the process."""

    def __init__(self, stream: TextIO, sender: SenderInThread) -> None:
        super().__init__(stream)
        self._sender = sender

    def fail(self, error: BaseException) -> None:
        self.report(error)
        self._sender.end(1)


class SenderInThread:
    """What `SenderProcess` needs of an `asyncio.subprocess.Process`."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # servers find its slots there
        self.returncode: int | None = None
        self.stdin = self
        self.stdout = asyncio.StreamReader()
        self.stderr = asyncio.StreamReader()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ending = threading.Lock()
        self._commands: SimpleQueue[bytes] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    # what its parent writes to

    def write(self, data: bytes) -> None:
        self._commands.put(data)

    async def drain(self) -> None:
        if self.returncode is not None:
            raise BrokenPipeError

    def close(self) -> None:
        self._commands.put(b"")

    # what its parent awaits and ends

    def kill(self) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        self.end(-9)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """It says nothing more from here on; its memory goes in its own time."""
        with self._ending:
            if self.returncode is not None:
                return
            self.returncode = code
        self._in_loop(self._closed)
        self._commands.put(b"")

    def _closed(self) -> None:
        self.stdout.feed_eof()
        self.stderr.feed_eof()
        self._ended.set()

    # what the sender writes to

    @property
    def _stream(self) -> Any:
        told = self

        class Stream:
            def write(self, text: str) -> None:
                with told._ending:
                    if told.returncode is None:
                        told._in_loop(told.stdout.feed_data, text.encode())

            def flush(self) -> None: ...

        return Stream()

    def _in_loop(self, call: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # its parent's loop is closed: nobody hears it
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        channel = _Channel(self._stream, self)
        sender = Sender(channel)
        try:
            while (line := self._commands.get()) and self.returncode is None:
                sender.obey(json.loads(line))
        except BaseException as error:
            channel.fail(error)
        self.end(0)
        _free(sender)


def _free(sender: Sender) -> None:
    """What the kernel does for a process."""
    if sender._reader is not None and sender._reading is not None:
        sender._pace.lift()
        sender._reader.stop()
        sender._reading.join()
    if sender._files is not None:
        sender._files.close()
    if sender._carrier is not None:
        sender._carrier.close()


async def spawn_in_thread(
    python: str, nccl_settings: Mapping[str, str] | None = None, *, node: Node | None = None
) -> SenderProcess:
    """In place of `SenderProcess.spawn`."""
    ours = python in ("", sys.executable) and not nccl_settings and node is None
    assert ours, "only a process can be another one"
    return SenderProcess(SenderInThread())  # type: ignore[arg-type]

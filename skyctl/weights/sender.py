"""The sender process: `python -m skyctl.weights.sender`, driven by JSON lines.

    parent                              sender
    {"op": "open", …}  ───────────────► opens files, imports what the transport needs, allocates
                       ◄─────────────── {"event": "opened", "endpoint": …}
                       ◄─────────────── {"event": "filled", "chunk": 0, "slot": 0, "crc32": […]} …
    {"op": "join"}     ───────────────► forms the group        ─► {"event": "joined"}
    {"op": "send", "chunk": k, …} ────► moves the slot         ─► {"event": "sent", "chunk": k}
    {"op": "release", "chunk": k} ────► the slot is filled again
    end of input       ───────────────► the process ends

Anything that goes wrong is {"event": "error", "kind", "message", "traceback"}, and the end.
The process may be killed at any time: all it holds is memory. It never outlives its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from typing import Any, TextIO

from skyctl.errors import SkyctlError
from skyctl.weights.header import Shard
from skyctl.weights.reader import FilledSlot, Piece, ShardFiles
from skyctl.weights.transports.base import Carrier, Reader

_PR_SET_PDEATHSIG = 1
_MAX_THREADS = 8


class Channel:
    """Messages to the parent. Several threads write; a line is never torn."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def tell(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields})
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()

    def fail(self, error: BaseException) -> None:
        """Tell the parent of an error, with its traceback, and end the process."""
        message = error.message if isinstance(error, SkyctlError) else f"{error}" or repr(error)
        self.tell(
            "error",
            kind=type(error).__name__,
            message=message,
            traceback="".join(traceback.format_exception(error)),
        )
        # not sys.exit: another thread may sit in a collective that never returns
        os._exit(1)


class Sender:
    """One push's sender: the files it reads, the slots it fills, the carrier that moves them."""

    def __init__(self, channel: Channel, message: dict[str, Any]) -> None:
        self._channel = channel
        files = ShardFiles([Shard(**shard) for shard in message["shards"]])
        chunks = [[Piece(*piece) for piece in chunk] for chunk in message["chunks"]]
        module = import_module(f"skyctl.weights.transports.{message['transport']}")
        self._carrier: Carrier = module.open_carrier(message["session"], message["options"])
        self._reader: Reader = self._carrier.open_reader(
            files,
            chunks,
            slots=message["slots"],
            slot_bytes=message["slot_bytes"],
            threads=max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)))),
        )
        channel.tell("opened", endpoint=self._carrier.endpoint())
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def _read(self) -> None:
        def filled(slot: FilledSlot) -> None:
            self._channel.tell(
                "filled",
                chunk=slot.chunk,
                slot=slot.slot,
                crc32=slot.crc32,
                extra=self._carrier.extra(slot.slot),
            )

        try:
            self._reader.run(filled)
        except BaseException as error:
            self._channel.fail(error)

    def obey(self, message: dict[str, Any]) -> None:
        """Carry out one command after `open`."""
        operation = message["op"]
        if operation == "join":
            self._carrier.join()
            self._channel.tell("joined")
        elif operation == "send":
            self._carrier.send(message["slot"], message["size"])
            self._channel.tell("sent", chunk=message["chunk"])
        elif operation == "release":
            self._reader.release(message["chunk"])
        else:
            raise ValueError(f"unknown command {operation!r}")


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent is gone, and check that it is not gone already."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def claim_stdout() -> TextIO:
    """Stdout for messages only: what libraries print goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def main() -> None:
    """Obey the parent until its end of the pipe closes."""
    die_with_parent()
    channel = Channel(claim_stdout())
    sender: Sender | None = None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if sender is None:
                sender = Sender(channel, message)
            else:
                sender.obey(message)
    except BaseException as error:
        channel.fail(error)
    os._exit(0)


if __name__ == "__main__":
    main()

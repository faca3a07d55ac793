"""The sender process: `python -m skyctl.transfer.sender`, driven by JSON lines.

    parent                              sender
    {"op": "warm", …}  ───────────────► imports what the transport needs, ahead of the first push
                       ◄─────────────── {"event": "warmed"}
    {"op": "open", …}  ───────────────► opens files, allocates
                       ◄─────────────── {"event": "opened", "endpoint": …}
                       ◄─────────────── {"event": "filled", "chunk": 0, "slot": 0, "crc32": […]} …
    {"op": "relay", …} ───────────────► forms a group with the senders of other machines, of which
                       ◄─────────────── {"event": "relaying", "id": …}      rank 0 says the id
                       ◄─────────────── {"event": "relayed"}
    {"op": "lift_pace"} ──────────────► reads as fast as it can from here on
    {"op": "join"}     ───────────────► forms the group        ─► {"event": "joined"}
    {"op": "send", "chunk": k, …} ────► moves the slot         ─► {"event": "sent", "chunk": k}
    {"op": "release", "chunk": k} ────► the slot is refilled
    {"op": "free_slots"} ─────────────► stops reading, frees the slots  ─► {"event": "freed"}
    {"op": "open", …}                   the next push, with the same carrier or another
    end of input       ───────────────► the process ends

Any failure is reported as {"event": "error", "kind", "message", "hint", "traceback"}, and ends the
process; if a reader finds a fault in the checkpoint, filled slots stay until the end of input. The
process may be killed at any time: all it holds is memory. It never outlives its parent.
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

from skyctl.checkpoints.header import Shard
from skyctl.errors import PreflightError, SkyctlError
from skyctl.kill_points import reached
from skyctl.startup import speed_up_imports
from skyctl.transfer.carrier import Carrier, GpuCarrier, Reader, Reading
from skyctl.transfer.reader import Filled, Pace, Piece, ShardFiles
from skyctl.wire.layouts import Program

_PR_SET_PDEATHSIG = 1
_MAX_THREADS = 8
_SWITCH_S = 0.0005
"""How long a thread that scans a chunk may block the threads that read the next ones."""


class Channel:
    """Messages to the parent. Several threads write; a line is never torn."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields})
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()

    def report(self, error: BaseException) -> None:
        """Report an error to the parent, with its traceback."""
        message = error.message if isinstance(error, SkyctlError) else f"{error}" or repr(error)
        self.send(
            "error",
            kind=type(error).__name__,
            message=message,
            hint=error.hint if isinstance(error, SkyctlError) else "",
            traceback="".join(traceback.format_exception(error)),
        )

    def fail(self, error: BaseException) -> None:
        """Report an error to the parent and end the process."""
        self.report(error)
        # not sys.exit: another thread may be stuck in a collective that never returns
        os._exit(1)


class Sender:
    """The files a push reads, the slots it fills, and the carrier that moves them.

    A carrier may serve several pushes, one after the other, and chunks serve those that read the
    same bytes of other files; everything else is new for each.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._carrier: Carrier | None = None
        self._reader: Reader | None = None
        self._reading: threading.Thread | None = None
        self._files: ShardFiles | None = None
        self._chunks: list[list[Piece]] = []
        self._pace = Pace()
        self._exports = True
        self._programs: list[Program] = []

    def warm(self, message: dict[str, Any]) -> None:
        """Open the carrier for the pushes to come."""
        module = import_module(f"skyctl.transfer.transports.{message['transport']}")
        self._carrier = module.open_carrier(message["session"], message["carrier"])

    def open(self, message: dict[str, Any]) -> None:
        """Begin a push. If `message["carrier"]` is None, the existing carrier goes on; if
        `message["chunks"]` is None, the chunks are those of the last push.
        """
        reached("sender.open")
        shards = [Shard.from_json(shard) for shard in message["shards"]]
        self._files = ShardFiles(shards, elsewhere=message["elsewhere"])
        if message["chunks"] is not None:
            self._chunks = [[Piece(*piece) for piece in chunk] for chunk in message["chunks"]]
        if message["carrier"] is not None:
            self.warm(message)
        carrier = self._opened()
        self._pace, self._exports = Pace(message["bytes_per_s"]), message["exports"]
        self._reader = carrier.open_reader(
            Reading(
                self._files,
                self._chunks,
                slots=message["slots"],
                slot_bytes=message["slot_bytes"],
                threads=max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)))),
                pace=self._pace,
                ring_only=message["ring_only"],
                reserve_bytes=message["reserve_bytes"],
                shown=message["shown"],
                relay_rank=message["relay_rank"],
            )
        )
        self._programs = [Program.from_wire(program) for program in message["programs"]]
        if self._programs:
            self._gpus().number(self._programs)
        self._channel.send(
            "opened",
            endpoint=carrier.endpoint(),
            staged_whole=carrier.staged_whole,
            slots=self._gpus().export() if message["shown"] else None,
        )
        reached("sender.opened")
        self._reading = threading.Thread(target=self._read, name="reader", daemon=True)
        self._reading.start()

    def _opened(self) -> Carrier:
        if self._carrier is None:
            raise ValueError("the first command is open, with a carrier")
        return self._carrier

    def _gpus(self) -> GpuCarrier:
        carrier = self._opened()
        if not isinstance(carrier, GpuCarrier):
            raise ValueError("this command needs a carrier whose slots are on GPUs")
        return carrier

    def _read(self) -> None:
        carrier, reader = self._opened(), self._reader
        assert reader is not None

        def filled(slot: Filled) -> None:
            # a slot that is exported and never mapped would not be freed
            extra = carrier.extra(slot.slot) if self._exports else {}
            if self._programs:
                extra["numbers"] = self._gpus().numbers(slot.chunk, slot.slot)
            self._channel.send(
                "filled", chunk=slot.chunk, slot=slot.slot, crc32=slot.crc32, extra=extra
            )
            reached("sender.filled")

        try:
            reader.run(filled)
        except PreflightError as error:
            # the checkpoint's fault: servers may still be reading what was filled before
            self._channel.report(error)
        except BaseException as error:
            self._channel.fail(error)

    def obey(self, message: dict[str, Any]) -> None:
        """Carry out one command."""
        operation = message["op"]
        if operation == "warm":
            self.warm(message)
            self._channel.send("warmed")
        elif operation == "open":
            self.open(message)
        elif operation == "relay":
            self._relay(message)
        elif operation == "lift_pace":
            self._pace.lift()
        elif operation == "join":
            reached("sender.join")
            self._opened().join()
            self._channel.send("joined")
        elif operation == "send":
            self._opened().send(message["slot"], message["size"])
            self._channel.send("sent", chunk=message["chunk"])
        elif operation == "release" and self._reader is not None:
            reached("sender.release")
            self._reader.release(message["chunk"])
        elif operation == "free_slots":
            self._end_push()
            self._channel.send("freed")
        else:
            raise ValueError(f"unknown command {operation!r}")

    def _relay(self, message: dict[str, Any]) -> None:
        from skyctl.transfer.gpu.relay import new_group

        relay = self._gpus().relay()
        rank, world_size, unique_id = message["rank"], message["world_size"], message["id"]
        if not world_size:
            relay.stand()
        else:
            if rank == 0:
                unique_id = new_group()
                self._channel.send("relaying", id=unique_id)
            relay.form(rank, world_size, unique_id)
        self._channel.send("relayed")

    def _end_push(self) -> None:
        """A push ended, or was given up while it read: free what the next one allocates again."""
        if self._reader is not None and self._reading is not None:
            self._pace.lift()
            self._reader.stop()
            self._reading.join()
        self._opened().free_slots()
        if self._files is not None:
            self._files.close()
        self._files = self._reader = self._reading = None


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies, and check that it has not died already."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def claim_stdout() -> TextIO:
    """Reserve stdout for messages: what libraries print goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    stream.write("\n")  # ends a line that a login shell has left open
    os.dup2(2, 1)
    return stream


def main() -> None:
    """Obey the parent until its end of the pipe closes."""
    die_with_parent()
    speed_up_imports()
    sys.setswitchinterval(_SWITCH_S)
    channel = Channel(claim_stdout())
    sender = Sender(channel)
    try:
        for line in sys.stdin:
            sender.obey(json.loads(line))
    except BaseException as error:
        channel.fail(error)
    os._exit(0)


if __name__ == "__main__":
    main()

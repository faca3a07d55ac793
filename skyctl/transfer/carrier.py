"""The sender's half of a transport: what holds the slots and moves them, on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from skyctl.transfer.reader import ChunkReader, Filled, Pace, Piece, ShardFiles

if TYPE_CHECKING:
    from skyctl.wire.layouts import Program


class Reader(Protocol):
    """Fills slots from files, ahead of their use (`transfer/reader.py`)."""

    def run(self, on_filled: Callable[[Filled], None]) -> None:
        """Fill chunk after chunk. Blocks; belongs in a thread of its own."""

    def release(self, chunk: int) -> None:
        """Every server has loaded `chunk`: its slot may be filled again."""

    def stop(self) -> None:
        """Make `run` return once what is being read is in its slots."""


@dataclass(frozen=True)
class Reading:
    """What a push reads, and into what."""

    files: ShardFiles
    """The checkpoint's files."""
    chunks: Sequence[Sequence[Piece]]
    """The pieces of each chunk."""
    slots: int
    """The least number of slots; a carrier may take more, if `staged_whole` says so."""
    slot_bytes: int
    """The size of each."""
    threads: int
    """How many read at once."""
    pace: Pace
    """Bounds how fast files are read."""
    ring_only: bool = False
    """No more slots than `slots`."""
    reserve_bytes: int = 0
    """Of what is free on its GPUs, servers will take so much while they load."""
    shown: bool = False
    """Servers will copy out of the slots, on GPUs, by themselves (`GpuCarrier.export`)."""
    relay_rank: int | None = None
    """Rank 0 of the relay passes on what it reads; other ranks read nothing."""


class Carrier(Protocol):
    """The sender's half: owns the slots and moves them."""

    staged_whole: bool = False
    """True when every chunk has a slot of its own: all may be read before the first is sent."""

    def open_reader(self, reading: Reading) -> Reader:
        """Allocate the slots and return what fills them. Called once per push."""

    def extra(self, slot: int) -> dict[str, Any]:
        """What update_info needs to know of a slot that was just filled (memory handles)."""
        return {}

    def endpoint(self) -> dict[str, Any]:
        """What servers need to reach this process."""
        return {}

    def join(self) -> None:
        """Form the group with the servers, where there is one; returns when it is complete. Bounded
        by its deadline."""
        return

    def send(self, slot: int, size: int) -> None:
        """Send the first `size` bytes of a slot; returns when the slot may be refilled. Nothing is
        done where servers read by themselves."""
        return

    def free_slots(self) -> None:
        """Free the slots' memory between pushes: for the transports whose sender is kept."""
        return

    def close(self) -> None:
        """Free everything."""


class SenderGroup(Protocol):
    """The senders of several machines, of which one reads for all (`transfer/gpu/relay.py`)."""

    def stand(self) -> None:
        """The group of the last push has the same members."""

    def form(self, rank: int, world_size: int, unique_id: str) -> None:
        """Join the group with this id; returns when all have joined."""


class GpuCarrier(Carrier):
    """Slots in the memory of GPUs, in a process that is kept from push to push."""

    def export(self) -> dict[str, Any] | None:
        """What servers need to map the slots; None if slots are not on all of their GPUs."""
        raise NotImplementedError

    def number(self, programs: Sequence[Program]) -> None:
        """From here on, `numbers` returns what workers with these programs must hold."""
        raise NotImplementedError

    def numbers(self, chunk: int, slot: int) -> list[dict[str, int]]:
        """Numbers of the parameters that this chunk, in `slot`, completes; per program."""
        raise NotImplementedError

    def relay(self) -> SenderGroup:
        """The group of this sender and those of other machines."""
        raise NotImplementedError


class CpuCarrier(Carrier):
    """Slots in this process's memory, filled from the files."""

    def allocate(self, slots: int, slot_bytes: int) -> list[memoryview]:
        """Writable memory of every slot."""
        raise NotImplementedError

    def open_reader(self, reading: Reading) -> ChunkReader:
        memory = self.allocate(reading.slots, reading.slot_bytes)
        return ChunkReader(
            reading.files, reading.chunks, memory, threads=reading.threads, pace=reading.pace
        )

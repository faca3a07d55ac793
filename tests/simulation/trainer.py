"""A trainer whose ranks are processes: they meet, and push what each has in its memory by a file.

Rounds, plans, files and pushes are the product's. What carries bytes between ranks is played, and
tensors are bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from skyctl.api.trainer import Trainer, open_trainer
from skyctl.checkpoints.live import TensorFile
from skyctl.errors import SkyctlError
from skyctl.live.blocks import Block
from skyctl.live.options import TrainerOptions
from skyctl.live.ranks import Hub, Link, RankFailed, Ranks
from skyctl.service import connect
from skyctl.states import PauseMode
from tests.simulation import checks
from tests.simulation.disk import SHAPE, TENSORS, bytes_of
from tests.simulation.kernel import Process, current
from tests.simulation.workers import ITEM, WORD, number_of

if TYPE_CHECKING:
    from tests.simulation.world import World

LABEL = "push of rank"
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Step:
    """One push of a job, the same on every rank."""

    after_s: float
    number: int
    label: str
    mode: PauseMode
    odd: int = -1
    """A rank that gives it another label."""
    keep: bool = False
    """The fleet makes a copy of its own."""


@dataclass(frozen=True)
class Values:
    """A part of a tensor, in the memory of a rank."""

    data: bytes
    is_cuda: bool


class Share:
    """What a rank has: its elements of each tensor, of the version `number`."""

    def __init__(self, rank: int, ranks: int, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        [length] = SHAPE
        share = -(-length // ranks)
        self.begin = min(rank * share, length)
        self.size = min(share, length - self.begin)
        self.number = 0

    def pairs(self) -> list[tuple[Block, Values]]:
        return [
            (
                Block(name, "float32", tuple(SHAPE), (self.begin,), (self.size,)),
                Values(self.part(place), self.on_gpu),
            )
            for place, name in enumerate(TENSORS)
            if self.size
        ]

    def part(self, place: int) -> bytes:
        """Its elements of the tensor with this number, as they are now."""
        begin, end = self.begin * ITEM, (self.begin + self.size) * ITEM
        return bytes_of(self.number, place)[begin:end]


# --- between ranks --------------------------------------------------------------------------------


class _Wire:
    """One way between two ranks: bytes arrive in order, and after a death the end of them."""

    def __init__(self, world: World, to: Process) -> None:
        self.reader = asyncio.StreamReader(loop=world.loop)
        self.ended = False
        self._world, self._to, self._arrived = world, to, 0.0

    def carry(self, data: bytes) -> None:
        if not self.ended:
            self._deliver(self.reader.feed_data, data)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._deliver(self.reader.feed_eof)

    def _deliver(self, call: Any, *arguments: Any) -> None:
        loop, dice = self._world.loop, self._world.dice
        takes_s = dice.random() * (2.0 if dice.random() < 0.05 else 0.004)
        self._arrived = max(self._arrived, loop.now + takes_s)
        loop.call_at(self._arrived, call, *arguments, context=self._to.context)


class _Writer:
    """An `asyncio.StreamWriter` with its socket, as far as ranks use them."""

    family = socket.AF_UNIX

    def __init__(self, wire: _Wire, peer: Process) -> None:
        self.write, self.close, self._wire, self._peer = wire.carry, wire.end, wire, peer

    def get_extra_info(self, _: str) -> _Writer:
        return self

    def getsockopt(self, *_: int) -> bytes:
        return struct.pack("3i", self._peer.pid, os.getuid(), os.getgid())

    def fileno(self) -> int:
        raise OSError("not a file of this machine")

    def is_closing(self) -> bool:
        return self._wire.ended


class Meeting:
    """Where the ranks of a job meet."""

    def __init__(self, world: World, ranks: int) -> None:
        self._world = world
        self._machines = [""] * ranks
        self._hub: Hub | None = None
        self._first: Process | None = None

    async def join(self, rank: int) -> Ranks:
        process = current()
        assert process is not None
        if rank == 0:
            self._hub, self._first = Hub(self._machines), process
            self._hub._servers.append(SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
            return self._hub
        until = self._world.loop.now + PATIENCE_S
        while self._hub is None or self._first is None:
            if self._world.loop.now > until:
                raise RankFailed("rank 0 has not come to where the ranks meet")
            await asyncio.sleep(0.02)
        if self._first.dead:
            raise RankFailed(f"rank {rank} does not reach rank 0: it has ended")
        there, back = _Wire(self._world, self._first), _Wire(self._world, process)
        process.on_death.append(there.end)
        self._first.on_death.append(back.end)
        writer: Any = _Writer(there, self._first)
        link = Link(rank, self._machines, back.reader, writer)
        answers: Any = _Writer(back, process)
        serving = self._hub._serve(there.reader, answers)
        self._world.loop.create_task(serving, context=self._first.context)
        link._channel.send({"rank": rank})
        return link


# --- the job --------------------------------------------------------------------------------------


class _Holder:
    """A `Fleet`, as a trainer uses it; it keeps the job of the last push."""

    def __init__(self, world: World) -> None:
        self._world, self._ref = world, world.ref
        self._stack = AsyncExitStack()
        self.job = ""
        self.service: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _current(self) -> Self:
        return self

    async def connected(self) -> Any:
        service: Any = await self._stack.enter_async_context(connect(self._ref))
        service.start_push = self._counted(service.start_push)
        service.push_live = self._counted(service.push_live)
        self.service = service
        return service

    def _counted(self, begin: Callable[[Any], Awaitable[str]]) -> Callable[[Any], Awaitable[str]]:
        async def start(request: Any) -> str:
            self.job = await begin(request)
            self._world.pushes += 1
            return self.job

        return start


def begin(world: World, ranks: int, steps: Sequence[Step], *, goes_on: bool) -> list[Process]:
    """Start the ranks of a job. `goes_on`: after a push that failed comes the next."""
    meeting = Meeting(world, ranks)
    return [
        world._command(f"{LABEL} {rank}", partial(_rank, world, meeting, rank, steps, goes_on))
        for rank in range(ranks)
    ]


async def _rank(
    world: World, meeting: Meeting, rank: int, steps: Sequence[Step], goes_on: bool
) -> None:
    holder: Any = _Holder(world)
    ranks = await meeting.join(rank)
    share = Share(rank, ranks.world_size, on_gpu=world.on_gpu)
    share.number = steps[0].number
    process = current()
    assert process is not None
    world.exports.of[process.pid] = share.part
    options = TrainerOptions(share, patience_s=PATIENCE_S)
    live = await open_trainer(holder, ranks, options)
    for step in steps:
        await asyncio.sleep(step.after_s + world.dice.random() * 0.2)
        share.number, holder.job = step.number, ""
        label = f"{step.label}-odd" if step.odd == rank else step.label
        try:
            await live.push(label, pause_mode=step.mode, keep=step.keep)
        except SkyctlError as error:
            world.tell(f"rank {rank}: {type(error).__name__}: {error.message}")
            await _check(world, holder, live, step)
            if not goes_on:
                raise
        else:
            world.live += rank == 0
            await _check(world, holder, live, step)
    await live.close()


async def _check(world: World, holder: _Holder, live: Trainer, step: Step) -> None:
    """On rank 0: what must hold after its push."""
    if live.rank or not holder.job:
        return
    with suppress(SkyctlError):
        job = await holder.service.wait_job(holder.job)
        if job.state == "succeeded":
            world.succeeded += 1
            urls = {target.name: target.url for target in world._targets(holder.service)}
            # of a rank's GPU there are no files that could come to the same again
            on_record = world._on_record(holder.service) and not world.on_gpu
            checks.push_succeeded(world, job, step.number, urls, on_record=on_record)
        checks.push_ended(world, job, world._pusher())


# --- what is played -------------------------------------------------------------------------------


class _Window:
    """`live.file.Window`, for values that are bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, sent: Sequence[tuple[Block, int, Values]], *, scan: bool) -> str:
        with self._path.open("r+b") as file:
            for block, offset, values in sent:
                file.seek(offset + block.start[0] * ITEM)
                file.write(values.data)
        _here().checkpoints.touched(self._path)
        return ""


_finish, _invalidate = TensorFile.finish, TensorFile.invalidate


class RankMemory:
    """`live.memory.RankMemory`, of a rank on a GPU. An export is its process and a tensor's
    number."""

    def __init__(self, transport: str) -> None:
        self.key = ""
        self._transport = transport
        self._described: dict[str, Any] | None = None
        self._read: Callable[[int], bytes] = lambda place: b""
        self._sums: Sequence[Mapping[str, Any]] = ()

    def describe(self, pairs: Sequence[tuple[Block, Values]]) -> dict[str, Any]:
        process = current()
        assert process is not None
        self._read = _here().exports.of[process.pid]
        described = {
            "exports": [[process.pid, place] for place in range(len(pairs))],
            "places": [[place, 0] for place in range(len(pairs))],
            "pid": process.pid,
            "transport": self._transport,
        }
        if described == self._described:
            return {"same": True, "key": self.key, "group": ""}
        self._described, self.key = described, ""
        return {**described, "key": "", "group": ""}

    def forget(self) -> None:
        self._described, self.key = None, ""

    def leave_group(self) -> None:
        """By IPC there is none."""

    def prepare(self, key: str, sums: Sequence[Mapping[str, Any]]) -> None:
        self.key, self._sums = key, sums

    def sum(self) -> dict[str, Any]:
        partials = {}
        for layout in self._sums:
            partial = partials[layout["layout"]] = dict[str, int]()
            for export, parameter, _, row, source, _, target, _ in layout["rows"]:
                part = self._read(export)[source : source + row]
                before = partial.get(str(parameter), 0)
                partial[str(parameter)] = before + number_of(part, target // ITEM)
        return {"partials": partials, "not_finite": ""}


class Partial:
    """`live.sums.Partial`, which is as it travels."""

    from_wire = dict


def added(parameters: Sequence[Any], partials: Sequence[dict[str, int]]) -> dict[str, int]:
    """`live.sums.added`."""
    return {
        name: sum(partial.get(str(number), 0) for partial in partials) % WORD
        for number, (name, _, _) in enumerate(parameters)
    }


MODULES = {
    "skyctl.live.memory": SimpleNamespace(RankMemory=RankMemory),
    "skyctl.live.sums": SimpleNamespace(Partial=Partial, added=added),
}
"""Instead of those that need torch."""


def _finished(file: TensorFile) -> None:
    _finish(file)
    _here().checkpoints.touched(file.path)


def _invalidated(file: TensorFile) -> None:
    _invalidate(file)
    _here().checkpoints.touched(file.path)


def _here() -> World:
    from tests.simulation import seams

    return seams.here()


class _Secrets:
    """Names of directories and of weights, the same in each run of a schedule."""

    def token_hex(self, nbytes: int) -> str:
        checkpoints = _here().checkpoints
        checkpoints.staged += 1
        return f"{checkpoints.staged:0{2 * nbytes}x}"


SEAMS: dict[str, Any] = {
    "skyctl.api.trainer.read_pairs": lambda weights, *_, **__: weights.pairs(),
    "skyctl.api.trainer.addresses": lambda weights: None,
    "skyctl.api.trainer.Window": _Window,
    "skyctl.checkpoints.live.TensorFile.finish": _finished,
    "skyctl.checkpoints.live.TensorFile.invalidate": _invalidated,
    "skyctl.checkpoints.staging._fits_in_memory": lambda *_: True,
    "skyctl.checkpoints.staging.secrets": _Secrets(),
    "skyctl.push.source.secrets": _Secrets(),
    "skyctl.push.sibling_way.secrets": _Secrets(),
    "skyctl.core.saving.secrets": _Secrets(),
    "skyctl.checkpoints.keeping.secrets": _Secrets(),
}

"""How a trainer begins: its ranks meet, and it is awaited, entered or made blocking."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from skyctl.api.trainer import Trainer, open_trainer
from skyctl.errors import UsageError
from skyctl.live.meeting import Address, Place
from skyctl.live.options import TrainerOptions
from skyctl.live.outline import Outline
from skyctl.live.ranks import Hub, Link, RankFailed, Ranks
from skyctl.push.request import PushResult

if TYPE_CHECKING:
    from skyctl.api.session import SessionHolder


class TrainerOpening:
    """What `Fleet.trainer` returns: `await` it, enter it with `async with`, or take its blocking
    form for a program without an event loop.
    """

    def __init__(self, holder: SessionHolder, options: TrainerOptions) -> None:
        self._holder = holder
        self._options = options
        self._trainer: Trainer | None = None

    def __await__(self) -> Generator[Any, None, Trainer]:
        return self._open().__await__()

    async def __aenter__(self) -> Trainer:
        self._trainer = await self._open()
        return self._trainer

    async def __aexit__(self, *_: object) -> None:
        assert self._trainer is not None
        await self._trainer.close()

    def blocking(self) -> BlockingTrainer:
        """The same trainer, whose methods return when they are done."""
        return BlockingTrainer(self._open())

    async def _open(self) -> Trainer:
        return await open_trainer(self._holder, await _meet(self._options.group), self._options)


class BlockingTrainer:
    """A `Trainer` for programs without an event loop, with one of its own."""

    def __init__(self, opening: Coroutine[Any, Any, Trainer]) -> None:
        self._runner = asyncio.Runner()
        try:
            self._trainer = self._runner.run(opening)
        except BaseException:
            self._runner.close()
            raise

    @property
    def rank(self) -> int:
        return self._trainer.rank

    @property
    def world_size(self) -> int:
        return self._trainer.world_size

    def plan(self) -> Outline:
        """As `Trainer.plan`."""
        return self._trainer.plan()

    def push(self, version: str, **options: Any) -> PushResult:
        """As `Trainer.push`."""
        return self._runner.run(self._trainer.push(version, **options))

    def close(self) -> None:
        """As `Trainer.close`."""
        self._runner.run(self._trainer.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _meet(group: Any) -> Ranks:
    """All ranks of this process's job, or this process alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Hub()
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError("this process is not in the group of the trainer's ranks")
    collective = partial(_collective, dist, group)
    places = await collective(Place.own())
    hub, address, failure = Hub([place.machine for place in places]), Address(""), ""
    if rank == 0:
        far = (place.address for place in places if place.machine != places[0].machine)
        try:
            await hub.listen(next(filter(None, far), "127.0.0.1"))
        except Exception as error:  # for every rank: they wait for it
            failure = f"rank 0 cannot listen for ranks of other machines: {error}"
        address = hub.address
    ranks: Ranks = hub
    address, failure = (await collective((address, failure)))[0]
    if rank and not failure:
        try:
            ranks = await Link.connect(address, rank, hub.machines)
        except RankFailed as error:
            failure = error.message
    if failed := next(filter(None, await collective(failure)), ""):
        await ranks.close()
        raise RankFailed(failed, hint="each rank must reach the address of rank 0's machine")
    return ranks


async def _collective(dist: Any, group: Any, given: Any) -> list[Any]:
    """What each rank gives, on every rank. Rank 0 lets others in meanwhile."""
    import torch

    gathered = [None] * dist.get_world_size(group)
    # NCCL goes by the device that is current in a thread
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def gather() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        dist.all_gather_object(gathered, given, group=group)

    await asyncio.to_thread(gather)
    return list(gathered)

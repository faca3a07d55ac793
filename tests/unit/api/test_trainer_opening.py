"""How ranks of a job meet by its collectives: here in one process, each rank in a task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from skyctl.api import trainer_opening
from skyctl.live.meeting import Place
from skyctl.live.ranks import Body, Link, RankFailed, Ranks, Step

dist = pytest.importorskip("torch.distributed")

COUNT = 3
rank_of_task: ContextVar[int] = ContextVar("rank_of_task")


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collectives of `COUNT` ranks, of which the last is on another machine."""
    barrier, given = threading.Barrier(COUNT, timeout=20), [None] * COUNT

    def gather(gathered: list[Any], own: Any, group: Any) -> None:
        given[rank_of_task.get()] = own
        barrier.wait()
        gathered[:] = given
        barrier.wait()

    def own() -> Place:
        return Place("there" if rank_of_task.get() == COUNT - 1 else "here", "127.0.0.1")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda _: rank_of_task.get())
    monkeypatch.setattr(dist, "get_world_size", lambda _: COUNT)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(Place, "own", own)
    yield
    barrier.abort()


async def meet(rank: int) -> Ranks:
    rank_of_task.set(rank)
    return await trainer_opening._meet(None)


async def added(bodies: list[Body]) -> list[Body]:
    return [{"total": sum(body["value"] for body in bodies)}] * COUNT


async def test_ranks_of_two_machines_meet() -> None:
    ranks = await asyncio.gather(*map(meet, range(COUNT)))
    step = Step(1, "gather", "push 1", 20)
    answers = await asyncio.gather(*(r.exchange(step, {"value": r.rank}, added) for r in ranks))
    assert answers == [{"total": 3}] * COUNT
    for rank in reversed(ranks):
        await rank.close()


@pytest.mark.parametrize("unreached", ["rank 2 does not reach", "rank 0 cannot listen"])
async def test_what_keeps_one_rank_out_every_rank_learns(
    monkeypatch: pytest.MonkeyPatch, unreached: str
) -> None:
    async def refused(*_: object, **__: object) -> Any:
        raise ConnectionRefusedError("refused")

    if "listen" in unreached:
        monkeypatch.setattr("skyctl.live.ranks.listen_everywhere", refused)
    else:
        connect = Link.connect

        async def connect_but_last(address: Any, rank: int, machines: Any) -> Link:
            if rank == COUNT - 1:
                raise RankFailed("rank 2 does not reach rank 0")
            return await connect(address, rank, machines)

        monkeypatch.setattr(Link, "connect", connect_but_last)
    errors = await asyncio.gather(*map(meet, range(COUNT)), return_exceptions=True)
    assert all(isinstance(error, RankFailed) for error in errors), errors
    assert all(str(error).startswith(unreached) for error in errors), errors

"""Ranks that send to servers' workers point to point, over gloo: no file, no gathering."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl.errors import DeadlineExceeded, PreflightError
from skyctl.live.ranks import RankFailed
from skyctl.push.live_way import LiveDelivery
from skyctl.wire import batches
from tests.stub.app import StubServer
from tests.unit.api.fleets import attached, everywhere, state_dict, stubs, trainers
from tests.unit.push.checkpoints import write_checkpoint

torch = pytest.importorskip("torch")

COUNT = 2


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps, with long runs in them, for small tensors."""
    monkeypatch.setattr(batches, "_LONG_BYTES", 256)
    monkeypatch.setattr(batches.batches, "__defaults__", (1024,))


def halves(seed: int) -> list[dict[str, Any]]:
    """Two ranks' rows of each tensor, in memory of their own."""
    return [{n: t.chunk(2)[rank].clone() for n, t in state_dict(seed).items()} for rank in (0, 1)]


def slices(parts: list[dict[str, Any]], rank: int) -> Any:
    def of_rank(name: str, shape: tuple[int, ...]) -> Iterator[Any]:
        begin = 0 if rank == 0 else len(parts[0][name])
        yield (begin, *[0] * (len(shape) - 1)), parts[rank][name]

    return of_rank


@asynccontextmanager
async def opened(
    tmp_path: Path, parts: list[dict[str, Any]], servers: list[StubServer], **options: Any
) -> AsyncIterator[list[Any]]:
    weights = [slices(parts, rank) for rank in (0, 1)]
    async with (
        attached(tmp_path, servers) as fleet,
        fleet,
        trainers(fleet, weights, **({"transport": "gloo"} | options)) as live,
    ):
        yield live


async def push(live: list[Any], step: int) -> list[Any]:
    return list(await asyncio.gather(*(trainer.push(f"step-{step}") for trainer in live)))


def holds(server: StubServer, parts: list[dict[str, Any]]) -> bool:
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: data for name, (_, data) in server.engine.contents.items()} == {
        name: tensor.numpy().tobytes() for name, tensor in whole.items()
    }


async def test_servers_hold_what_the_ranks_have_through_one_group(tmp_path: Path) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    async with opened(tmp_path, parts, servers) as live:
        plan = live[0].plan()
        assert (plan.way, plan.transport, plan.memory_bytes) == ("live", "gloo", 0)
        assert "point to point" in plan.reason
        first = (await push(live, 1))[1]
        assert first.transport == "live" and first.compared["bytes"] > 0, first
        assert any("point to point, by gloo" in note for note in first.notes)
        assert all(holds(server, parts) for server in servers)
        group = live[0]._side.group.wire
        parts[1]["model.norm.weight"] += 1
        await push(live, 2)
        assert live[0]._side.group.wire == group
        assert all(holds(server, parts) for server in servers)
        assert all(server.engine.served[-1] == server.engine.digest for server in servers)


async def test_a_group_forms_again_after_a_worker_has_left_it(tmp_path: Path) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    async with opened(tmp_path, parts, servers) as live:
        await push(live, 1)
        group = live[0]._side.group.wire["name"]
        servers[1].peers.close()
        parts[0]["lm_head.weight"] += 1
        await push(live, 2)
        assert live[0]._side.group.wire["name"] != group
        assert all(holds(server, parts) for server in servers)


async def test_what_is_damaged_on_its_way_is_refused_before_the_freeze(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    before = [server.engine.digest for server in servers]
    async with opened(tmp_path, parts, servers) as live:
        unpack = batches.Batch.unpack

        def damaged(self: Any, arrived: Any, targets: Any) -> None:
            arrived[0][0] ^= 1
            unpack(self, arrived, targets)

        with monkeypatch.context() as patch:
            patch.setattr(batches.Batch, "unpack", damaged)
            errors = await everywhere([trainer.push("step-1") for trainer in live])
        assert all("was damaged on its way" in error.message for error in errors)
        assert [server.engine.digest for server in servers] == before
        assert not any("pause" in entry for server in servers for entry in server.engine.log)
        await push(live, 2)
        assert all(holds(server, parts) for server in servers)


async def test_a_rank_that_leaves_ends_the_push_for_all_and_the_next_forms_a_group(
    tmp_path: Path,
) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    async with opened(tmp_path, parts, servers) as live:
        parts[1]["lm_head.weight"][3, 2] = torch.nan  # found once the ranks begin to send
        errors = await everywhere([trainer.push("step-1") for trainer in live])
        assert {error.message.partition(":")[0] for error in errors} == {"rank 1"}
        parts[1]["lm_head.weight"][3, 2] = 0
        await push(live, 2)
        assert all(holds(server, parts) for server in servers)
        await live[1].close()
        with pytest.raises(RankFailed, match="rank 1"):
            await live[0].push("step-3")


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_cancelled_waits_while_servers_take_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    update = LiveDelivery.update
    waited: list[bool] = []

    async def cancelling_update(*given: Any) -> None:
        pushing[rank].cancel()
        await update(*given)
        waited.append(not pushing[rank].done())

    async with opened(tmp_path, parts, servers) as live:
        with monkeypatch.context() as patch:
            patch.setattr(LiveDelivery, "update", cancelling_update)
            pushing = [asyncio.ensure_future(trainer.push("step-1")) for trainer in live]
            ended = await asyncio.gather(*pushing, return_exceptions=True)
        assert waited == [True] and isinstance(ended[rank], asyncio.CancelledError), ended
        assert all(holds(server, parts) for server in servers)
        if rank == 0:
            assert "the fleet has step-1" in ended[1].message
        parts[1]["model.norm.weight"] += 1
        await push(live, 2)
        assert all(holds(server, parts) for server in servers)


async def test_a_push_that_is_late_has_ended_when_every_rank_learns_of_it(tmp_path: Path) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    async with opened(tmp_path, parts, servers) as live:
        errors = await everywhere([trainer.push("step-1", timeout_s=0) for trainer in live])
        for error in errors:
            assert isinstance(error, DeadlineExceeded)
            assert re.match("push-1 has not ended after 0 s; it was cancelled: .", error.message)
        assert (await live[0]._side._fleet.job("push-1")).ended
        await push(live, 2)
        assert all(holds(server, parts) for server in servers)


async def test_gloo_that_was_asked_for_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    servers[0].engine.extension = False
    with pytest.raises(PreflightError, match=r"transport gloo: .* do not know layouts"):
        async with opened(tmp_path, parts, servers):
            pass


APART = ("here", "there")


async def test_ranks_of_several_machines_send_and_write_no_file(tmp_path: Path) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    async with opened(tmp_path, parts, servers, machines=APART, transport="auto") as live:
        plan = live[0].plan()
        assert (plan.way, plan.transport) == ("live", "gloo")
        assert "several machines" in plan.reason
        await push(live, 1)
        assert all(holds(server, parts) for server in servers)
        for options in ({"transport": "shm"}, {"keep": True}):
            errors = await everywhere([trainer.push("step-2", **options) for trainer in live])
            assert all("do not write a file together" in error.message for error in errors)
        parts[0]["lm_head.weight"] += 1
        await push(live, 3)
        assert all(holds(server, parts) for server in servers)


async def test_ranks_of_several_machines_are_not_copied_from(tmp_path: Path) -> None:
    servers, parts = stubs(write_checkpoint(tmp_path / "base"), COUNT), halves(50)
    with pytest.raises(PreflightError, match="ipc: the ranks are on several machines"):
        async with opened(tmp_path, parts, servers, machines=APART, transport="ipc"):
            pass

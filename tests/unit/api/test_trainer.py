"""Ranks of a trainer over stub servers: what arrives, what is refused, and what stays behind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl import Fleet
from skyctl.api.live import FleetSide
from skyctl.api.trainer import Trainer, open_trainer
from skyctl.errors import ConflictError, PreflightError, PushError, UsageError
from skyctl.live.options import TrainerOptions
from skyctl.live.ranks import Hub, RankFailed
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.unit.api.fleets import attached, everywhere, in_memory, met, state_dict, stubs, trainers
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

torch = pytest.importorskip("torch")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base")


def rows_of(weights: dict[str, Any], rank: int, count: int) -> Callable[..., Iterator[Any]]:
    """What a rank has if all tensors are cut along their first dimension."""

    def slices(name: str, shape: tuple[int, ...]) -> Iterator[Any]:
        chunks = weights[name].chunk(count)
        if rank < len(chunks):
            start = sum(len(chunk) for chunk in chunks[:rank])
            yield (start, *[0] * (len(shape) - 1)), chunks[rank]

    return slices


def untouched(servers: list[StubServer]) -> bool:
    return not any("pause keep" in server.engine.log for server in servers)


@pytest.mark.parametrize("count", [1, 3])
async def test_what_ranks_have_arrives_as_a_checkpoint_of_it_would(
    tmp_path: Path, base: Path, home: Path, count: int
) -> None:
    servers = stubs(base)
    weights = state_dict(50)
    async with attached(tmp_path, servers) as fleet, fleet:
        new = write_checkpoint(tmp_path / "new", tiny_tensors(50))
        await fleet.sync_weights(new, transport="disk")
        expected = {server.engine.digest for server in servers}
        parts = [rows_of(weights, rank, count) for rank in range(count)]
        async with trainers(fleet, parts) as live:
            plan = live[0].plan()
            assert [share.rank for share in plan.ranks] == list(range(count))
            assert plan.total_bytes == sum(tensor.nbytes for tensor in weights.values())
            assert plan.to_json()["balance"] >= 1
            for step in range(3):
                weights["model.norm.weight"] += 1 if step == 1 else 0
                calls = [trainer.push(f"step-{step}") for trainer in live]
                results = await asyncio.gather(*calls)
                assert all(result == results[0] for result in results)
                assert results[0].version == f"step-{step}" and all(
                    row.ok for row in results[0].servers
                )
                assert results[0].transport == "disk"
                digests = {server.engine.digest for server in servers}
                assert (digests == expected) is (step == 0)
            assert in_memory(home)
            job = (await fleet.weights()).pushes[0]
            assert job.version == "step-2"
    assert not any(server.engine.paused for server in servers)


async def test_masters_are_cast_and_not_gathered(tmp_path: Path, base: Path) -> None:
    servers = stubs(base)
    doubles = {name: tensor.double() for name, tensor in state_dict(50).items()}
    async with attached(tmp_path, servers) as fleet, fleet:
        parts = [rows_of(doubles, rank, 2) for rank in range(2)]
        async with trainers(fleet, parts) as live:
            assert live[0].plan().total_bytes * 2 == sum(t.nbytes for t in doubles.values())
            await asyncio.gather(*(trainer.push("step-1") for trainer in live))
    assert {server.engine.weight_version for server in servers} == {"step-1"}


def without(name: str) -> dict[str, Any]:
    return {key: tensor for key, tensor in state_dict(50).items() if key != name}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({**state_dict(50), "model.norm.weight": torch.ones(9)}, "rank 1: model.norm.weight is .9"),
        (rows_of(state_dict(50), 2, 3), "2 ranks .0, 1. send 80 of its"),
        (3, "rank 1: int is not a model"),
    ],
    ids=["shape", "gap", "no model"],
)
async def test_ranks_that_do_not_have_the_model_are_refused_as_the_trainer_opens(
    tmp_path: Path, base: Path, weights: Any, words: str
) -> None:
    servers = stubs(base)
    async with attached(tmp_path, servers) as fleet, fleet:
        ranks = await met(2)
        given = [rows_of(state_dict(50), 0, 3) if callable(weights) else {}, weights]
        errors = await everywhere(
            [
                open_trainer(fleet, rank, TrainerOptions(part))
                for rank, part in zip(ranks, given, strict=True)
            ]
        )
        for error in errors:
            with pytest.raises((PreflightError, UsageError), match=words):
                raise error
        async with trainers(fleet, [state_dict(50)]):
            pass  # the lock of the trainer that failed is free
    assert untouched(servers)


async def test_what_is_wrong_in_a_step_is_refused_before_the_pause_and_the_next_step_goes_on(
    tmp_path: Path, base: Path
) -> None:
    servers = stubs(base)
    weights = [dict(state_dict(50)), dict(state_dict(50))]
    async with attached(tmp_path, servers) as fleet, fleet, trainers(fleet, weights) as live:

        async def refused(words: str, versions: tuple[str, str] = ("a", "a")) -> None:
            errors = await everywhere(
                [trainer.push(version) for trainer, version in zip(live, versions, strict=True)]
            )
            for error in errors:
                with pytest.raises((PreflightError, UsageError, RankFailed), match=words):
                    raise error
            assert untouched(servers)

        norm = weights[1]["model.norm.weight"]
        weights[1]["model.norm.weight"] = norm.reshape(1, -1)
        await refused("rank 1: model.norm.weight is")
        weights[1]["model.norm.weight"] = norm
        await refused("rank 1 pushes b, and rank 0 a", ("a", "b"))
        for part in weights:
            part.pop("model.norm.weight")
        await refused("model.norm.weight is missing")
        for part in weights:
            part["model.norm.weight"] = torch.full_like(norm, float("nan"))
        await refused(r"rank \d: model.norm.weight holds NaN")
        for part in weights:
            part["model.norm.weight"] = norm
        await asyncio.gather(*(trainer.push("step-1") for trainer in live))
    assert {server.engine.weight_version for server in servers} == {"step-1"}


async def test_tensors_that_have_moved_are_read_where_they_are(tmp_path: Path, base: Path) -> None:
    servers = stubs(base)
    weights = dict(state_dict(9))
    async with attached(tmp_path, servers) as fleet, fleet:
        await fleet.sync_weights(state_dict(50), transport="disk")
        expected = {server.engine.digest for server in servers}
        async with trainers(fleet, [weights]) as live:
            await live[0].push("step-1")
            assert {server.engine.digest for server in servers} != expected
            weights.update(state_dict(50))
            await live[0].push("step-2")
            assert {server.engine.digest for server in servers} == expected


async def test_a_second_trainer_is_refused_until_the_first_is_closed(
    tmp_path: Path, base: Path
) -> None:
    async with attached(tmp_path, stubs(base)) as fleet, fleet:
        live = await fleet.trainer(state_dict(50))
        with pytest.raises(ConflictError, match="another trainer is open on fleet demo"):
            await fleet.trainer(state_dict(50))
        await live.close()
        async with fleet.trainer(state_dict(50)) as again:
            assert (again.rank, again.world_size) == (0, 1)
            assert (await again.push("step-1")).version == "step-1"


async def test_a_trainer_whose_close_is_cancelled_leaves_the_fleet_to_others(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(_: FleetSide) -> None:
        raise asyncio.CancelledError

    async with attached(tmp_path, stubs(base)) as fleet, fleet:
        live = await fleet.trainer(state_dict(50))
        with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
            patch.setattr(FleetSide, "_withdraw", cancelled)
            await live.close()
        async with fleet.trainer(state_dict(50)):
            pass


async def test_a_rank_that_is_gone_is_named_and_nothing_is_touched(
    tmp_path: Path, base: Path
) -> None:
    servers = stubs(base)
    weights = [rows_of(state_dict(50), rank, 3) for rank in range(3)]
    async with attached(tmp_path, servers) as fleet, fleet, trainers(fleet, weights) as live:
        await live[2].close()
        for error in await everywhere([trainer.push("step-1") for trainer in live[:2]]):
            assert error.message.startswith("rank 2 (pid"), error.message
    assert untouched(servers)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("during", ["_read", "_write"])
async def test_a_rank_cancelled_beside_an_exchange_fails_the_push_for_all_and_the_next_is_whole(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, during: str, rank: int
) -> None:
    servers = stubs(base)
    weights, halves, loop = state_dict(50), [0, 1], asyncio.get_running_loop()
    work = getattr(Trainer, during)

    async def cancel() -> None:
        pushing[rank].cancel()

    def cancelled(self: Trainer, *given: Any, **options: Any) -> Any:
        if self.rank == rank:
            asyncio.run_coroutine_threadsafe(cancel(), loop).result()
        return work(self, *given, **options)

    async with attached(tmp_path, servers) as fleet, fleet:
        await fleet.sync_weights(weights, transport="disk")
        expected = {server.engine.digest for server in servers}
        parts = [lambda *of, rank=rank: rows_of(weights, halves[rank], 2)(*of) for rank in (0, 1)]
        async with trainers(fleet, parts, patience_s=20) as live:
            halves.reverse()
            with monkeypatch.context() as patch:
                patch.setattr(Trainer, during, cancelled)
                pushing = [asyncio.ensure_future(trainer.push("step-1")) for trainer in live]
                ended = await asyncio.gather(*pushing, return_exceptions=True)
            assert isinstance(ended[rank], asyncio.CancelledError)
            assert re.match(f"rank {rank}.*cancelled", str(ended[1 - rank]), re.IGNORECASE), ended
            await asyncio.gather(*(trainer.push("step-2") for trainer in live))
            assert {server.engine.digest for server in servers} == expected


async def test_a_push_that_fails_midway_says_so_on_every_rank(tmp_path: Path, base: Path) -> None:
    servers = [*stubs(base, 1), *stubs(base, 1, faults={"/pause": Fault("status")})]
    weights = [rows_of(state_dict(50), rank, 2) for rank in range(2)]
    async with attached(tmp_path, servers) as fleet, fleet, trainers(fleet, weights) as live:
        for error in await everywhere([trainer.push("step-1") for trainer in live]):
            assert isinstance(error, PushError)
            assert [row["server"] for row in error.details["servers"]] == ["demo-0", "demo-1"]


async def test_a_kept_version_is_the_fleets_own_copy(tmp_path: Path, base: Path) -> None:
    async with (
        attached(tmp_path, stubs(base)) as fleet,
        fleet,
        fleet.trainer(state_dict(50)) as live,
    ):
        kept = await live.push("step-1", keep=True)
        assert [one.kept.version for one in await fleet.kept_weights()] == ["step-1"]
        assert not any("in memory" in note for note in kept.notes)
        passing = await live.push("step-2")
        assert any(passing.checkpoint in note for note in passing.notes)


def test_a_program_without_an_event_loop_pushes_too(tmp_path: Path, base: Path) -> None:
    servers = stubs(base)

    async def serve(ready: Any) -> None:
        async with attached(tmp_path, servers) as fleet:
            await asyncio.to_thread(ready, fleet)

    def train(fleet: Fleet) -> None:
        with fleet.trainer(state_dict(50)).blocking() as live:
            assert live.plan().total_bytes and (live.rank, live.world_size) == (0, 1)
            assert live.push("step-1", pause_mode="abort").version == "step-1"

    asyncio.run(serve(train))
    assert {server.engine.weight_version for server in servers} == {"step-1"}


async def test_a_program_that_leaves_its_trainer_open_ends_without_a_word(
    tmp_path: Path, base: Path
) -> None:
    messages: list[str] = []

    def program(fleet: Fleet) -> None:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            loop.set_exception_handler(lambda loop, context: messages.append(context["message"]))
            runner.run(open_trainer(fleet, Hub(), TrainerOptions(state_dict(50))))

    async with attached(tmp_path, stubs(base)) as fleet:
        await asyncio.to_thread(program, fleet)
    assert messages == []

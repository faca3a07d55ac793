"""A trainer that sends by itself, inside the push's transaction, over stubs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skyctl import Fleet
from skyctl.core.requests import CloseUpdate
from skyctl.errors import ConflictError, PreflightError, PushError, UsageError
from skyctl.push.request import PushResult
from skyctl.push.trainer import suggest
from skyctl.service.attached import AttachedFleet
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.running import running
from tests.stub.state import StubEngine
from tests.stub.trainer import send
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


@dataclass
class Trained:
    """Two attached stubs with a backend that skyctl has no sender for."""

    fleet: Fleet
    stubs: list[StubServer]
    directory: Path

    @property
    def engines(self) -> list[StubEngine]:
        return [stub.engine for stub in self.stubs]

    @property
    def digests(self) -> set[str]:
        return {engine.digest for engine in self.engines}

    async def update(self, version: str, seed: int, **options: Any) -> PushResult:
        async with self.fleet.update(version, **options) as update:
            await send(update, seed)
        assert update.result is not None
        return update.result

    def served_whole(self) -> None:
        """Nobody was let go with parts of two checkpoints."""
        for engine in self.engines:
            assert "half loaded" not in engine.served
            assert engine.paused or not (engine.half_loaded or engine.update_open)


@pytest.fixture
async def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Trained]:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    model = str(write_checkpoint(tmp_path / "base"))
    stubs = [StubServer(StubEngine(model=model, transfer_backend="sparse_nccl")) for _ in range(2)]
    async with running(stubs) as targets:
        file = tmp_path / "fleet.yaml"
        urls = [target.url for target in targets]
        file.write_text(
            f"name: demo\nservers: {urls}\ncontrol_timeout_s: 5\n"
            "weight_transfer: {update_timeout_s: 5}\n"
        )
        async with Fleet.load(file) as fleet:
            yield Trained(fleet, stubs, tmp_path)


@pytest.mark.parametrize("finish", [True, False])  # vLLM's own engine does it, others may not
async def test_an_update_is_verified_labelled_and_resumed(trained: Trained, finish: bool) -> None:
    before = trained.digests
    async with trained.fleet.update("step-1") as update:
        assert all(engine.paused for engine in trained.engines)
        assert [
            (target.server, target.rank_offset, target.workers) for target in update.servers
        ] == [
            ("demo-0", 1, 1),
            ("demo-1", 2, 1),
        ]
        assert update.world_size == 3
        await send(update, 1, finish=finish)
    assert update.result is not None and update.result.version == "step-1"
    assert (update.result.checkpoint, update.result.compared) == ("", None)
    assert any("with each other alone" in note for note in update.result.notes)
    assert len(trained.digests) == 1 and trained.digests != before
    for engine in trained.engines:
        assert (engine.weight_version, engine.paused, engine.cached) == ("step-1", False, set())
    rows = (await trained.fleet.weights()).servers
    assert {(row.weight_version, row.checkpoint, row.weights_digest) for row in rows} == {
        ("step-1", None, update.result.servers[0].weights_digest)
    }
    assert (await trained.fleet.verify_weights()).agree is True
    assert await trained.fleet.model_path() is None, "no file has them"
    assert (await trained.update("step-1", 2)).checkpoint_digest != update.result.checkpoint_digest


async def test_a_server_paused_before_stays_paused(trained: Trained) -> None:
    await trained.fleet.pause("keep", servers=["demo-1"])
    result = await trained.update("step-1", 1)
    assert [server.state for server in result.servers] == ["ready", "paused"]
    assert [engine.paused for engine in trained.engines] == [False, True]


async def test_nobody_else_acts_meanwhile(trained: Trained) -> None:
    async with trained.fleet.update("step-1") as update:
        for other in (trained.update("step-2", 2), trained.fleet.pause("keep")):
            with pytest.raises(ConflictError, match="push-1"):
                await other
        await send(update, 1)
    assert update.result is not None


async def test_a_trainer_that_fails_before_it_sends_leaves_the_old_weights(
    trained: Trained,
) -> None:
    before = trained.digests
    with pytest.raises(ZeroDivisionError) as caught:
        async with trained.fleet.update("step-1"):
            raise ZeroDivisionError
    assert "demo-0 ready, demo-1 ready" in caught.value.__notes__[0]
    assert trained.digests == before
    assert not any(engine.paused for engine in trained.engines)
    assert not any(row.quarantine for row in (await trained.fleet.weights()).servers)


@pytest.mark.parametrize("how", ["raises", "is cancelled", "is late", "forgets one"])
async def test_a_server_that_may_be_half_updated_stays_closed_until_the_next_update(
    trained: Trained, how: str
) -> None:
    before = trained.digests

    async def fail() -> None:
        timeout_s = 0.05 if how == "is late" else None
        async with trained.fleet.update("step-1", timeout_s=timeout_s) as update:
            await send(update, 1, only=1, finish=how == "forgets one")
            if how == "raises":
                raise ValueError("out of memory")
            if how != "forgets one":
                await asyncio.sleep(0.5 if how == "is late" else 60)

    failing = asyncio.create_task(fail())
    if how == "is cancelled":
        await trained.engines[0].until_logged("pause keep")
        while "update" not in trained.engines[0].log:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        failing.cancel()
    expected = {"raises": ValueError, "is cancelled": asyncio.CancelledError}.get(how, PushError)
    with pytest.raises(expected):
        await asyncio.wait_for(failing, 20)
    rows = {row.name: row for row in (await trained.fleet.weights()).servers}
    assert rows["demo-0"].quarantine and trained.engines[0].paused
    trained.served_whole()
    served = {digest for engine in trained.engines for digest in engine.served}
    assert served <= before, "only old weights may have been let go"
    await trained.update("step-2", 2)
    assert len(trained.digests) == 1 and not any(engine.paused for engine in trained.engines)
    rows = {row.name: row for row in (await trained.fleet.weights()).servers}
    assert [(row.weight_version, row.quarantine) for row in rows.values()] == [("step-2", None)] * 2
    trained.served_whole()


@pytest.mark.parametrize("inside", [True, False], ids=["twice", "as it is left"])
async def test_a_cancelled_trainer_still_says_that_it_sends_nothing_more(
    trained: Trained, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers would stay frozen until its time is over, and closed for as long as it lives."""
    close, closes, reported = AttachedFleet.close_update, asyncio.Event(), asyncio.Event()

    async def as_over_a_network(fleet: AttachedFleet, request: CloseUpdate) -> None:
        closes.set()
        await asyncio.sleep(0.05)
        await close(fleet, request)
        reported.set()

    monkeypatch.setattr(AttachedFleet, "close_update", as_over_a_network)
    opened = asyncio.Event()

    async def update() -> None:
        async with trained.fleet.update("step-1"):
            opened.set()
            await asyncio.sleep(60 if inside else 0)

    updating = asyncio.create_task(update())
    await opened.wait()
    if inside:
        updating.cancel()
    await closes.wait()
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(updating, 20)
    assert reported.is_set()


async def test_a_dead_update_is_undone_by_recovery(trained: Trained) -> None:
    """To the fleet's weights, while a file has them; else the servers wait for the next."""
    before = trained.digests
    with pytest.raises(ValueError, match="no"):
        async with trained.fleet.update("step-1") as update:
            await send(update, 1)
            raise ValueError("no")
    async with trained.fleet._connected() as fleet:
        assert [(repair.action, repair.ok) for repair in await fleet.recover()] == [
            ("push", True)
        ] * 2
    assert trained.digests == before and not any(e.paused for e in trained.engines)
    await trained.update("step-2", 2)
    with pytest.raises(ValueError, match="no"):
        async with trained.fleet.update("step-3") as update:
            await send(update, 3)
            raise ValueError("no")
    async with trained.fleet._connected() as fleet:
        for repair in await fleet.recover():
            assert not repair.ok and "no file has it; push or update again" in repair.detail
    assert all(engine.paused for engine in trained.engines)
    new = write_checkpoint(trained.directory / "new", tiny_tensors(50))
    await trained.fleet.sync_weights(new)
    assert not any(engine.paused for engine in trained.engines)


async def test_a_checkpoint_of_the_same_weights_is_compared_and_kept_for_recovery(
    trained: Trained,
) -> None:
    new = write_checkpoint(trained.directory / "new", tiny_tensors(50))
    for stub in trained.stubs:  # it holds what is on disk, as far as anybody asks
        finish = stub.engine.finish_update
        stub.engine.finish_update = lambda v, f=finish, e=stub.engine: (f(v), e.reload(str(new)))  # type: ignore[method-assign,misc,assignment]
    assert await trained.fleet.model_path() == str(trained.directory / "base")
    result = await trained.update("step-1", 1, checkpoint=new)
    assert await trained.fleet.model_path() == str(new)
    assert result.checkpoint == str(new) and result.compared
    assert result.compared["tensors"] > 0
    async with trained.fleet._connected() as fleet:
        assert isinstance(fleet, AttachedFleet)
        learned = fleet.state.expected.everything().digests
    assert not any(one.origin == "push" for one in learned), "only rows of it were compared"
    with pytest.raises(PushError, match="does not hold what was sent"):
        await trained.update("step-2", 2, checkpoint=trained.directory / "base")


@pytest.mark.parametrize("wrong", ["digest", "not finite"])
async def test_weights_that_are_not_what_they_must_be_serve_nobody(
    trained: Trained, wrong: str
) -> None:
    if wrong == "not finite":
        trained.engines[1].not_finite = "lm_head.weight"
    digest = "another" if wrong == "digest" else None
    words = "not hold what was announced" if wrong == "digest" else "NaN or infinity in lm_head"
    with pytest.raises(PushError, match=words):
        await trained.update("step-1", 1, digest=digest)
    assert trained.engines[1].paused
    trained.engines[1].not_finite = ""
    result = await trained.update("step-2", 2)
    await trained.update("step-3", 3)
    assert (await trained.update("step-4", 2, digest=result.servers[0].weights_digest)).version


async def test_an_update_is_verified_as_the_fleet_file_has_it_unless_it_names_a_digest(
    trained: Trained,
) -> None:
    file = trained.directory / "fleet.yaml"
    file.write_text(file.read_text().replace("s: 5}", "s: 5, verify: false}"))
    trained.fleet = Fleet.load(file)
    assert not (await trained.update("step-1", 1)).servers[0].weights_digest
    with pytest.raises(PushError, match="not hold what was announced"):
        await trained.update("step-2", 2, digest="another")


async def test_an_update_into_which_nothing_was_sent_has_failed(trained: Trained) -> None:
    for version in ("step-1", "step-2"):  # compared with what the servers held, then on record
        with pytest.raises(PushError, match="sent nothing: the weights are what they were"):
            async with trained.fleet.update(version):
                pass
        assert version not in {engine.weight_version for engine in trained.engines}
        first = await trained.update("step-0", 7)
    digest = first.servers[0].weights_digest
    assert (await trained.update("step-3", 7, digest=digest)).version == "step-3"


async def test_what_was_sent_is_told_by_what_servers_hold_and_not_by_an_older_record(
    trained: Trained,
) -> None:
    await trained.update("step-1", 7)
    for engine in trained.engines:  # another fleet pushes, or they are started again
        engine.digest, engine.weight_version = "theirs", "theirs"
    with pytest.raises(PushError, match="sent nothing: the weights are what they were"):
        async with trained.fleet.update("step-2"):
            pass
    for engine in trained.engines:
        engine.digest, engine.weight_version = "theirs", "default"
    assert (await trained.update("step-3", 7)).version == "step-3"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"digest": "one", "verify": False}, "verify is False"),
        ({"timeout_s": -1}, "no time to send in"),
        ({"timeout_s": 0}, "no time to send in"),
        ({"timeout_s": float("nan")}, "no time to send in"),
    ],
)
async def test_an_update_that_could_only_fail_is_refused_before_anything_is_frozen(
    trained: Trained, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        await asyncio.wait_for(trained.update("step-1", 1, **options), 20)
    assert all(engine.log == [] for engine in trained.engines)


async def test_servers_without_a_backend_are_refused_before_anything_is_touched(
    trained: Trained,
) -> None:
    trained.engines[1].transfer_backend = ""
    with pytest.raises(PreflightError, match="demo-1 was started without"):
        await trained.update("step-1", 1)
    assert all(engine.log == [] for engine in trained.engines)


def test_a_trainer_meets_servers_where_they_reach_it() -> None:
    near, far = (
        suggest(["http://127.0.0.1:8000", "http://localhost:1"]),
        suggest(["http://192.0.2.1"]),
    )
    assert near.master_address == "127.0.0.1" and near.master_port > 0
    assert not far.master_address.startswith("127.")


async def test_a_server_that_cannot_be_frozen_undoes_it(trained: Trained) -> None:
    trained.stubs[1].asgi.faults["/pause"] = Fault("status")
    with pytest.raises(PushError, match="was undone"):
        await trained.update("step-1", 1)
    assert not any(engine.paused for engine in trained.engines)


async def test_weights_in_no_file_are_not_kept_for_an_attached_fleet(trained: Trained) -> None:
    with pytest.raises(UsageError, match="this fleet is attached"):
        await trained.update("step-1", 1, keep=True)
    assert all(not engine.log for engine in trained.engines)

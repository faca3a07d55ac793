"""Sampling and the adapters it needs, without a server: what is cancelled, deleted or expires."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
from skyctl.errors import FleetDownError, NotFoundError, ServerError, StateUnwritable
from skyctl.tinker import records, requests
from skyctl.tinker.fleet_servers import FleetServers
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.questions import Unanswerable, question
from skyctl.tinker.sampling import SAMPLE, AdapterGone, Sampling


class Busy:
    """Servers that never answer and cannot be told to forget anything."""

    base, context = "served", 64

    async def complete(
        self, body: Mapping[str, Any], weights: str | None, session: str
    ) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    @asynccontextmanager
    async def using(self, name: str, directory: str) -> AsyncIterator[None]:
        yield

    async def unload(self, name: str) -> None:
        raise FleetDownError("down")

    @asynccontextmanager
    async def leaving(self, directory: str) -> AsyncIterator[None]:
        raise FleetDownError("down")
        yield


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def sampling_of(ledger: Ledger, **kwargs: Any) -> Sampling:
    return Sampling(ledger, Busy(), SimpleNamespace(), Doorbell(), **kwargs)  # type: ignore[arg-type]


async def accept(ledger: Ledger, seq: int) -> str:
    body = json.dumps({"prompt": {"chunks": [{"tokens": [1]}]}}).encode()
    now = time.time()
    await ledger.write(
        "INSERT OR IGNORE INTO samplers VALUES ('s', 'x', NULL, NULL, ?, ?)", now, now
    )
    await ledger.run(lambda c: records.add_request(c, "s", seq, SAMPLE, body=body))
    return records.request_id("s", seq)


async def test_a_cancelled_sample_has_an_outcome_wherever_it_was(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = sampling_of(ledger, concurrency=1)
    names = [await accept(ledger, seq) for seq in range(3)]
    for name in names[:2]:
        sampling.accepted(name)
    await asyncio.sleep(0.05)  # the first is with the servers, the second waits for its slot
    sampling.accepted(names[2])  # has not begun
    recorded: list[str] = []
    record = sampling._record_cancelled

    async def count(request: str) -> None:
        recorded.append(request)
        await record(request)

    monkeypatch.setattr(sampling, "_record_cancelled", count)
    for name in [*names, *names]:  # by an impatient client
        sampling.cancel(name)
    async with asyncio.timeout(5):
        while sampling.busy:
            await asyncio.sleep(0)
            sampling.cancel(names[0])
    assert sorted(recorded) == sorted(names)
    rows = await ledger.rows("SELECT state, category, result FROM requests")
    assert [tuple(row) for row in rows] == [("failed", "user", b"cancelled by its client")] * 3


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_outcome_that_the_disk_does_not_take_is_recorded_once_it_does(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    monkeypatch.setattr("skyctl.tinker.ledger._DISK_S", 0.01)
    sampling, run, failures = sampling_of(ledger), ledger.run, iter(range(3))
    name = await accept(ledger, 0)

    async def full(change: Any) -> Any:
        if next(failures, None) is not None:
            raise StateUnwritable("the disk is full")
        return await run(change)

    async def refuse(row: Any) -> bytes:
        monkeypatch.setattr(ledger, "run", full)
        if cancelled:
            sampling.cancel(name)
            await asyncio.sleep(1)
        raise Unanswerable("no")

    monkeypatch.setattr(sampling, "_sample", refuse)
    sampling.accepted(name)
    async with asyncio.timeout(5):
        while sampling.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (row,) = await ledger.rows("SELECT state, result FROM requests")
    assert tuple(row) == ("failed", b"cancelled by its client" if cancelled else b"no")


async def test_a_sample_whose_sampler_moved_on_before_its_adapter_was_loaded_has_the_newer_one(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def save(connection: Any, directory: str) -> None:
        path = f"tinker://m/sampler_weights{directory}"
        extra = {"path": path, "sampler": "s", "session": "x", "inflight": True}
        config = json.dumps({"lora": {"rank": 8}})
        saved = requests.add_checkpoint("m", requests.SAVE_SAMPLER, directory, config, 1, extra)
        for sql, parameters in (*saved, *requests.add_sampler("m", extra)):
            connection.execute(sql, parameters)

    @asynccontextmanager
    async def using(self: Busy, name: str, directory: str) -> AsyncIterator[None]:
        used.append(directory)
        if directory == "/1":
            await ledger.write("DELETE FROM checkpoints")  # as housekeeping does
            await ledger.run(lambda c: save(c, "/2"))
            raise ServerError("there is no /1", status=500)
        yield

    async def complete(*_: Any) -> dict[str, Any]:
        await ledger.write("UPDATE samplers SET used = 0")  # the answer took long
        logprobs = {"token_logprobs": [0.0]}
        choice = {"index": 0, "token_ids": [1], "logprobs": logprobs, "finish_reason": "stop"}
        return {"choices": [choice]}

    monkeypatch.setattr(Busy, "using", using)
    monkeypatch.setattr(Busy, "complete", complete)
    await ledger.run(lambda c: save(c, "/1"))
    await sampling_of(ledger)._carry_out(await accept(ledger, 0))
    (row,) = await ledger.rows("SELECT state, category FROM requests")
    assert tuple(row) == ("done", "") and used == ["/1", "/2"]
    (row,) = await ledger.rows("SELECT used FROM samplers")
    assert row["used"] > 0  # its weights stay for as long after its last answer


@pytest.mark.parametrize("rank", [8, 0])
async def test_an_adapter_is_deleted_though_no_server_can_be_told_and_a_whole_model_is_not(
    ledger: Ledger, tmp_path: Path, rank: int
) -> None:
    (tmp_path / "c").mkdir()
    config = json.dumps({"lora": {"rank": rank}})
    row = {"path": "tinker://m/weights/c", "directory": str(tmp_path / "c"), "config": config}
    with nullcontext() if rank else pytest.raises(FleetDownError):
        await sampling_of(ledger).delete(row)  # type: ignore[arg-type]
    assert (tmp_path / "c").exists() is (rank == 0)


async def test_a_checkpoint_that_takes_the_path_of_one_that_is_being_deleted_stays(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, extra = json.dumps({"lora": {"rank": 0}}), {"path": "tinker://m/weights/latest"}

    async def save(directory: str) -> None:
        saved = [*requests.add_checkpoint("m", requests.SAVE, directory, config, 1, extra)]
        await ledger.run(lambda c: [c.execute(*statement) for statement in saved])

    @asynccontextmanager
    async def leaving(self: Busy, directory: str) -> AsyncIterator[None]:
        await save("/2")  # its run goes on meanwhile
        yield

    monkeypatch.setattr(Busy, "leaving", leaving)
    await save("/1")
    (row,) = await ledger.rows("SELECT * FROM checkpoints")
    await sampling_of(ledger).delete(row)
    (row,) = await ledger.rows("SELECT path, directory FROM checkpoints")
    assert tuple(row) == (extra["path"], "/2")


class Fleet:
    """Notes what is loaded; `broken` makes the next change fail."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.broken = False

    async def adapters(self) -> tuple[Any, ...]:
        return ()

    async def status(self) -> Any:
        return SimpleNamespace(replicas=())

    async def load_adapter(self, request: Any) -> None:
        self._fail_if_broken()
        self.loaded.append(request.name)

    async def unload_adapter(self, request: Any) -> None:
        self._fail_if_broken()
        if request.name not in self.loaded:
            raise NotFoundError("unknown")
        self.loaded.remove(request.name)

    def _fail_if_broken(self) -> None:
        if self.broken:
            self.broken = False
            raise FleetDownError("down")


async def test_an_adapter_that_answers_something_stays_until_its_place_is_needed() -> None:
    fleet = Fleet()
    servers = FleetServers(fleet, None, "served", 64, 1, None)  # type: ignore[arg-type]
    async with servers.using("tinker-a", "/a"):
        await servers.unload("tinker-a")  # its checkpoint was replaced by a newer one
        assert fleet.loaded == ["tinker-a"]
    async with servers.using("tinker-b", "/b"):
        assert fleet.loaded == ["tinker-b"]
    await servers.unload("tinker-b")
    assert fleet.loaded == []


async def test_an_adapter_that_something_else_unloaded_is_loaded_again() -> None:
    class Client:
        async def ask(self, path: str, body: dict[str, Any], session_id: str) -> dict[str, Any]:
            assert session_id == "s:sample:0:7"  # a sticky router's key
            missing = body["model"] not in fleet.loaded
            await asyncio.sleep(0)  # others are under way
            if "late" in body:
                await late.wait()
            if missing:
                raise ServerError("the model does not exist", status=404)
            return {"model": body["model"]}

    class Weights:
        async def answer(self, weights: None, ask: Any) -> Any:
            return await ask()

    fleet, late = Fleet(), asyncio.Event()
    servers = FleetServers(fleet, Client(), "served", 64, 2, Weights())  # type: ignore[arg-type]

    async def sample(**body: Any) -> Any:
        async with servers.using("tinker-a", "/a"):
            return await servers.complete({"model": "tinker-a", **body}, None, "s:sample:0:7")

    assert await sample() == {"model": "tinker-a"}
    fleet.loaded.remove("tinker-a")  # skyctl adapters unload
    last = asyncio.create_task(sample(late=True))
    results = await asyncio.gather(sample(), sample(), return_exceptions=True)
    assert [type(result) for result in results] == [AdapterGone] * 2
    assert await sample() == {"model": "tinker-a"} and fleet.loaded == ["tinker-a"]
    late.set()
    with pytest.raises(AdapterGone):
        await last
    assert await sample() == {"model": "tinker-a"} and fleet.loaded == ["tinker-a"]
    await servers.unload("tinker-a")
    assert fleet.loaded == []
    with pytest.raises(ServerError, match="does not exist"):
        await servers.complete({"model": "tinker-a"}, None, "s:sample:0:7")


@pytest.mark.parametrize("used", [False, True])
async def test_a_delete_that_waited_for_others_unloads_nothing_that_went_or_is_in_use(
    used: bool,
) -> None:
    fleet, over = Fleet(), asyncio.Event()
    servers = FleetServers(fleet, None, "served", 64, 1 + used, None)  # type: ignore[arg-type]

    async def sample(name: str) -> None:
        async with servers.using(name, "/a"):
            await over.wait()

    async with servers.using("tinker-a", "/a"):
        pass
    async with servers._changing:
        tasks = [asyncio.create_task(sample("tinker-b"))]
        await asyncio.sleep(0)  # it waits
        if used:
            tasks.append(asyncio.create_task(sample("tinker-a")))
    await servers.unload("tinker-a")
    assert fleet.loaded == (["tinker-a", "tinker-b"] if used else ["tinker-b"])
    over.set()
    await asyncio.gather(*tasks)


async def test_a_fifth_sampler_waits_for_one_answer_of_four_busy_ones_and_a_delete_for_none() -> (
    None
):
    fleet, answer_s, waits = Fleet(), 0.05, list[float]()
    servers = FleetServers(fleet, None, "served", 64, 4, None)  # type: ignore[arg-type]

    async def sample(name: str) -> None:
        began = time.monotonic()
        async with servers.using(name, "/a"):
            waits.append(time.monotonic() - began)
            assert name in fleet.loaded
            await asyncio.sleep(answer_s)

    async def busy(name: str) -> None:
        while True:
            await sample(name)

    tasks = []
    for name in "abcd":
        for _ in range(3):  # overlapping requests: its adapter is never idle
            tasks.append(asyncio.create_task(busy(f"tinker-{name}")))
            await asyncio.sleep(answer_s / 3)
    waits.clear()
    async with asyncio.timeout(20 * answer_s):
        fifth = asyncio.create_task(sample("tinker-e"))
        await asyncio.sleep(answer_s / 10)
        began = time.monotonic()
        await servers.unload("tinker-unrelated")
        await servers.unload("tinker-b")
        assert time.monotonic() - began < answer_s / 5
        await fifth
    await asyncio.sleep(3 * answer_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert max(waits) < 5 * answer_s  # those that give way get a place again


async def test_a_sample_waits_while_the_fleet_has_no_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyctl.tinker.weights._BUSY_S", 0.0)
    fleet = Fleet()
    servers = FleetServers(fleet, None, "served", 64, 1, None)  # type: ignore[arg-type]
    fleet.broken = True
    async with servers.using("tinker-a", "/a"):
        assert fleet.loaded == ["tinker-a"]


async def test_an_adapter_whose_unloading_failed_goes_before_the_next_is_loaded() -> None:
    fleet = Fleet()
    servers = FleetServers(fleet, None, "served", 64, 1, None)  # type: ignore[arg-type]
    async with servers.using("tinker-a", "/a"):
        pass
    fleet.broken = True
    with pytest.raises(FleetDownError):
        await servers.unload("tinker-a")
    async with servers.using("tinker-b", "/b"):
        assert fleet.loaded == ["tinker-b"]


async def test_an_adapter_whose_loading_was_given_up_goes_before_the_next_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, load = Fleet(), Fleet.load_adapter
    servers = FleetServers(fleet, None, "served", 64, 1, None)  # type: ignore[arg-type]

    async def slow(self: Fleet, request: Any) -> None:
        await load(self, request)  # the supervisor carries it out, whoever still waits for it
        await asyncio.Event().wait()

    async def sample() -> None:
        async with servers.using("tinker-a", "/a"):
            raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(Fleet, "load_adapter", slow)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sample(), 0.05)  # as if its client cancelled it
    async with servers.using("tinker-b", "/b"):
        assert fleet.loaded == ["tinker-b"]


@pytest.mark.parametrize(
    "change",
    [
        {"sampling_params": {"temperature": float("nan")}},
        {"sampling_params": {"top_p": float("inf")}},
        {"prompt": {"chunks": [{"tokens": [3, -1]}]}},
    ],
)
def test_numbers_that_no_server_should_see_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unanswerable, match=r"not finite|negative"):
        question({"prompt": {"chunks": [{"tokens": [1]}]}, **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"record_stability_info": True}, "pass loss_fn=importance_sampling"),
        ({"sampling_params": {"stop": list("abcde")}}, "at most 4 stop strings"),
        ({"topk_sample_logprobs": 21}, "at most 20 top logprobs"),
        ({"topk_prompt_logprobs": 1025}, "1024 of a prompt"),
    ],
)
def test_what_is_not_offered_is_refused_with_what_is(change: dict[str, Any], text: str) -> None:
    prompt = {"prompt": {"chunks": [{"tokens": [1, 2]}]}}
    question({**prompt, "topk_prompt_logprobs": 500, "sampling_params": {"stop": [*range(40)]}})
    with pytest.raises(Unanswerable, match=text):
        question({**prompt, **change})


@pytest.mark.parametrize("name", ["max_tokens", "seed"])
def test_what_is_no_number_is_the_callers_mistake(name: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        question({"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {name: "many"}})


async def test_fewer_than_no_top_logprobs_of_a_prompt_are_not_asked_for(ledger: Ledger) -> None:
    sample = question({"prompt": {"chunks": [{"tokens": [1, 2]}]}, "topk_prompt_logprobs": -1})
    assert await sampling_of(ledger)._about_prompt(sample, None) == b""  # there is no worker to ask

"""Sampling and the adapters it needs, without a server: what is cancelled, deleted or expires."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
from skyctl.errors import FleetDownError, SkyctlError
from skyctl.store.journal import Job
from skyctl.tinker import records
from skyctl.tinker.fleet import FleetServers, Pushing
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.sampling import SAMPLE, Sampling, Unanswerable, question
from skyctl.tinker.waiting import Doorbell


class Busy:
    """Servers that never answer and cannot be told to forget anything."""

    base, context = "served", 64

    async def complete(self, body: Mapping[str, Any], weights: str | None) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    @asynccontextmanager
    async def using(self, name: str, directory: str) -> AsyncIterator[None]:
        yield

    async def unload(self, name: str, directory: str) -> None:
        raise FleetDownError("down")


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    found = Ledger(tmp_path / "ledger.sqlite")
    yield found
    found.close()


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


async def test_a_cancelled_sample_has_an_outcome_wherever_it_was(ledger: Ledger) -> None:
    sampling = sampling_of(ledger, concurrency=1)
    names = [await accept(ledger, seq) for seq in range(3)]
    for name in names[:2]:
        sampling.accepted(name)
    await asyncio.sleep(0.05)  # the first is with the servers, the second waits for its slot
    sampling.accepted(names[2])  # has not begun
    for name in names:
        sampling.cancel(name)
    async with asyncio.timeout(5):
        while sampling.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    rows = await ledger.rows("SELECT state, category, result FROM requests")
    assert [tuple(row) for row in rows] == [("failed", "user", b"cancelled by its client")] * 3


async def test_a_checkpoint_is_deleted_though_no_server_can_be_told(
    ledger: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "c").mkdir()
    await records.delete_checkpoints(
        ledger,
        sampling_of(ledger),
        [{"path": "tinker://m/weights/c", "directory": str(tmp_path / "c")}],  # type: ignore[list-item]
    )
    assert not (tmp_path / "c").exists()


class Fleet:
    """Notes what is loaded; `broken` makes the next change fail."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.broken = False

    async def adapters(self) -> tuple[Any, ...]:
        return ()

    async def load_adapter(self, asked: Any) -> None:
        self._fail_if_broken()
        self.loaded.append(asked.name)

    async def unload_adapter(self, asked: Any) -> None:
        self._fail_if_broken()
        self.loaded.remove(asked.name)

    def _fail_if_broken(self) -> None:
        if self.broken:
            self.broken = False
            raise FleetDownError("down")


async def test_an_adapter_that_answers_something_stays_until_its_place_is_needed() -> None:
    fleet = Fleet()
    servers = FleetServers(fleet, None, "served", 64, 1)  # type: ignore[arg-type]
    async with servers.using("tinker-a", "/a"):
        await servers.unload("tinker-a", "/a")  # its checkpoint was replaced by a newer one
        assert fleet.loaded == ["tinker-a"]
    async with servers.using("tinker-b", "/b"):
        assert fleet.loaded == ["tinker-b"]
    await servers.unload("tinker-b", "/b")
    assert fleet.loaded == []


async def test_a_sample_waits_while_the_fleet_has_no_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyctl.tinker.fleet._BUSY_S", 0.0)
    fleet = Fleet()
    servers = FleetServers(fleet, None, "served", 64, 1)  # type: ignore[arg-type]
    fleet.broken = True
    async with servers.using("tinker-a", "/a"):
        assert fleet.loaded == ["tinker-a"]


async def test_an_adapter_whose_unloading_failed_goes_before_the_next_is_loaded() -> None:
    fleet = Fleet()
    servers = FleetServers(fleet, None, "served", 64, 1)  # type: ignore[arg-type]
    async with servers.using("tinker-a", "/a"):
        pass
    fleet.broken = True
    with pytest.raises(FleetDownError):
        await servers.unload("tinker-a", "/a")
    async with servers.using("tinker-b", "/b"):
        assert fleet.loaded == ["tinker-b"]


class Weighted(Fleet):
    """Is at the checkpoint that was pushed last; answers with it, after `answer_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[str] = []
        self.answer_s = 0.0
        self.job = Job("p", "push", "succeeded", "", 0, 0, {}, {}, 0.0)

    async def model_path(self) -> str:
        return self.pushed[-1] if self.pushed else "/base"

    async def start_push(self, asked: Any) -> str:
        self._fail_if_broken()
        await asyncio.sleep(0)
        self.pushed.append(asked.checkpoint)
        return "p"

    async def wait_job(self, job: str) -> Job:
        return self.job

    async def ask(self, route: str, body: Any) -> dict[str, Any]:
        before = await self.model_path()
        await asyncio.sleep(self.answer_s)
        return {"of": before}


def weighted(fleet: Weighted) -> FleetServers:
    pushing = Pushing("/base", Path("/trained"))
    return FleetServers(fleet, fleet, "served", 64, 1, pushing)  # type: ignore[arg-type]


async def test_whole_models_are_served_in_turn_and_each_push_serves_all_who_wait() -> None:
    fleet = Weighted()
    servers = weighted(fleet)
    wanted = [None, "/trained/a", "/trained/b", "/trained/a", None, "/trained/b"]
    answers = await asyncio.gather(*(servers.complete({}, weights) for weights in wanted))
    assert [answer["of"] for answer in answers] == [weights or "/base" for weights in wanted]
    assert fleet.pushed == ["/trained/a", "/trained/b", "/base"]


async def test_who_gives_up_waiting_for_a_model_holds_nobody_up() -> None:
    fleet = Weighted()
    servers, fleet.answer_s = weighted(fleet), 0.05
    tasks = [
        asyncio.create_task(servers.complete({}, weights))
        for weights in (None, "/trained/a", "/trained/b")
    ]
    await asyncio.sleep(0.01)
    tasks[1].cancel()
    async with asyncio.timeout(5):
        assert (await tasks[2])["of"] == "/trained/b"
        assert (await servers.complete({}, None))["of"] == "/base"
    assert fleet.pushed == ["/trained/b", "/base"]


async def test_what_was_answered_by_other_weights_is_asked_again() -> None:
    fleet = Weighted()
    servers, fleet.answer_s = weighted(fleet), 0.05
    asked = asyncio.create_task(servers.complete({}, "/trained/a"))
    await asyncio.sleep(0.02)
    fleet.pushed.append("/somebody/elses")
    assert (await asked)["of"] == "/trained/a"
    assert fleet.pushed == ["/trained/a", "/somebody/elses", "/trained/a"]
    # their own weights are whatever the operator gives them
    fleet.pushed.append("/somebody/elses")
    assert (await servers.complete({}, None))["of"] == "/somebody/elses"


async def test_a_model_whose_push_fails_is_an_error_and_the_next_is_served() -> None:
    fleet = Weighted()
    servers, well = weighted(fleet), fleet.job
    error = {"kind": "PreflightError", "message": "too large", "hint": None}
    fleet.job = replace(well, state="failed", error=error)
    with pytest.raises(SkyctlError, match="too large"):
        await servers.complete({}, "/trained/a")
    fleet.job = well
    assert (await servers.complete({}, "/trained/b"))["of"] == "/trained/b"


async def test_weights_that_go_away_are_taken_from_the_servers_first() -> None:
    fleet = Weighted()
    servers = weighted(fleet)
    await servers.complete({}, "/trained/a")
    await servers.unload("tinker-b", "/trained/b")
    assert fleet.pushed == ["/trained/a"]
    await servers.unload("tinker-a", "/trained/a")
    assert fleet.pushed == ["/trained/a", "/base"]


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

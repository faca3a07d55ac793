"""Replicas by load, by the real command: stubs behind a router, and clients that count failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stub_fleet import StubFleet
from tests.load import Load
from tests.pids import kill
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

SCALE = "{min: 1, max: 3, target: queue, value: 4, up_after_s: 0.6, down_after_s: 2, sleep_s: 30}"
BODY = {"model": "model", "prompt": "abc", "max_tokens": 8}
DELAY_S = 0.05
EXTRA = f"""
weight_transfer: {{transport: disk}}
check_args: false
args: {{token-delay-s: {DELAY_S}}}
"""


class Scaled:
    """A fleet whose size the load decides."""

    def __init__(self, fleet: StubFleet, load: Load) -> None:
        self.fleet, self.load = fleet, load

    async def run(self, *arguments: str, expect: int = 0) -> str:
        done = await asyncio.to_thread(self.fleet.run, *arguments, expect=expect)
        return done.stdout + done.stderr

    async def status(self) -> dict[str, Any]:
        envelope = await asyncio.to_thread(self.fleet.json, "status")
        data: dict[str, Any] = envelope["data"]
        return data

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status for which it holds."""
        async with asyncio.timeout(60):
            while not holds(status := await self.status()):  # noqa: ASYNC110 - in other processes
                await asyncio.sleep(0.1)
            return status

    async def until_serving(self, *names: str) -> dict[str, Any]:
        return await self.until(lambda status: serving(status) == set(names))

    async def answers_of(self, requests: int) -> set[str]:
        """The distinct texts of the next requests to be answered."""
        before = len(self.load.answers) + 12  # which began earlier
        while len(self.load.answers) < before + requests:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return set(self.load.answers[before:])

    async def events(self) -> list[str]:
        envelope = await asyncio.to_thread(self.fleet.json, "events")
        return [f"{event['subject']} {event['message']}" for event in envelope["data"]["events"]]


def serving(status: dict[str, Any]) -> set[str]:
    rows = status["replicas"]
    return {row["name"] for row in rows if row["state"] == "ready" and row["routed"]}


@asynccontextmanager
async def scaled(directory: Path, scale: str = SCALE, extra: str = EXTRA) -> AsyncIterator[Scaled]:
    fleet = StubFleet(directory)
    fleet.write(replicas=1, extra=f"scale: {scale}\n{extra}")
    write_checkpoint(directory / "model")
    try:
        fleet.run("up")
        url = fleet.json("urls")["data"]["router"]
        load = Load(url, fleet.run("urls", "--show-key").stdout.strip(), BODY)
        yield Scaled(fleet, load)
        await load.become(0)
    finally:
        fleet.run("down", "--drain-timeout", "0")


async def test_a_load_four_times_as_high_is_served_and_no_request_fails(tmp_path: Path) -> None:
    async with scaled(tmp_path) as it:
        assert (await it.status())["scaling"]["max"] == 3  # before the first sample as well
        await it.load.become(3)
        await it.until_serving("stubs-0")
        await it.load.become(12)
        status = await it.until_serving("stubs-0", "stubs-1", "stubs-2")
        assert status["scaling"]["replicas"] == 3
        await it.load.become(3)
        status = await it.until_serving("stubs-0")
        status = await it.until(lambda status: len(status["scaling"]["asleep"]) == 2)
        assert "1 of 1–3 replicas" in await it.run("status")
        await it.load.become(12)  # what sleeps is woken
        await it.until_serving("stubs-0", "stubs-1", "stubs-2")
        await it.load.become(0)
        assert it.load.failures == [] and it.load.answers
        events = await it.events()
        assert sum(event.endswith("is woken") for event in events) == 2
        assert sum(event.endswith("starting") for event in events) == 4  # and the router
        assert any(event.startswith("fleet scale: 1 → 3 replicas, queue ") for event in events)


async def test_a_push_in_the_midst_reaches_what_starts_what_leaves_and_what_is_woken(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path / "next", tiny_tensors(2))
    write_checkpoint(tmp_path / "last", tiny_tensors(3))
    slow = SCALE.replace("down_after_s: 2", "down_after_s: 3")
    async with scaled(tmp_path, slow) as it:
        await it.load.become(12)
        await it.until(lambda status: (status["scaling"] or {}).get("replicas") == 3)
        await it.run("sync-weights", "next", "--weight-version", "v1")
        status = await it.until_serving("stubs-0", "stubs-1", "stubs-2")
        assert {row["weight_version"] for row in status["replicas"]} == {"v1"}
        await it.load.become(1)
        await it.until(lambda status: status["scaling"]["asleep"] == ["stubs-2"])
        await it.run("sync-weights", "last", "--weight-version", "v2")  # the second may be leaving
        await it.until(lambda status: len(status["scaling"]["asleep"]) == 2)
        new = await it.answers_of(1)
        await it.load.become(12)
        status = await it.until_serving("stubs-0", "stubs-1", "stubs-2")
        versions = {row["name"]: row["reported_version"] for row in status["replicas"]}
        assert versions == {"stubs-0": "v2", "stubs-1": "v2", "stubs-2": "v2"}
        assert await it.answers_of(30) == new  # and the woken ones answer with it
        await it.load.become(0)
        assert it.load.failures == []


@pytest.mark.parametrize("when", ["it grows", "it shrinks"])
async def test_a_supervisor_that_is_killed_leaves_the_count_to_the_next(
    tmp_path: Path, when: str
) -> None:
    async with scaled(tmp_path) as it:
        await it.load.become(12)
        if when == "it shrinks":
            await it.until_serving("stubs-0", "stubs-1", "stubs-2")
            await it.load.become(4)
            # one sleeps, and the next may be about to leave
            status = await it.until(lambda status: status["scaling"]["asleep"] != [])
            count = {len(status["replicas"]), len(status["replicas"]) - 1}
        else:
            status = await it.until(lambda status: len(status["replicas"]) == 3)
            count = {3}
        kill(status["supervisor_pid"])
        status = await it.status()
        assert status["supervisor_pid"] not in (None, 0)
        assert len(status["replicas"]) in count
        await it.load.become(12)
        await it.until_serving("stubs-0", "stubs-1", "stubs-2")
        await it.load.become(0)
        assert it.load.failures == []


async def test_the_file_bounds_the_number_and_up_keeps_what_load_decided(tmp_path: Path) -> None:
    still = SCALE.replace("down_after_s: 2", "down_after_s: 600")  # idle, it would shrink
    async with scaled(tmp_path, still) as it:
        refused = await it.run("scale", "4", expect=2)
        assert "cannot scale to 4: `scale:` in the fleet file says 1 to 3 replicas" in refused
        assert "load decides from here: 1 to 3 replicas" in await it.run("scale", "3")
        assert "is up to date, nothing to do" in await it.run("up", "--dry-run")
        assert "3 of 1 to 3 replicas, by queue: 4 each" in await it.run("plan")
        assert (await it.status())["unapplied"] is False
        it.fleet.write(replicas=1, extra=f"scale: {still.replace('max: 3', 'max: 2')}\n{EXTRA}")
        assert "- stop    stubs-2" in await it.run("up", "--dry-run")


async def test_a_paused_fleet_is_left_as_it_is(tmp_path: Path) -> None:
    async with scaled(tmp_path) as it:
        await it.run("scale", "2")
        await it.run("pause", "--mode", "keep")
        status = await it.until(lambda status: status["scaling"]["load"] is None)
        assert status["scaling"]["reason"] == "stubs-0 is paused"
        await asyncio.sleep(3)  # it would have shrunk by now
        assert len((await it.status())["replicas"]) == 2
        await it.run("resume")
        await it.until_serving("stubs-0")


async def test_servers_that_tell_nothing_of_their_load_are_neither_added_nor_removed(
    tmp_path: Path,
) -> None:
    broken = (
        'env: {STUB_FAULTS: \'{"/metrics": {"kind": "status"}, "/metrics/": {"kind": "status"}}\'}'
    )
    async with scaled(tmp_path, extra=EXTRA) as it:
        file = it.fleet.directory / "fleet.yaml"
        file.write_text(file.read_text().replace("env: {STUB_FAULTS: '{}'}", broken))
        await it.run("up", "--yes")
        await it.run("scale", "2")
        await it.load.become(12)
        status = await it.until(lambda status: status["scaling"]["reason"] != "not measured yet")
        assert status["scaling"]["reason"] == "the load of stubs-0 is not known"
        await asyncio.sleep(3)
        await it.load.become(0)
        await asyncio.sleep(3)
        assert len((await it.status())["replicas"]) == 2
        assert it.load.failures == []


async def test_what_is_added_and_does_not_start_is_removed_and_tried_again_later(
    tmp_path: Path,
) -> None:
    one_is_enough = SCALE.replace("value: 4", "value: 0.1")  # the first request adds both
    async with scaled(tmp_path, one_is_enough) as it:
        interpreter = it.fleet.directory / "python"
        lines = interpreter.read_text().replace(
            "vllm*|*.serve) ", "vllm*|*.serve) echo no room; exit 1; "
        )
        interpreter.write_text(lines)
        await it.load.become(12)
        async with asyncio.timeout(30):
            while not any("does not serve" in event for event in await it.events()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await it.until(lambda status: len(status["replicas"]) == 1)
        messages = [event for event in await it.events() if "does not serve" in event]
        for name, message in zip(("stubs-1", "stubs-2"), sorted(messages), strict=True):
            failed = f"fleet scale: {name} was added and does not serve: exited with code 1"
            assert message.startswith(failed)
            assert message.endswith("again in 60 s at the earliest")
        await it.until_serving("stubs-0")
        assert [row["name"] for row in (await it.status())["replicas"]] == ["stubs-0"]
        await it.load.become(0)
        assert it.load.failures == []


async def test_tokens_per_second_decide_as_well(tmp_path: Path) -> None:
    scale = SCALE.replace("target: queue, value: 4", "target: tokens, value: 60")
    async with scaled(tmp_path, scale) as it:
        await it.load.become(6)  # each generates at most 20 per second
        await it.until_serving("stubs-0", "stubs-1")
        await it.load.become(1)
        status = await it.until_serving("stubs-0")
        assert status["scaling"]["target"] == "tokens"
        await it.load.become(0)
        assert it.load.failures == []

"""What a dry run says of each way of staging, and what `--stage` makes of a push."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.header import Tensor
from skyctl.errors import PreflightError, PushError
from skyctl.push.forecast import (
    PINNED_BYTES,
    Measured,
    Subject,
    assumptions,
    forecast,
    refusal,
    slots_of,
)
from skyctl.push.machine_facts import measure_reading, measured_before
from skyctl.push.worker_memory import copier_bytes
from skyctl.store.journal import PushRecord
from skyctl.transfer.gpu.devices import slot_sizes
from skyctl.transfer.plan import plan_chunks
from tests.unit.push.checkpoints import write_checkpoint
from tests.unit.push.fleets import Stubs, pushed, written_anew

GB = 10**9
CHUNKS = (4 * GB, 4 * GB, 4 * GB, 4 * GB)
KNOWN = Measured(fixed_s=0.08, loads=200 * GB, reads=40 * GB, source="push-3")


def told(transport: str, asked: str = "auto", *, free: int | None = None, **changes: Any) -> Any:
    subject = Subject(
        transport, CHUNKS, workers=2, worker_bytes=5 * GB, free_gpu_bytes=free, gpus=4
    )
    measured = replace(KNOWN, **changes)
    return {one.stage: one for one in forecast(subject, asked, measured)}


def test_memory_follows_from_the_slots() -> None:
    ipc = told("ipc", free=100 * GB)
    assert set(ipc) == {"gpu", "stream"}
    context = 686 << 20
    assert (ipc["gpu"].slots, ipc["gpu"].sender_gpu_bytes) == (4, 16 * GB + context)
    assert (ipc["stream"].slots, ipc["stream"].sender_gpu_bytes) == (2, 8 * GB + context)
    assert ipc["gpu"].worker_gpu_bytes == ipc["stream"].worker_gpu_bytes == 5 * GB
    assert ipc["gpu"].host_bytes == PINNED_BYTES + ((475 + 4 * 50 + 2 * 80) << 20)
    assert told("nccl")["gpu"].host_bytes == PINNED_BYTES + ((860 + 4 * 50 + 2 * 340) << 20)
    copies = Subject("nccl", CHUNKS, workers=2, gpus=4, copied=True, grouped=False)
    staged, streamed = forecast(copies, "auto", KNOWN)
    assert staged.sender_gpu_bytes == 16 * GB + context
    assert staged.host_bytes == PINNED_BYTES + ((630 + 4 * 50) << 20)
    assert streamed.sender_gpu_bytes == 8 * GB + (1466 << 20)
    shm = told("shm")
    assert set(shm) == {"host", "stream"}
    assert shm["host"].host_bytes == (4 + 2) * 4 * GB
    assert shm["stream"].host_bytes == (2 + 2) * 4 * GB
    assert shm["host"].sender_gpu_bytes == 0


def test_a_freeze_is_what_is_fixed_and_the_slower_of_loading_and_reading() -> None:
    found = told("ipc", free=100 * GB)
    assert found["gpu"].freeze_s == pytest.approx(0.08 + 16 / 200)
    assert found["stream"].freeze_s == pytest.approx(0.08 + 8 / 40)
    assert told("ipc", reads=1000 * GB)["stream"].freeze_s == pytest.approx(0.08 + 16 / 200)


def test_without_a_measurement_no_time_is_told_and_it_is_said() -> None:
    unknown = told("shm", fixed_s=None, loads=None)
    assert [one.freeze_s for one in unknown.values()] == [None, None]
    assert told("shm", reads=None)["stream"].freeze_s is None
    assert told("shm", reads=None)["host"].freeze_s is not None
    said = assumptions(Subject("shm", CHUNKS, 2), Measured())
    assert said[0] == "no push by shm into this fleet was measured yet: freeze not known"
    assert said[1] == "the files are too small to tell how fast they are read"
    said = assumptions(Subject("ipc", CHUNKS, 2), KNOWN)
    assert "as in push-3" in said[0] and "measured now" in said[1] and "not asked" in said[2]


@pytest.mark.parametrize(
    ("asked", "free", "chosen"),
    [
        ("auto", 100 * GB, "gpu"),
        ("auto", 17 * GB, "stream"),  # a tenth stays free
        ("auto", None, "stream"),
        ("stream", 100 * GB, "stream"),
        ("gpu", 17 * GB, "gpu"),
    ],
)
def test_auto_takes_the_gpu_when_all_of_it_fits(asked: str, free: int | None, chosen: str) -> None:
    found = told("ipc", asked, free=free)
    assert [one.stage for one in found.values() if one.chosen] == [chosen]
    if free == 17 * GB:
        assert "do not fit" in found["gpu"].problem and found["gpu"].freeze_s is None


def test_what_servers_take_on_the_same_gpu_is_left_free() -> None:
    subject = Subject("ipc", CHUNKS, 2, worker_bytes=5 * GB, reserve_bytes=10 * GB)
    subject = replace(subject, has_context=True)
    room = {
        free: forecast(replace(subject, free_gpu_bytes=free * GB), "auto", KNOWN)[0]
        for free in (27, 28)
    }
    assert room[28].chosen and not room[27].chosen
    assert "28" not in room[27].problem and "needed beside it" in room[27].problem
    with_context = replace(subject, free_gpu_bytes=28 * GB, has_context=False)
    assert not forecast(with_context, "auto", KNOWN)[0].chosen
    assert slot_sizes(150, [30, 30, 30], 2, reserve_bytes=50) == ([30, 30, 30], True)
    assert slot_sizes(149, [30, 30, 30], 2, reserve_bytes=50) == ([30, 30], False)


@pytest.mark.parametrize(
    ("stage", "transport", "words"),
    [
        ("gpu", "shm", "goes through host memory"),
        ("host", "ipc", "sends from GPU memory"),
        ("stream", "disk", "read by themselves"),
        ("auto", "disk", ""),
        ("gpu", "nccl", ""),
        ("host", "gloo", ""),
        ("stream", "ipc", ""),
    ],
)
def test_a_transport_says_what_it_cannot_stage(stage: str, transport: str, words: str) -> None:
    found = refusal(stage, transport)
    assert words in found and bool(found) == bool(words)


def test_slots_of_a_gpu_sender_fit_or_are_an_error() -> None:
    assert slot_sizes(100, [30, 30, 30], 2) == ([30, 30, 30], True)
    assert slot_sizes(99, [30, 30, 30], 2) == ([30, 30], False)
    assert slot_sizes(100, [30, 30, 30], 2, ring_only=True) == ([30, 30], False)
    assert slot_sizes(95, [30, 30, 30], 3) == ([30, 30, 30], True)  # asked for: no reserve
    with pytest.raises(MemoryError, match="--stage stream"):
        slot_sizes(89, [30, 30, 30], 3)
    with pytest.raises(MemoryError, match="--chunk-size"):
        slot_sizes(60, [30, 30, 30], 2)
    assert slots_of("gpu", 5) == slots_of("host", 5) == 5
    assert slots_of("auto", 5) == slots_of("stream", 5) == 2


def record(job: str, *, ok: bool = True, transport: str = "shm", **result: Any) -> PushRecord:
    made = {"transport": transport, "total_bytes": 10 * GB, "freeze_window_s": 1.0, **result}
    return PushRecord(job, 0.0, ok, "v", "/c", "d", {"stages": {"update": 0.5}, **made})


def test_rates_are_those_of_the_last_good_push_by_the_same_transport() -> None:
    pushes = [
        record("push-5", transport="ipc"),
        record("push-4", ok=False),
        record("push-3", stages={"update": 0.1, "drain": 0.0}),  # of parts, or with a trial
        record("push-2", stages={}),
        record("push-1"),
    ]
    found = measured_before(pushes, "shm")
    assert found == Measured(fixed_s=0.5, loads=20 * GB, source="push-1")
    assert measured_before(pushes, "nccl") == Measured()


def test_files_too_small_to_tell_have_no_rate(tmp_path: Path) -> None:
    assert measure_reading(read_checkpoint(str(write_checkpoint(tmp_path / "c")))) is None


async def test_a_dry_run_tells_each_way_and_what_it_stands_on(stubs: Stubs) -> None:
    plan = (await pushed(stubs, dry_run=True)).plan
    assert plan is not None
    ways = {one["stage"]: one for one in plan["forecasts"]}
    assert [stage for stage, one in ways.items() if one["chosen"]] == ["stream"]
    assert ways["stream"]["host_bytes"] == plan["memory_bytes"]
    assert ways["host"]["slots"] == plan["chunks"] > 2
    assert plan["assumptions"][0].startswith("no push by shm")
    stubs.fleet = replace(stubs.fleet, pushes=(record("push-1"),))
    again = (await pushed(stubs, dry_run=True, stage="host")).plan
    assert again is not None and "as in push-1" in again["assumptions"][0]
    assert [one["chosen"] for one in again["forecasts"]] == [True, False]
    assert again["memory_bytes"] == again["forecasts"][0]["host_bytes"]


async def test_streamed_the_rest_is_read_after_the_pause(stubs: Stubs) -> None:
    with pytest.raises(PushError, match="changed during the push"):
        await pushed(stubs, written_anew(stubs.new, "pause"), stage="stream", chunk_size=300)


async def test_staged_in_host_memory_all_is_read_before_the_first_pause(stubs: Stubs) -> None:
    result = await pushed(stubs, written_anew(stubs.new, "pause"), stage="host", chunk_size=300)
    assert result.chunks > 2
    assert all(server.ok for server in result.servers)
    assert {engine.digest for engine in stubs.engines} == {stubs.engines[0].digest} != {"base"}


@pytest.mark.parametrize("stage", ["gpu", "host"])
async def test_what_cannot_be_staged_so_is_refused_untouched(stubs: Stubs, stage: Any) -> None:
    transport = "shm" if stage == "gpu" else "disk"
    with pytest.raises(PreflightError, match=f"--stage {stage}"):
        await pushed(stubs, stage=stage, transport=transport)
    assert all(engine.log == [] for engine in stubs.engines)


def test_what_is_copied_is_staged_as_far_as_it_fits() -> None:
    """Half of it fits: three chunks wait on the GPU, and the rest is read in the freeze."""
    mib = 1 << 20
    subject = Subject(
        "ipc",
        chunk_bytes=(25 * mib,) * 6,
        workers=1,
        free_gpu_bytes=100 * mib,
        has_context=True,
        copied=True,
    )
    measured = Measured(fixed_s=0.05, loads=1000 * mib, reads=100 * mib, source="push-1")
    assert slot_sizes(100 * mib, subject.chunk_bytes, 2, as_many=True)[0] == [25 * mib] * 3
    (stream,) = (one for one in forecast(subject, "auto", measured) if one.chosen)
    assert (stream.stage, stream.slots) == ("stream", 3)
    assert stream.freeze_s == pytest.approx(0.05 + 0.75)
    (ring,) = (one for one in forecast(subject, "stream", measured) if one.chosen)
    assert (ring.slots, ring.freeze_s) == (2, pytest.approx(0.05 + 1.0))


def test_a_worker_that_copies_has_the_senders_chunks_or_two_buffers_beside_it() -> None:
    plan = plan_chunks([Tensor(str(n), "U8", (64,), 0, 64 * n, 64) for n in range(4)], 64)
    room = {0: 1 << 40, 1: (596 << 20) + 285, 2: (596 << 20) + 284}
    assert copier_bytes(plan, [(0,), (1,)], room) == 256 + (596 << 20)
    assert copier_bytes(plan, [(0,), (2,)], room) == 128
    assert copier_bytes(plan, [()], room) == 128

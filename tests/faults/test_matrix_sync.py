"""sync-weights meets every fault at every stage; the invariants are checked after each.

I1 a server that runs holds the old or all of the new weights; I6 what is reported is what is.
The sender is a real process; the servers are stubs in this one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyctl.core.requests import Sleep, Wake
from skyctl.errors import PreflightError, PushError, SkyctlError
from skyctl.push.request import PushRequest, RecordedState
from skyctl.push.source import rollback
from skyctl.push.transaction import push
from tests.faults.attached_fleet import attached_fleet
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.state import StubEngine
from tests.unit.docs.bounds import evaluated, names, worst
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.push.fleets import BEFORE_FREEZE, Recorder, Stubs, content

NEW = content(
    [
        {"names": [name], "crc32": [zlib.crc32(data)]}
        for name, (_, _, data) in tiny_tensors(50).items()
    ]
)
BAD = 1


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    """Three servers with short deadlines."""
    monkeypatch.setattr("skyctl.push.delivery._GRACE_S", 0.2)
    stubs = Stubs(tmp_path, count=3)
    stubs.limit(control_s=1.0, update_s=1.0, rendezvous_s=0.5)
    return stubs


def bound_s(stubs: Stubs) -> float:
    """The worst case of docs/bounds.md with the stubs' deadlines, and 5 s."""
    known = names() | {
        "control_timeout_s": stubs.fleet.timeouts.control_s,
        "update_timeout_s": stubs.fleet.timeouts.update_s,
        "rendezvous_timeout_s": stubs.fleet.timeouts.rendezvous_s,
        "_GRACE_S": 0.2,
        "_STARTUP_TIMEOUT_S": 0.0,
    }
    cases = [row[2] for row in worst() if row[0].startswith("sync-weights")]
    return max(evaluated(formula, known) for formula in cases) + 5.0


STARTS_S = 10.0
"""What two senders may take to start on a busy machine; their own deadline is far longer."""


async def run(stubs: Stubs, observer: Recorder | None = None, **changes: Any) -> dict[str, Any]:
    """One push to its end; what it says of each server, by name."""
    request = PushRequest(**{"checkpoint": str(stubs.new), **changes})
    async with asyncio.timeout(bound_s(stubs) + STARTS_S), stubs.client() as client:
        try:
            result = await push(
                request, stubs.fleet, client=client, observer=observer or Recorder()
            )
        except PushError as error:
            rows = error.details["servers"]
        else:
            rows = result.to_json()["servers"]
    return {row["server"]: row for row in rows}


def check_invariants(stubs: Stubs, rows: dict[str, Any]) -> None:
    """No server runs with anything but old or new weights, and each is as it was reported."""
    for number, engine in enumerate(stubs.engines):
        row = rows[f"demo-{number}"]
        if not engine.paused:
            assert engine.digest in ("base", NEW)
            assert not engine.half_loaded and not engine.update_open
        if row["state"] == "ready":
            assert not engine.paused
            assert (row["version"] == "default") == (engine.digest == "base")
            assert row["version"] == engine.weight_version
        else:
            assert engine.paused or not row["ok"]
        if row["state"] == "quarantined":
            assert engine.paused and not row["ok"] and row["version"] is None


STAGES = {
    "pause": "/pause",
    "init": "/init_weight_transfer_engine",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
    "reset-cache": "/reset_prefix_cache",
    "verify": "/collective_rpc",
    "publish": "/update_weight_version",
    "resume": "/resume",
}
BEFORE = {"verify": BEFORE_FREEZE}
"""Calls of a stage's route that are made before it, which must go well."""
KINDS = {
    "500": Fault("status"),
    "reset": Fault("reset"),
    "reset-after-commit": Fault("reset-after"),
    "hang": Fault("hang"),
    "hang-after-commit": Fault("hang-after"),
    "slow": Fault("delay", seconds=0.1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
async def test_a_server_that_fails_for_good_in_a_stage(stubs: Stubs, stage: str, kind: str) -> None:
    first = BEFORE.get(stage, 0) + 1
    fault = replace(KINDS[kind], calls=tuple(range(first, 100)))
    stubs.servers[BAD].asgi.faults[STAGES[stage]] = fault
    if kind in ("slow", "500"):  # nothing waits for a deadline, and a busy machine needs time
        stubs.limit(control_s=20.0, update_s=20.0)
    rows = await run(stubs)
    check_invariants(stubs, rows)
    if kind == "slow":
        assert all(row["ok"] for row in rows.values())
    others = [stubs.engines[0], stubs.engines[2]]
    # before the first byte all are undone; after it the others go on without the bad one
    before = stage in ("pause", "init", "start")
    expected = "base" if before and kind != "slow" else NEW
    assert [engine.digest for engine in others] == [expected] * 2
    assert not any(engine.paused for engine in others)


@pytest.mark.parametrize("stage", ["update", "finish", "verify", "publish", "resume"])
@pytest.mark.parametrize("kind", ["500", "reset", "reset-after-commit"])
async def test_a_fault_that_passes_once_leaves_no_server_frozen_or_mixed(
    stubs: Stubs, stage: str, kind: str
) -> None:
    fault = KINDS[kind]
    first = BEFORE.get(stage, 0) + 1
    stubs.servers[BAD].asgi.faults[STAGES[stage]] = Fault(fault.kind, calls=(first,))
    rows = await run(stubs)
    check_invariants(stubs, rows)
    assert {engine.digest for engine in stubs.engines} == {NEW}


@pytest.mark.parametrize("chunk", ["first", "third", "last"])
async def test_a_500_on_chunk_k_is_scrubbed_and_pushed_again(stubs: Stubs, chunk: str) -> None:
    count = (await planned(stubs))["chunks"]
    stubs.fail_update(BAD, calls=[{"first": 1, "third": 3, "last": count}[chunk]])
    rows = await run(stubs)
    check_invariants(stubs, rows)
    assert all(row["ok"] for row in rows.values())
    assert {engine.digest for engine in stubs.engines} == {NEW}


async def planned(stubs: Stubs) -> dict[str, Any]:
    """The plan of a dry run."""
    async with stubs.client() as client:
        request = PushRequest(str(stubs.new), dry_run=True)
        result = await push(request, stubs.fleet, client=client, observer=Recorder())
    assert result.plan is not None
    return result.plan


async def test_a_500_on_a_server_of_two_workers_is_not_retried_but_quarantined(
    stubs: Stubs,
) -> None:
    for engine in stubs.engines:
        engine.world_size = 2
    stubs.fail_update(BAD, calls=[2])
    rows = await run(stubs)
    check_invariants(stubs, rows)
    assert [row["state"] for row in rows.values()] == ["ready", "quarantined", "ready"]
    assert stubs.engines[BAD].log.count("start") == 1


async def test_an_engine_that_dies_while_it_is_updated_is_left_to_its_restart(
    stubs: Stubs,
) -> None:
    observer = Recorder()

    def die(done: int) -> None:
        stubs.engines[BAD].dead = stubs.engines[BAD].dead or done > 0

    observer.on_progress = die
    rows = await run(stubs, observer)
    assert [row["ok"] for row in rows.values()] == [True, False, True]
    assert rows["demo-1"]["state"] == "quarantined"
    assert [stubs.engines[n].digest for n in (0, 2)] == [NEW, NEW]


# --- the sender ---------------------------------------------------------------------------------


def senders() -> list[psutil.Process]:
    """Sender processes below this test."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if any("skyctl.transfer.sender" in word for word in child.cmdline())
    ]


def signalling(observer: Recorder, number: int, *, when: Callable[[int], bool]) -> list[int]:
    """Send a signal to the sender once, when its progress is `when`; pids it was sent to."""
    sent: list[int] = []

    def strike(done: int) -> None:
        if when(done) and not sent:
            for process in senders():
                sent.append(process.pid)
                process.send_signal(number)

    observer.on_progress = strike
    return sent


async def test_a_sender_killed_between_chunks_is_replaced_and_all_is_sent_again(
    stubs: Stubs,
) -> None:
    observer = Recorder()
    sent = signalling(observer, signal.SIGKILL, when=lambda done: done > 0)
    rows = await run(stubs, observer, chunk_size=300)
    check_invariants(stubs, rows)
    assert sent and "recover" in observer.stages
    assert {engine.digest for engine in stubs.engines} == {NEW}
    assert senders() == []


async def test_a_sender_that_hangs_is_killed_on_its_deadline(stubs: Stubs) -> None:
    observer = Recorder()
    sent = signalling(observer, signal.SIGSTOP, when=lambda done: done > 0)
    rows = await run(stubs, observer, chunk_size=300)
    check_invariants(stubs, rows)
    assert sent and {engine.digest for engine in stubs.engines} == {NEW}
    assert not any(psutil.pid_exists(pid) for pid in sent)


async def test_a_sender_killed_before_the_pause_leaves_every_server_untouched(
    stubs: Stubs,
) -> None:
    class Killing(Recorder):
        """Kills the sender as soon as there is one."""

    observer = Killing()

    async def strike() -> None:
        while not senders():  # noqa: ASYNC110 - another process's birth
            await asyncio.sleep(0.005)
        for process in senders():
            process.kill()

    striking: list[asyncio.Task[None]] = []
    observer.on_stage = lambda name: (
        striking.append(asyncio.create_task(strike())) if name == "stage" else None
    )
    with pytest.raises(PreflightError, match="sender"):
        await run(stubs, observer)
    await asyncio.gather(*striking)
    assert all(engine.log == [] for engine in stubs.engines)


async def test_a_rendezvous_that_never_completes_ends_at_its_deadline_and_all_are_released(
    stubs: Stubs,
) -> None:
    """The stubs answer /init and never join the sender's group."""
    rows = await run(stubs, transport="gloo")
    check_invariants(stubs, rows)
    assert {engine.digest for engine in stubs.engines} == {"base"}
    assert not any(engine.paused for engine in stubs.engines)
    assert senders() == []


async def test_a_server_that_dies_in_a_broadcast_ends_it_for_all_and_the_others_get_another(
    stubs: Stubs,
) -> None:
    """What is left of it in its group is what the kernel leaves of a process."""
    pytest.importorskip("torch")
    for server in stubs.servers:
        server.group.joins = True
    stubs.limit(update_s=5.0, rendezvous_s=20.0)
    observer = Recorder()

    def die(done: int) -> None:
        if done and "*" not in stubs.servers[BAD].asgi.faults:
            stubs.servers[BAD].asgi.faults["*"] = Fault("reset")
            stubs.servers[BAD].group.leave()

    observer.on_progress = die
    rows = await run(stubs, observer, transport="gloo", chunk_size=300)
    check_invariants(stubs, rows)
    assert [row["ok"] for row in rows.values()] == [True, False, True]
    assert [engine.digest for engine in stubs.engines if not engine.paused] == [NEW, NEW]
    offsets = [info["endpoint"]["rank_offset"] for info in stubs.engines[2].init_infos]
    assert offsets == [3, 2]  # the second group is of two servers
    assert senders() == []


# --- the checkpoint -----------------------------------------------------------------------------


async def test_a_checkpoint_deleted_while_it_is_pushed_leaves_no_server_mixed(
    stubs: Stubs,
) -> None:
    observer = Recorder()

    def delete(done: int) -> None:
        if done:
            shutil.rmtree(stubs.new, ignore_errors=True)

    observer.on_progress = delete
    check_invariants(stubs, await run(stubs, observer, chunk_size=300))


async def test_a_shard_truncated_while_it_is_pushed_is_not_sent(stubs: Stubs) -> None:
    observer = Recorder()

    def truncate(done: int) -> None:
        for shard in stubs.new.glob("*.safetensors") if done else ():
            os.truncate(shard, 100)

    observer.on_progress = truncate
    rows = await run(stubs, observer, chunk_size=300)
    check_invariants(stubs, rows)
    assert all(engine.paused or engine.digest == NEW for engine in stubs.engines)


async def test_a_tensor_larger_than_the_chunk_gets_a_chunk_that_fits_and_is_announced(
    stubs: Stubs,
) -> None:
    observer = Recorder()
    rows = await run(stubs, observer, chunk_size=100)
    assert all(row["ok"] for row in rows.values())
    assert any("larger than the chunk size of 100" in note for note in observer.notes)
    assert {engine.digest for engine in stubs.engines} == {NEW}


async def refused(stubs: Stubs, words: str, **changes: Any) -> SkyctlError:
    with pytest.raises(SkyctlError, match=words) as caught:
        await run(stubs, **changes)
    assert not isinstance(caught.value, PushError)
    assert not any(entry.startswith("pause") for e in stubs.engines for entry in e.log)
    return caught.value


async def test_servers_of_different_backends_are_refused(stubs: Stubs) -> None:
    stubs.engines[BAD].transfer_backend = "ipc"
    await refused(stubs, "different weight-transfer backends .*demo-1: ipc")


async def test_more_memory_than_there_is_refuses_before_anything(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.push.sender_way.available_memory", lambda: 1024)
    error = await refused(stubs, "the push needs .* of memory")
    assert "--chunk-size" in error.hint


@pytest.mark.parametrize("route", ["/is_paused", "/version", "/metrics/", "/get_world_size"])
async def test_a_server_that_hangs_in_preflight_is_refused_at_the_deadline(
    stubs: Stubs, route: str
) -> None:
    stubs.servers[BAD].asgi.faults[route] = Fault("hang")
    await refused(stubs, r"1 of 3 servers failed \(demo-1: no answer")


# --- states left by others ----------------------------------------------------------------------


async def test_after_a_failed_push_the_next_one_heals_the_fleet(stubs: Stubs) -> None:
    stubs.fail_update(BAD, calls=range(2, 100))
    rows = await run(stubs)
    assert rows["demo-1"]["state"] == "quarantined"
    del stubs.engines[BAD].update  # type: ignore[attr-defined]
    # what the state file says of it to the next push
    left = [
        replace(s, recorded=RecordedState(in_doubt=True, half_updated=True, thaw=True))
        for s in stubs.fleet.servers[BAD : BAD + 1]
    ]
    servers = (stubs.fleet.servers[0], *left, stubs.fleet.servers[2])
    stubs.fleet = replace(stubs.fleet, servers=servers)
    rows = await run(stubs)
    check_invariants(stubs, rows)
    assert {engine.digest for engine in stubs.engines} == {NEW}


async def test_pushing_the_same_checkpoint_twice_changes_nothing(stubs: Stubs) -> None:
    first = await run(stubs)
    second = await run(stubs)
    assert {row["version"] for row in first.values()} == {row["version"] for row in second.values()}
    assert {engine.digest for engine in stubs.engines} == {NEW}


# --- an attached fleet ---------------------------------------------------------------------------


async def test_after_a_partial_push_status_is_degraded_and_the_bad_server_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new = write_checkpoint(tmp_path / "base"), tmp_path / "new"
    write_checkpoint(new, tiny_tensors(50))
    servers = [StubServer(StubEngine(model=str(base), weigh=content)) for _ in range(3)]
    servers[BAD].asgi.faults["/finish_weight_update"] = Fault("status")
    async with attached_fleet(tmp_path, monkeypatch, servers) as fleet:
        job = await fleet.wait_job(await fleet.start_push(PushRequest(str(new))))
        assert job.state == "failed" and job.error is not None
        status = await fleet.status()
        assert [r.state for r in status.replicas] == ["ready", "quarantined", "ready"]
        assert status.health == "degraded"
        outcomes = await fleet.resume()
        assert [o.status for o in outcomes] == ["ok", "skipped", "ok"]
        assert servers[BAD].engine.paused, "never silently resumed"
        # the fault passes, and the next push frees it
        servers[BAD].asgi.faults.clear()
        job = await fleet.wait_job(await fleet.start_push(PushRequest(str(new))))
        assert job.state == "succeeded"
        assert (await fleet.status()).health == "healthy"


async def test_after_a_partial_push_a_rollback_returns_to_the_version_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_checkpoint(tmp_path / "base")
    servers = [StubServer(StubEngine(model=str(base), weigh=content)) for _ in range(3)]
    async with attached_fleet(tmp_path, monkeypatch, servers) as fleet:
        for number in (1, 2, 3):
            if number == 3:
                servers[BAD].asgi.faults["/finish_weight_update"] = Fault("status")
            path = write_checkpoint(tmp_path / f"v{number}", tiny_tensors(number))
            asked = PushRequest(str(path), weight_version=f"v{number}")
            await fleet.wait_job(await fleet.start_push(asked))
        assert (await fleet.status()).weight_version == "v3"  # of two servers
        back = rollback(PushRequest(""), (await fleet.weights()).pushes)
    assert back.weight_version == "v2"


async def test_discarded_weights_are_pushed_between_waking_weights_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new = write_checkpoint(tmp_path / "base"), tmp_path / "new"
    write_checkpoint(new, tiny_tensors(50))
    servers = [StubServer(StubEngine(model=str(base), weigh=content)) for _ in range(2)]
    async with attached_fleet(tmp_path, monkeypatch, servers) as fleet:
        await fleet.sleep(Sleep(level=2))
        await fleet.wake(Wake(tags=("weights",)))
        job = await fleet.wait_job(await fleet.start_push(PushRequest(str(new))))
        assert job.state == "succeeded", job.error
        assert [o.status for o in await fleet.wake(Wake(tags=("kv_cache",)))] == ["ok", "ok"]
        assert {server.engine.digest for server in servers} == {NEW}
        assert not any(server.engine.paused for server in servers)

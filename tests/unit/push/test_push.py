"""The transaction: whatever fails, every server ends at one version, or paused and reported."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl import engines
from skyctl.errors import PreflightError, PushError, SkyctlError, StateUnwritable
from skyctl.push import delivery, senderless_delivery
from skyctl.push.check import check
from skyctl.push.request import PushRequest, RecordedState
from skyctl.push.verify import weights_digest
from skyctl.transfer.plan import ChunkPlan
from tests.stub.faults import Fault
from tests.stub.state import EngineRefused, StubEngine, digest_of_updates
from tests.unit.push.checkpoints import filled, tiny_tensors, write_checkpoint
from tests.unit.push.fleets import (
    BEFORE_FREEZE,
    STAGES,
    Recorder,
    Stubs,
    check_invariant,
    failing_push,
    push_new,
    states,
    written_anew,
)


async def test_a_push_brings_every_server_to_one_version(stubs: Stubs) -> None:
    observer = Recorder()
    calls = stubs.servers[0].asgi.calls
    asked: dict[str, int] = {}
    observer.on_stage = lambda name: asked.update({name: calls["/get_world_size"]})
    result = await push_new(stubs, observer)
    assert observer.stages == STAGES
    # facts that do not change are asked for once, and not while servers are frozen
    assert asked["stage"] == 2 == calls["/get_world_size"]
    assert {engine.digest for engine in stubs.engines} == {stubs.engines[0].digest} != {"base"}
    assert [engine.weight_version for engine in stubs.engines] == [result.version] * 2
    assert not any(engine.paused for engine in stubs.engines)
    assert result.version.startswith("new@")
    assert observer.done[-1] == result.total_bytes
    assert 0 < result.freeze_window_s <= result.seconds
    assert [(s.ok, s.state, s.version) for s in result.servers] == [
        (True, "ready", result.version)
    ] * 2
    received = {name for update in stubs.engines[0].update_infos for name in update["names"]}
    assert received == set(tiny_tensors())
    assert stubs.engines[0].log[-1] == "resume"
    check_invariant(stubs)


async def test_nothing_that_was_computed_with_the_old_weights_stays_cached(stubs: Stubs) -> None:
    await push_new(stubs)
    assert [engine.cached for engine in stubs.engines] == [set(), set()]


async def test_a_server_whose_connector_keeps_old_kv_blocks_has_failed(stubs: Stubs) -> None:
    stubs.engines[1].connector_fails = True
    error = await failing_push(stubs)
    assert "KV blocks of other weights are still cached" in str(error.details)
    assert states(error) != ["ready", "ready"]
    check_invariant(stubs)


async def test_the_version_depends_on_the_content_not_on_chunks_or_shards(stubs: Stubs) -> None:
    first = await push_new(stubs, chunk_size=300)
    write_checkpoint(stubs.new / "again" / "new", tiny_tensors(50))
    second = await push_new(stubs, checkpoint=str(stubs.new / "again" / "new"))
    third = await push_new(stubs, checkpoint=str(stubs.base))
    assert first.version == second.version
    assert third.version.split("@")[1] != first.version.split("@")[1]


async def test_a_users_version_is_taken_as_it_is(stubs: Stubs) -> None:
    result = await push_new(stubs, weight_version="step-7")
    assert stubs.engines[0].weight_version == result.version == "step-7"


async def test_a_dry_run_touches_nothing(stubs: Stubs) -> None:
    result = await push_new(stubs, dry_run=True)
    assert result.plan is not None
    assert result.plan["transport"] == "shm"
    assert result.plan["chunks"] > 1
    assert all(engine.log == [] for engine in stubs.engines)


async def refused(stubs: Stubs, words: str, **changes: Any) -> SkyctlError:
    with pytest.raises(SkyctlError, match=words) as caught:
        await push_new(stubs, **changes)
    assert not isinstance(caught.value, PushError)
    assert all("pause keep" not in engine.log for engine in stubs.engines)
    return caught.value


async def test_a_checkpoint_of_another_shape_is_refused_untouched(stubs: Stubs) -> None:
    tensors = {**tiny_tensors(), "model.norm.weight": filled([9], 1)}
    other = write_checkpoint(stubs.new / "other", tensors)
    await refused(stubs, r"model.norm.weight is \[9\] here", checkpoint=str(other))


async def test_a_name_that_no_server_can_be_told_is_refused_untouched(
    stubs: Stubs, tmp_path: Path
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")  # its name becomes the version's
    write_checkpoint(Path(path), tiny_tensors(50))
    for changes in ({"checkpoint": path}, {"weight_version": "\udcff"}):
        await refused(stubs, r"'.*\\udcff' is not UTF-8", **changes)
    await refused(stubs, r"'a\\nb' is more than one line", weight_version="a\nb")
    await refused(stubs, r"'a\\x1b\[31mb' has control characters", weight_version="a\x1b[31mb")


async def test_a_sleeping_server_is_refused_with_the_command_that_wakes_it(stubs: Stubs) -> None:
    await stubs.engines[1].sleep(1, "keep")
    stubs.engines[1].log.clear()
    error = await refused(stubs, "demo-1 is asleep")
    assert "wake" in error.hint


async def test_servers_of_different_versions_are_refused(stubs: Stubs) -> None:
    stubs.engines[1].version = "0.31.0"
    await refused(stubs, "different versions of vLLM .*demo-1: 0.31.0")


async def test_a_server_that_does_not_answer_is_refused_before_anything(stubs: Stubs) -> None:
    stubs.servers[1].asgi.faults["/is_paused"] = Fault("status")
    await refused(stubs, "1 of 2 servers failed")


async def test_a_checkpoint_that_changes_while_staged_is_refused(stubs: Stubs) -> None:
    observer = written_anew(stubs.new, "stage")
    with pytest.raises(PreflightError, match="changed"):
        await push_new(stubs, observer)
    assert all("pause keep" not in engine.log for engine in stubs.engines)


@pytest.mark.parametrize(
    "route", ["/pause", "/init_weight_transfer_engine", "/start_weight_update"]
)
@pytest.mark.parametrize("kind", ["status", "reset", "reset-after"])
async def test_a_failure_before_the_first_byte_is_undone(
    stubs: Stubs, route: str, kind: str
) -> None:
    stubs.servers[1].asgi.faults[route] = Fault(kind)
    error = await failing_push(stubs)
    assert [engine.digest for engine in stubs.engines] == ["base", "base"]
    assert not stubs.engines[0].paused
    assert not stubs.engines[0].update_open
    assert states(error)[0] == "ready"
    assert error.details["servers"][0]["version"] == "default"
    check_invariant(stubs)


async def test_an_engine_that_is_stuck_is_not_waited_for_while_the_push_is_undone(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_GRACE_S", 0.4)
    stubs.limit(control_s=0.5, rendezvous_s=0.1)
    for route in ("/init_weight_transfer_engine", "/is_paused", "/resume"):
        # the first two are the preflight's and the pause's own
        calls = (3,) if route == "/is_paused" else ()
        stubs.servers[1].asgi.faults[route] = Fault("hang", calls=calls)
    error = await failing_push(stubs)
    assert states(error) == ["ready", "paused"]
    assert not stubs.engines[0].paused
    assert stubs.servers[1].asgi.calls["/resume"] == 0


async def test_a_failed_chunk_is_scrubbed_and_pushed_again_with_a_fresh_sender(
    stubs: Stubs,
) -> None:
    stubs.fail_update(1, calls=[2])
    observer = Recorder()
    result = await push_new(stubs, observer)
    assert "recover" in observer.stages
    assert len({engine.digest for engine in stubs.engines}) == 1
    assert stubs.engines[1].digest != "garbage"
    assert stubs.engines[1].log.count("init") == 2
    # the scrub: a session that loads nothing, between the broken one and the full one
    broken = stubs.engines[1].log.index("update failed")
    assert stubs.engines[1].log[broken + 1 : broken + 5] == ["init", "start", "finish", "start"]
    assert stubs.engines[0].log.count("init") == 1
    assert all(server.ok for server in result.servers)
    check_invariant(stubs)


async def test_a_server_that_fails_twice_is_quarantined_and_the_others_go_on(stubs: Stubs) -> None:
    stubs.fail_update(1, calls=range(2, 100))
    error = await failing_push(stubs)
    assert states(error) == ["ready", "quarantined"]
    assert [engine.paused for engine in stubs.engines] == [False, True]
    assert error.details["servers"][0]["version"] == stubs.engines[0].weight_version
    assert error.details["servers"][1]["version"] is None
    assert "no room" in error.details["servers"][1]["detail"]
    check_invariant(stubs)


async def test_a_server_that_hangs_is_quarantined_without_a_second_try(stubs: Stubs) -> None:
    stubs.servers[1].asgi.faults = {
        "/update_weights": Fault("reset"),
        "/is_paused": Fault("reset", calls=(4, 5, 6, 7)),
    }
    error = await failing_push(stubs)
    assert states(error) == ["ready", "quarantined"]
    assert stubs.engines[1].log.count("init") == 1
    check_invariant(stubs)


async def test_a_failed_finish_is_repaired(stubs: Stubs) -> None:
    stubs.servers[0].asgi.faults["/finish_weight_update"] = Fault("status", calls=(1,))
    result = await push_new(stubs)
    assert all(server.ok for server in result.servers)
    assert len({engine.digest for engine in stubs.engines}) == 1
    check_invariant(stubs)


async def test_a_session_that_a_dead_pusher_left_open_is_closed_first(stubs: Stubs) -> None:
    stubs.engines[0].start_update()
    result = await push_new(stubs)
    assert all(server.ok for server in result.servers)
    assert stubs.engines[0].digest == stubs.engines[1].digest
    check_invariant(stubs)


@pytest.mark.parametrize("thaw", [True, False], ids=["frozen by the push", "frozen before"])
async def test_a_session_left_open_is_closed_also_where_servers_read_files_themselves(
    stubs: Stubs, thaw: bool
) -> None:
    stubs.engines[0].start_update()
    stubs.record(in_doubt=True, thaw=thaw)
    result = await push_new(stubs, transport="disk")
    assert all(server.ok for server in result.servers)
    assert stubs.engines[0].digest == stubs.engines[1].digest
    assert not any(engine.update_open for engine in stubs.engines)


async def test_a_session_that_lacks_tensors_is_closed_at_the_second_request(stubs: Stubs) -> None:
    engine = stubs.engines[0]
    finish = engine.finish_update

    def complain(weight_version: str | None) -> None:
        engine.finish_update = finish  # type: ignore[method-assign]
        raise EngineRefused("only 1 of 9 announced tensors were received")

    engine.start_update()
    engine.finish_update = complain  # type: ignore[method-assign]
    stubs.record(in_doubt=True, half_updated=True, thaw=True)
    assert all(server.ok for server in (await push_new(stubs, transport="disk")).servers)
    assert not engine.update_open


@pytest.mark.parametrize("closes", [True, False])
async def test_a_leftover_session_and_a_failure_before_bytes_leave_the_server_quarantined(
    stubs: Stubs, closes: bool
) -> None:
    stubs.engines[0].start_update()
    if not closes:
        stubs.servers[0].asgi.faults["/finish_weight_update"] = Fault("status")
    stubs.servers[1].asgi.faults["/start_weight_update"] = Fault("status")
    error = await failing_push(stubs)
    assert states(error) == ["quarantined", "ready"]
    assert [engine.paused for engine in stubs.engines] == [True, False]


async def test_a_server_whose_weights_differ_is_outvoted(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, count=3)
    stubs.engines[2].weigh = lambda updates: "content of something else"
    error = await failing_push(stubs)
    assert states(error) == ["ready", "ready", "quarantined"]
    assert [engine.paused for engine in stubs.engines] == [False, False, True]
    assert stubs.engines[2].weight_version == "default"


def arrange(engine: StubEngine, world_size: int) -> None:
    """As a server with so many tensor-parallel ranks: each holds a part of every tensor."""
    engine.world_size, engine.arrangement = world_size, f"tp{world_size}"
    engine.weigh = lambda updates: f"a {world_size}th of {digest_of_updates(updates)}"


async def test_servers_of_different_world_sizes_take_the_same_checkpoint(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, count=3)
    for engine in stubs.engines[1:]:
        arrange(engine, 2)
    result = await push_new(stubs)
    assert all(server.ok for server in result.servers)
    digests = [server.weights_digest for server in result.servers]
    assert digests[0] != digests[1] == digests[2]
    assert digests[1].endswith(":tp2")


async def test_a_server_is_compared_with_those_that_are_arranged_like_it(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, count=4)
    for engine in stubs.engines[1:]:
        arrange(engine, 2)
    stubs.engines[3].weigh = lambda updates: "content of something else"
    error = await failing_push(stubs)
    assert states(error) == ["ready", "ready", "ready", "quarantined"]


async def test_two_servers_that_disagree_are_both_quarantined(stubs: Stubs) -> None:
    stubs.engines[1].weigh = lambda updates: "content of something else"
    error = await failing_push(stubs)
    assert states(error) == ["quarantined", "quarantined"]
    assert all(engine.paused for engine in stubs.engines)


async def test_a_resume_that_is_lost_once_is_repeated(stubs: Stubs) -> None:
    stubs.servers[1].asgi.faults["/resume"] = Fault("reset", calls=(1,))
    result = await push_new(stubs)
    assert all(server.ok for server in result.servers)
    assert not stubs.engines[1].paused


async def test_a_server_that_cannot_be_resumed_is_reported_paused_at_the_new_version(
    stubs: Stubs,
) -> None:
    stubs.servers[1].asgi.faults["/resume"] = Fault("status")
    error = await failing_push(stubs)
    assert states(error) == ["ready", "paused"]
    assert error.details["servers"][1]["version"] == stubs.engines[1].weight_version


async def test_a_checkpoint_rewritten_while_it_is_sent_is_not_sent_again(stubs: Stubs) -> None:
    observer = Recorder()

    def touch(done: int) -> None:
        if done:
            for shard in stubs.new.glob("*.safetensors"):
                os.utime(shard, ns=(1, 1))

    observer.on_progress = touch
    with pytest.raises(PushError, match="changed during the push") as caught:
        await push_new(stubs, observer, chunk_size=300)
    assert states(caught.value) == ["quarantined", "quarantined"]
    assert all(engine.paused for engine in stubs.engines)
    assert stubs.engines[0].log.count("init") == 1


async def test_an_observer_that_fails_does_not_stop_a_push(stubs: Stubs) -> None:
    observer = Recorder()

    def disk_full(done: int) -> None:
        raise OSError("no space left on device")

    observer.on_progress = disk_full
    result = await push_new(stubs, observer)
    assert all(server.ok for server in result.servers)
    assert any("no space left" in note for note in result.notes)


async def test_disk_makes_every_server_read_by_itself(stubs: Stubs) -> None:
    result = await push_new(stubs, transport="disk")
    assert [engine.log.count("reload") for engine in stubs.engines] == [1, 1]
    assert result.chunks == 0
    assert [engine.weight_version for engine in stubs.engines] == [result.version] * 2
    assert stubs.engines[0].digest == stubs.engines[1].digest != "base"
    assert not any(engine.paused for engine in stubs.engines)


async def test_a_directory_that_vanishes_while_servers_read_it_fails_the_push_of_all(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotate(point: str) -> None:
        if point == "push.update.sent" and stubs.new.exists():
            stubs.new.rename(stubs.new.with_name("rotated"))

    monkeypatch.setattr(senderless_delivery, "reached", rotate)
    error = await failing_push(stubs, transport="disk")
    assert "vanished during the push" in error.message
    assert states(error) == ["quarantined", "quarantined"]


async def test_a_failed_reload_quarantines_that_server(stubs: Stubs) -> None:
    stubs.servers[1].asgi.faults["/collective_rpc"] = Fault("status", calls=(BEFORE_FREEZE + 2,))
    error = await failing_push(stubs, transport="disk")
    assert states(error) == ["ready", "quarantined"]


async def test_a_server_with_dummy_weights_refuses_disk_and_keeps_its_weights(stubs: Stubs) -> None:
    stubs.servers[1].asgi.faults["/collective_rpc"] = Fault(
        "status", text="Model reloading with `dummy` format", calls=(BEFORE_FREEZE + 2,)
    )
    error = await failing_push(stubs, transport="disk")
    assert states(error) == ["ready", "ready"]
    assert error.details["servers"][1]["version"] == "default"
    assert "--load-format dummy" in error.message


def refuse_reload(path: str) -> None:
    raise EngineRefused("Model reloading with `dummy` format")


async def test_a_half_updated_server_that_refuses_disk_is_not_resumed(stubs: Stubs) -> None:
    stubs.engines[0].reload = refuse_reload  # type: ignore[method-assign]
    await stubs.engines[0].pause("keep")
    stubs.record(in_doubt=True, half_updated=True, thaw=True)
    error = await failing_push(stubs, transport="disk")
    assert states(error) == ["quarantined", "ready"]
    assert [engine.paused for engine in stubs.engines] == [True, False]


# --- nobody else thaws what is being loaded, and intents come first -----------------------------


@pytest.mark.parametrize("stage", ["pause", "start", "update"])
async def test_an_intent_that_cannot_be_put_on_record_undoes_the_push(
    stubs: Stubs, stage: str
) -> None:
    observer = Recorder()

    def full(name: str) -> None:
        if name == stage:
            raise StateUnwritable("cannot write state.sqlite: no space", hint="free space")

    observer.on_stage = full
    with pytest.raises(SkyctlError, match="no space") as caught:
        await push_new(stubs, observer)
    assert caught.value.hint == "free space"
    for engine in stubs.engines:
        assert engine.digest == "base" and not engine.paused and not engine.update_open
        assert "update" not in engine.log


@pytest.mark.parametrize("holds", ["what was verified", "something else"])
@pytest.mark.parametrize("stage", ["pause", "start", "never"])
async def test_an_undone_push_gives_back_what_an_earlier_one_froze_under_the_label_it_verified(
    stubs: Stubs, stage: str, holds: str
) -> None:
    observer = Recorder()
    async with stubs.client() as client:
        left = engines.server(client, stubs.fleet.servers[0].target, timeout_s=5.0)
        digest = (await weights_digest(left, timeout_s=5.0)).digest
    known = digest if holds == "what was verified" else "another"
    first = replace(
        stubs.fleet.servers[0],
        recorded=RecordedState(
            in_doubt=True, thaw=True, verified_as="step-7", weights_digest=known
        ),
    )
    stubs.fleet = replace(stubs.fleet, servers=(first, *stubs.fleet.servers[1:]))
    await stubs.engines[0].pause("keep")

    def full(name: str) -> None:
        if name == stage:
            raise StateUnwritable("cannot write state.sqlite: no space")

    observer.on_stage = full
    for engine in stubs.engines:  # where nothing is undone, nothing can be loaded either
        engine.reload = refuse_reload  # type: ignore[method-assign]
    with pytest.raises(PushError) as caught:
        await push_new(stubs, observer, transport="disk")
    given_back = holds == "what was verified"
    assert states(caught.value) == ["ready" if given_back else "quarantined", "ready"]
    assert [engine.paused for engine in stubs.engines] == [not given_back, False]
    label = "step-7" if given_back else "default"
    assert [engine.weight_version for engine in stubs.engines] == [label, "default"]


async def test_a_prefill_server_is_paused_before_the_decode_servers_that_fetch_its_kv(
    stubs: Stubs,
) -> None:
    decode, prefill = stubs.engines
    prefill.kv_reader = decode
    observer = Recorder()
    await push_new(stubs, observer)
    assert {engine.digest for engine in stubs.engines} == {decode.digest} != {"base"}
    assert any("demo-1 paused first" in note for note in observer.notes)


async def test_kv_that_nobody_fetches_is_waited_for_no_longer_than_its_lease(stubs: Stubs) -> None:
    decode, prefill = stubs.engines
    await decode.pause("keep")
    prefill.kv_reader, prefill.kv_lease_s = decode, 0.3
    stubs.limit(control_s=0.5)
    error = await failing_push(stubs)
    assert "demo-1: pause: no answer in 0.8 s: its requests keep KV" in error.message
    assert "for longer than their lease of 0.3 s" in error.message
    assert not prefill.paused and decode.paused
    check_invariant(stubs)


async def test_versions_of_a_model_are_cut_into_chunks_once(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path)
    other = write_checkpoint(tmp_path / "other", tiny_tensors(60), shards=2)
    async with stubs.client() as client:

        async def plan(path: Path, chunk_size: int | None = None) -> ChunkPlan:
            request = PushRequest(str(path), chunk_size=chunk_size)
            return (await check(request, stubs.fleet, client=client)).way.chunks

        first = await plan(stubs.new)
        assert await plan(other) is first  # by which a sender knows it again
        assert await plan(stubs.base) is not first  # in one shard
        assert len((await plan(other, 1 << 20)).chunks) == 1 < len(first.chunks)

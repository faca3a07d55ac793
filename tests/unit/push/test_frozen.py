"""A push writes into servers that are frozen, and says so only of those that stayed so."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from skyctl import engines
from skyctl.errors import PreflightError, PushError, ServerError
from skyctl.push import freeze, frozen, servers
from skyctl.push.request import RecordedState
from skyctl.push.servers import PushedServer
from tests.stub.faults import Fault
from tests.stub.state import Scheduler, StubEngine
from tests.unit.push.fleets import Recorder, Stubs, check_invariant, failing_push, push_new, states


async def test_a_server_paused_before_stays_paused(stubs: Stubs) -> None:
    await stubs.engines[1].pause("keep")
    result = await push_new(stubs)
    assert [engine.paused for engine in stubs.engines] == [False, True]
    assert [server.state for server in result.servers] == ["ready", "paused"]


async def test_a_server_paused_before_is_held_however_long_it_takes_to_say_so(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds the push dead would thaw it otherwise."""
    monkeypatch.setattr(freeze, "_REPORT_S", 0.02)
    held, observer = stubs.engines[1], Recorder()
    held.requests = 2
    await held.pause("keep")
    stubs.servers[1].asgi.faults["/pause"] = Fault("delay", 0.2)
    await push_new(stubs, observer)
    reported = [(state, detail) for name, state, detail in observer.servers if name == "demo-1"]
    assert ("held", "waits for 2 requests") in reported
    assert "pausing" not in [state for state, _ in reported]


@pytest.mark.parametrize("by_fleet", [False, True])
async def test_a_server_that_was_paused_and_is_thawed_by_somebody_else_is_paused_by_the_push(
    by_fleet: bool, stubs: Stubs
) -> None:
    """And thawed at its end, unless the fleet's own user had paused it."""
    held, observer = stubs.engines[0], Recorder()
    await held.pause("keep")
    first, *others = stubs.fleet.servers
    stubs.fleet = replace(
        stubs.fleet, servers=(replace(first, recorded=RecordedState(paused=by_fleet)), *others)
    )

    def thaw(stage: str) -> None:
        if stage == "pause":
            held.scheduler = Scheduler.RUNNING

    observer.on_stage = thaw
    await push_new(stubs, observer)
    assert held.log.count("pause keep") == 2
    assert held.paused == by_fleet
    assert "unpaused" not in "".join(held.served)


async def test_a_server_that_was_paused_and_starts_again_amid_the_push_is_the_pushs_to_thaw(
    stubs: Stubs,
) -> None:
    """Recovery would leave it frozen otherwise, for a hand that never paused this process."""
    restarted, observer = stubs.engines[1], Recorder()
    await restarted.pause("keep")

    def start_again(done: int) -> None:
        restarted.scheduler = Scheduler.RUNNING

    observer.on_progress = start_again
    with pytest.raises(PushError, match="it was started again") as caught:
        await push_new(stubs, observer)
    assert states(caught.value) == ["ready", "quarantined"]
    last = [state for name, state, _ in observer.servers if name == "demo-1"]
    assert restarted.paused and last.index("held") < last.index("pausing")
    assert last[-1] == "quarantined"


async def test_nothing_is_sent_to_a_server_that_was_not_seen_paused(stubs: Stubs) -> None:
    async def pause(mode: str) -> None:
        """It answers, and goes on."""

    stubs.engines[1].pause = pause  # type: ignore[method-assign]
    error = await failing_push(stubs)
    assert "is not paused" in error.message
    assert all("start" not in engine.log for engine in stubs.engines)
    check_invariant(stubs)


@pytest.mark.parametrize("transport", ["shm", "disk"])
async def test_no_update_is_opened_in_a_server_started_anew_since_all_were_seen_paused(
    transport: str, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start empties layers."""

    def reach(point: str) -> None:
        if point == "push.start.call":
            stubs.engines[1].scheduler = Scheduler.RUNNING

    monkeypatch.setattr("skyctl.push.transaction.reached", reach)
    error = await failing_push(stubs, transport=transport)
    assert "it was started again" in error.message
    assert "start" not in stubs.engines[1].log
    assert stubs.engines[1].digest == "base"
    check_invariant(stubs)


async def test_a_push_that_was_stopped_after_it_saw_a_server_paused_looks_again(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the server was started again: the start would empty layers that answer."""
    stopped_s, look, starting = 0.0, frozen._thaw_seen, False

    def reach(point: str) -> None:
        nonlocal starting
        starting = starting or point == "push.start.call"

    async def stopped_behind(server: PushedServer) -> str:
        nonlocal stopped_s
        problem = await look(server)
        if starting and server.name == "demo-1" and not stopped_s:
            stopped_s = 5.0
            stubs.engines[1].scheduler = Scheduler.RUNNING
        return problem

    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + stopped_s, perf_counter=time.perf_counter
    )
    monkeypatch.setattr("skyctl.push.transaction.reached", reach)
    monkeypatch.setattr(frozen, "_thaw_seen", stopped_behind)
    monkeypatch.setattr(frozen, "time", clock)
    error = await failing_push(stubs)
    assert "it was started again" in error.message
    assert "start" not in stubs.engines[1].log


async def test_a_failed_push_leaves_nothing_thawed_that_was_thawed_while_it_froze_another(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hold parts of the weights. Another program thaws one after the push has looked at it
    for what would be the last time, as the push finds the other thawed."""
    first, second = stubs.engines
    for number in (0, 1):
        stubs.fail_update(number, calls=range(1, 10))
    pause, ended = second.pause, False

    def reach(point: str) -> None:
        nonlocal ended
        if point == "push.finish.done":
            ended, second.scheduler = True, Scheduler.RUNNING

    async def pause_late(mode: str) -> None:
        await asyncio.sleep(0.05)
        await pause(mode)
        if ended and first.log.count("pause abort") == 0:
            first.scheduler = Scheduler.RUNNING

    monkeypatch.setattr("skyctl.push.transaction.reached", reach)
    monkeypatch.setattr(second, "pause", pause_late)
    error = await failing_push(stubs)
    assert states(error) == ["quarantined", "quarantined"]
    assert [engine.paused for engine in stubs.engines] == [True, True]


async def test_a_server_that_was_thawed_while_it_was_loaded_is_no_success(stubs: Stubs) -> None:
    thawed, observer = stubs.engines[1], Recorder()

    def thaw(done: int) -> None:
        thawed.scheduler = Scheduler.RUNNING

    observer.on_progress = thaw
    with pytest.raises(PushError, match="another program resumed it") as caught:
        await push_new(stubs, observer)
    assert states(caught.value) == ["ready", "quarantined"]
    assert thawed.paused


def thawed_for_a_moment(engine: StubEngine) -> None:
    """Another client resumed it, had an answer, and paused it again."""
    engine.scheduler = Scheduler.RUNNING
    engine.generation_tokens += 1
    engine.scheduler = Scheduler.PAUSED_ALL


@pytest.mark.parametrize("transport", ["shm", "disk"])
async def test_a_server_that_answered_while_it_was_loaded_is_no_success(
    transport: str, stubs: Stubs
) -> None:
    observer = Recorder()
    observer.on_stage = lambda name: (
        thawed_for_a_moment(stubs.engines[1]) if name == "finish" else None
    )
    with pytest.raises(PushError, match="generated tokens while it was frozen") as caught:
        await push_new(stubs, observer, transport=transport)
    assert states(caught.value) == ["ready", "quarantined"]
    assert stubs.engines[1].paused


async def test_a_server_that_answered_before_the_first_byte_keeps_its_weights(
    stubs: Stubs,
) -> None:
    observer = Recorder()
    observer.on_stage = lambda name: (
        thawed_for_a_moment(stubs.engines[1]) if name == "start" else None
    )
    with pytest.raises(PushError, match="generated tokens while it was frozen") as caught:
        await push_new(stubs, observer)
    assert states(caught.value) == ["ready", "ready"]
    assert {engine.digest for engine in stubs.engines} == {"base"}


async def test_tokens_that_are_counted_late_are_those_before_the_freeze(stubs: Stubs) -> None:
    engine, observer = stubs.engines[1], Recorder()

    def count_late(name: str) -> None:
        if name == "pause":
            asyncio.get_running_loop().call_later(
                0.01, lambda: setattr(engine, "generation_tokens", 5)
            )

    observer.on_stage = count_late
    await push_new(stubs, observer)
    assert engine.generation_tokens == 5


async def test_a_server_that_is_thawed_after_the_last_look_is_frozen_as_the_push_fails(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    thawed = stubs.servers[1]
    thawed.asgi.faults = {"/update_weight_version": Fault("status")}

    def reach(point: str) -> None:
        if point == "push.published":
            thawed.engine.scheduler = Scheduler.RUNNING

    monkeypatch.setattr("skyctl.push.commit.reached", reach)
    with pytest.raises(PushError) as caught:
        await push_new(stubs)
    assert states(caught.value) == ["ready", "quarantined"]
    assert thawed.engine.paused


async def test_a_half_loaded_server_that_a_refused_push_freezes_is_the_next_pushs_to_thaw(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs although an earlier push left it half loaded, and was frozen by somebody else."""
    first, *others = stubs.fleet.servers
    left = RecordedState(in_doubt=True, half_updated=True)
    stubs.fleet = replace(stubs.fleet, servers=(replace(first, recorded=left), *others))
    observer = Recorder()

    def refuse(point: str) -> None:
        if point == "push.staged":
            raise PreflightError("no room")

    monkeypatch.setattr("skyctl.push.transaction.reached", refuse)
    with pytest.raises(PreflightError):
        await push_new(stubs, observer)
    assert [engine.paused for engine in stubs.engines] == [True, False]
    changes = [state for name, state, _ in observer.servers if name == "demo-0"]
    assert changes[-2:] == ["pausing", "quarantined"]


async def test_a_session_that_a_scrub_may_have_opened_counts_as_open(stubs: Stubs) -> None:
    """It would be resumed with it, if nothing was sent before."""
    given, stub = stubs.fleet.servers[0], stubs.servers[0]
    stub.asgi.faults["/start_weight_update"] = Fault("reset-after", calls=(2,))
    async with stubs.client() as client:
        server = PushedServer(given, engines.server(client, given.target, timeout_s=5.0))
        with pytest.raises(ServerError):
            await servers.scrub(server)
    assert stub.engine.update_open and server.did.open


async def test_a_push_that_has_ended_pauses_nobody(stubs: Stubs) -> None:
    """What asked beside the failed call whether its server is frozen has ended with it."""
    stubs.limit(control_s=0.5)
    frozen, observer = stubs.servers[1], Recorder()

    def break_down(stage: str) -> None:
        if stage == "verify":
            frozen.asgi.faults |= {
                "/reset_encoder_cache": Fault("status"),
                "/is_paused": Fault("hang", calls=(frozen.asgi.calls["/is_paused"] + 1,)),
            }

    observer.on_stage = break_down
    with pytest.raises(PushError):
        await push_new(stubs, observer)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

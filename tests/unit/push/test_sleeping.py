"""Pushes into a sleeping fleet, and pushes that end asleep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from skyctl.core import jobs
from skyctl.core.arbiter import Turn
from skyctl.errors import PreflightError, PushError, StateUnwritable
from skyctl.http.target import ServerTarget
from skyctl.push import sleeping
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.transaction import push
from skyctl.states import PushState
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.store.state import FleetState
from tests.stub.faults import Fault
from tests.stub.state import EngineRefused
from tests.unit.push.fleets import Recorder, Stubs


@pytest.fixture
def state(tmp_path: Path) -> Iterator[FleetState]:
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        yield state


async def asleep(stubs: Stubs, level: int = 1, *, paused: bool = False) -> None:
    """Every server sleeps, and that is on record."""
    for engine in stubs.engines:
        await engine.sleep(level, "abort")
        engine.log.clear()
    stubs.record(sleep_level=level, paused=paused)


async def push_colocated(stubs: Stubs, **changes: Any) -> PushResult:
    asked: dict[str, Any] = {"colocated": True, "weight_version": "step-2", **changes}
    request = PushRequest(str(stubs.new), **asked)
    async with stubs.client() as client:
        return await push(request, stubs.fleet, client=client, observer=Recorder())


async def recorded(state: FleetState, stubs: Stubs, **changes: Any) -> Job:
    asked: dict[str, Any] = {"colocated": True, "weight_version": "step-2", **changes}
    request = PushRequest(str(stubs.new), **asked)
    for server in stubs.fleet.servers:
        state.update_server(server.name, sleep_level=server.recorded.sleep_level)
    job = jobs.open_push(state.journal, Turn(None), request)
    async with stubs.client() as client:
        await jobs.run_push(
            job, request, stubs.fleet, client=client, state=state, kept=Path("/nowhere")
        )
    return state.journal.job(job.id)


async def failing(stubs: Stubs, **changes: Any) -> list[tuple[str, bool, int | None, bool]]:
    with pytest.raises(PushError) as caught:
        await push_colocated(stubs, **changes)
    rows = caught.value.details["servers"]
    return [(r["state"], r["ok"], r["sleep_level"], r["weights_awake"]) for r in rows]


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_fleet_is_woken_in_the_order_that_memory_allows(
    stubs: Stubs, level: int
) -> None:
    await asleep(stubs, level)
    result = await push_colocated(stubs)
    for engine in stubs.engines:
        order = [entry for entry in engine.log if entry.startswith(("wake", "init", "finish"))]
        assert order == ["wake weights", "init", "finish", "wake kv_cache"]
        assert engine.asleep == set() and not engine.paused
        assert engine.weight_version == "step-2" and engine.digest.startswith("content")
    assert [(s.state, s.ok, s.sleep_level) for s in result.servers] == [("ready", True, 0)] * 2


async def test_a_server_that_was_paused_before_it_slept_is_paused_when_it_is_awake(
    stubs: Stubs,
) -> None:
    await asleep(stubs, paused=True)
    result = await push_colocated(stubs)
    assert all(engine.paused and not engine.asleep for engine in stubs.engines)
    assert [(s.state, s.sleep_level) for s in result.servers] == [("paused", 0)] * 2


async def test_weights_that_somebody_woke_are_left_awake_when_a_push_fails(stubs: Stubs) -> None:
    await asleep(stubs)
    for engine in stubs.engines:
        await engine.wake(["weights"])
    stubs.record(weights_awake=True)
    stubs.servers[1].asgi.faults["/init_weight_transfer_engine"] = Fault("status", calls=(1,))
    rows = await failing(stubs)
    assert rows == [("asleep", True, None, False), ("asleep", False, None, False)]
    assert [engine.asleep for engine in stubs.engines] == [{"kv_cache"}] * 2
    result = await push_colocated(stubs)
    assert all(server.ok and server.sleep_level == 0 for server in result.servers)


async def test_a_record_that_they_are_awake_may_be_wrong(stubs: Stubs) -> None:
    await asleep(stubs)
    stubs.record(weights_awake=True)
    result = await push_colocated(stubs)
    assert all(server.ok and server.sleep_level == 0 for server in result.servers)


@pytest.mark.parametrize("woken", [False, True])
async def test_the_weights_of_one_that_is_paused_and_awake_are_not_woken(
    stubs: Stubs, woken: bool
) -> None:
    """Its record says that it sleeps, but it was started again: waking a part would thaw it."""
    for engine in stubs.engines:
        await engine.pause("keep")
    stubs.record(sleep_level=1, weights_awake=woken)
    await push_colocated(stubs)
    assert not any("wake weights" in engine.log for engine in stubs.engines)
    assert {engine.weight_version for engine in stubs.engines} == {"step-2"}


@pytest.mark.parametrize("colocated", [True, False])
async def test_one_that_is_awake_by_the_time_it_would_be_woken_is_frozen(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch, colocated: bool
) -> None:
    """It was started again, or a wake that was late has arrived."""
    await asleep(stubs)
    for engine in stubs.engines:
        await engine.wake(["weights"])
    stubs.record(weights_awake=not colocated)
    wake_weights = sleeping.wake_weights

    async def late(*how: Any) -> None:
        for engine in stubs.engines:
            await engine.wake(["kv_cache"])
        await wake_weights(*how)

    monkeypatch.setattr(sleeping, "wake_weights", late)
    result = await push_colocated(stubs, colocated=colocated)
    assert not any("unpaused" in what for e in stubs.engines for what in e.served)
    assert [(server.state, server.sleep_level) for server in result.servers] == [("ready", 0)] * 2


async def test_one_that_another_program_resumed_while_it_sleeps_is_woken_whole(
    stubs: Stubs,
) -> None:
    await asleep(stubs)
    for engine in stubs.engines:
        await engine.resume()
    result = await push_colocated(stubs)
    assert [(server.state, server.sleep_level) for server in result.servers] == [("ready", 0)] * 2
    assert all(engine.asleep == set() and not engine.paused for engine in stubs.engines)


async def test_one_that_another_program_puts_to_sleep_before_anything_is_sent_sleeps_on(
    stubs: Stubs, state: FleetState
) -> None:
    """Its memory is unmapped: an engine that loads into it dies."""
    first = stubs.engines[0]
    pause = first.pause

    async def sleep_beside(mode: str) -> None:
        await pause(mode)
        first.pause = pause  # type: ignore[method-assign]
        await first.sleep(1, "abort")

    first.pause = sleep_beside  # type: ignore[method-assign]
    job = await recorded(state, stubs, colocated=False)
    assert job.error is not None and "another program has put it to sleep" in job.error["message"]
    assert first.asleep == {"weights", "kv_cache"} and "init" not in first.log
    assert "resume" not in first.log and state.server("demo-0").sleep_level == 1
    assert not stubs.engines[1].paused


async def test_one_whose_cache_is_awake_does_not_run_once_its_weights_are(stubs: Stubs) -> None:
    """Another program had woken it; all of it is awake then, which thaws an engine."""
    await asleep(stubs)
    for engine in stubs.engines:
        await engine.wake(["kv_cache"])
    result = await push_colocated(stubs)
    assert not any("unpaused" in what for e in stubs.engines for what in e.served)
    assert [(server.state, server.sleep_level) for server in result.servers] == [("ready", 0)] * 2


async def test_weights_that_are_awake_by_their_record_alone_are_woken_before_they_are_written(
    stubs: Stubs,
) -> None:
    """The command that put them back to sleep was killed before its record."""
    await asleep(stubs)
    stubs.record(weights_awake=True)
    await push_colocated(stubs, colocated=False)
    for engine in stubs.engines:
        assert engine.log.index("wake weights") < engine.log.index("init")


async def test_weights_that_another_program_discarded_are_not_served(
    stubs: Stubs, state: FleetState
) -> None:
    for engine in stubs.engines:
        await engine.sleep(2, "abort")
    stubs.servers[1].asgi.faults["/init_weight_transfer_engine"] = Fault("status")
    job = await recorded(state, stubs)
    assert job.error is not None
    assert all(engine.served == [] and engine.paused for engine in stubs.engines)
    rows = [(row.sleep_level, row.weights_awake) for row in state.servers()]
    assert rows == [(2, True)] * 2


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_one_that_another_program_woke_without_its_weights_serves_only_new_ones(
    stubs: Stubs, state: FleetState, monkeypatch: pytest.MonkeyPatch, late: bool, fails: bool
) -> None:
    """Before the push looks at it, or `late`: until then it sleeps."""
    wake_weights = sleeping.wake_weights

    async def woken(*how: Any) -> None:
        for engine in stubs.engines:
            await engine.wake([])
        if how:
            await wake_weights(*how)

    await asleep(stubs, level=2)
    for server, engine in zip(stubs.fleet.servers, stubs.engines, strict=True):
        engine.weight_version = "v1"
        state.update_server(server.name, weight_version="v1")
    if late:
        monkeypatch.setattr(sleeping, "wake_weights", woken)
    else:
        await woken()
    if fails:
        stubs.servers[1].asgi.faults["/init_weight_transfer_engine"] = Fault("status")
    job = await recorded(state, stubs)
    assert (job.error is not None) is fails
    rows = [(row.sleep_level, bool(row.quarantine)) for row in state.servers()]
    assert rows == [(2, True) if fails else (0, False)] * 2
    assert all("discarded its weights" in row.quarantine for row in state.servers() if fails)
    assert [engine.paused for engine in stubs.engines] == [fails] * 2


@pytest.mark.parametrize("step", ["wake_weights", "sleep_again"])
async def test_one_that_was_started_again_amid_a_push_is_not_put_to_sleep_as_that_is_undone(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whoever started it does that, once it is admitted; also if the push has frozen it since."""
    await asleep(stubs)
    first, original = stubs.engines[0], getattr(sleeping, step)

    async def restarted(*how: Any) -> None:
        if step == "wake_weights":
            await original(*how)
        await first.wake([])
        first.log.clear()
        if step == "sleep_again":
            await original(*how)

    monkeypatch.setattr(sleeping, step, restarted)
    if step == "sleep_again":
        stubs.servers[1].asgi.faults["/init_weight_transfer_engine"] = Fault("status")
    await failing(stubs)
    assert first.log == ([] if step == "sleep_again" else ["init", "pause abort", "resume"])
    assert not first.paused and stubs.engines[1].asleep == {"weights", "kv_cache"}


async def test_one_that_was_started_again_after_its_weights_were_discarded_serves_on(
    stubs: Stubs, state: FleetState
) -> None:
    """Before a first push no label shows it: a push that is undone leaves it as it was."""
    stubs.record(sleep_level=2)
    stubs.servers[1].asgi.faults["/init_weight_transfer_engine"] = Fault("status")
    job = await recorded(state, stubs, colocated=False)
    assert job.error is not None and "keep their old weights" in job.error["message"]
    assert not any(engine.paused for engine in stubs.engines)
    assert {(row.sleep_level, row.quarantine) for row in state.servers()} == {(0, None)}


@pytest.mark.parametrize("resumed", [False, True])
async def test_one_that_sleeps_in_part_sleeps_again_as_a_push_is_undone(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Also if another program has resumed it, which wakes nothing."""
    await asleep(stubs)
    sleep_again = sleeping.sleep_again

    async def beside(*how: Any) -> None:
        if resumed:
            await stubs.engines[0].resume()
        await sleep_again(*how)

    monkeypatch.setattr(sleeping, "sleep_again", beside)
    stubs.servers[1].asgi.faults["/init_weight_transfer_engine"] = Fault("status")
    await failing(stubs)
    assert [engine.asleep for engine in stubs.engines] == [{"weights", "kv_cache"}] * 2
    assert all(engine.paused for engine in stubs.engines)


@pytest.mark.parametrize("sleeps", [False, True])
async def test_one_that_an_earlier_push_froze_serves_after_the_next_if_its_sleep_is_over(
    stubs: Stubs, sleeps: bool
) -> None:
    """It was started again since it was put to sleep."""
    for engine in stubs.engines:
        await (engine.sleep(1, "abort") if sleeps else engine.pause("keep"))
    stubs.record(in_doubt=True, thaw=True, sleep_level=1, weights_awake=sleeps)
    await push_colocated(stubs, colocated=False)
    assert [engine.paused for engine in stubs.engines] == [sleeps] * 2
    assert [engine.sleep_level for engine in stubs.engines] == [int(sleeps)] * 2


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/start_weight_update"])
async def test_a_failure_before_the_first_byte_puts_them_to_sleep_again(
    stubs: Stubs, route: str
) -> None:
    await asleep(stubs)
    stubs.servers[1].asgi.faults[route] = Fault("status")
    rows = await failing(stubs)
    assert rows == [("asleep", True, 1, False), ("asleep", False, 1, False)]
    assert all(engine.asleep == {"weights", "kv_cache"} for engine in stubs.engines)
    assert all(engine.digest == "base" for engine in stubs.engines)


async def test_weights_that_cannot_be_woken_undo_it(stubs: Stubs) -> None:
    await asleep(stubs)
    stubs.servers[1].asgi.faults["/wake_up"] = Fault("status", calls=(1,))
    rows = await failing(stubs)
    assert [row[0] for row in rows] == ["asleep", "asleep"]
    assert stubs.engines[0].asleep == {"weights", "kv_cache"}
    assert "init" not in stubs.engines[0].log


async def test_a_server_whose_weights_were_discarded_is_never_woken_without_new_ones(
    stubs: Stubs,
) -> None:
    await asleep(stubs, level=2)
    stubs.servers[1].asgi.faults["/init_weight_transfer_engine"] = Fault("status")
    rows = await failing(stubs)
    assert rows == [("asleep", False, None, True)] * 2
    for engine in stubs.engines:
        assert engine.asleep == {"kv_cache"} and engine.paused
        assert engine.served == []


async def test_a_failure_in_the_middle_is_quarantined_asleep(stubs: Stubs) -> None:
    await asleep(stubs)
    stubs.fail_update(1, calls=range(1, 100))
    rows = await failing(stubs)
    assert rows == [("ready", True, 0, False), ("quarantined", False, None, True)]
    assert stubs.engines[1].asleep == {"kv_cache"} and stubs.engines[1].paused


async def test_without_room_for_the_cache_the_new_weights_stay_and_it_sleeps_on(
    stubs: Stubs, state: FleetState
) -> None:
    await asleep(stubs)
    wake = stubs.engines[1].wake

    async def full(tags: list[str]) -> bool:
        if "kv_cache" in tags:
            raise EngineRefused("CUDA Error: out of memory")
        return await wake(tags)

    stubs.engines[1].wake = full  # type: ignore[method-assign]
    job = await recorded(state, stubs)
    assert job.error is not None and "out of memory" in job.error["message"]
    rows = job.error["details"]["servers"]
    assert [(row["state"], row["version"]) for row in rows] == [
        ("ready", "step-2"),
        ("asleep", "step-2"),
    ]
    assert state.server("demo-0").sleep_level == 0
    assert state.server("demo-1").sleep_level == 1
    assert state.server("demo-1").weight_version == "step-2"
    assert {row.name for row in state.servers() if row.weights_awake} == {"demo-1"}
    assert in_doubt(state) == {}


@pytest.mark.parametrize("after", ["sleep", "wake"])
async def test_verified_weights_are_the_fleets_though_every_server_fails_after_that(
    stubs: Stubs, state: FleetState, after: str
) -> None:
    if after == "wake":
        await asleep(stubs)

    async def refuse(*_: object) -> bool:
        raise EngineRefused("CUDA Error: out of memory")

    for engine in stubs.engines:
        wake = engine.wake
        if after == "sleep":
            engine.sleep = refuse  # type: ignore[method-assign,assignment]
        else:
            engine.wake = lambda tags, wake=wake: (  # type: ignore[method-assign,misc]
                refuse() if "kv_cache" in tags else wake(tags)
            )
    job = await recorded(state, stubs, colocated=after == "wake", sleep_after=int(after == "sleep"))
    assert job.error is not None and "out of memory" in job.error["message"]
    assert {engine.weight_version for engine in stubs.engines} == {"step-2"}
    assert {row.weight_version for row in state.servers()} == {"step-2"}
    assert state.weights().version == "step-2", "a server that restarts would get the ones before"
    assert in_doubt(state) == {}


async def test_what_is_awake_afterwards_is_on_record(stubs: Stubs, state: FleetState) -> None:
    await asleep(stubs, level=2)
    assert (await recorded(state, stubs)).state == "succeeded"
    assert [row.sleep_level for row in state.servers()] == [0, 0]
    assert {row.name for row in state.servers() if row.weights_awake} == set()


@pytest.mark.parametrize("before", ["awake", "asleep"])
async def test_a_push_may_end_asleep(stubs: Stubs, state: FleetState, before: str) -> None:
    if before == "asleep":
        await asleep(stubs)
    job = await recorded(state, stubs, colocated=before == "asleep", sleep_after=1)
    assert job.state == "succeeded" and job.result is not None
    assert [row["state"] for row in job.result["servers"]] == ["asleep", "asleep"]
    assert [row.sleep_level for row in state.servers()] == [1, 1]
    assert all(engine.asleep == {"weights", "kv_cache"} for engine in stubs.engines)
    assert {engine.weight_version for engine in stubs.engines} == {"step-2"}


async def test_none_is_put_to_sleep_that_is_not_on_record_first(
    stubs: Stubs, state: FleetState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found dead then, its push would leave weights on record that the sleep may have discarded."""
    intend = jobs.JournalObserver.intend

    def full(observer: jobs.JournalObserver, states: Mapping[str, str]) -> None:
        if PushState.SLEEPING in states.values():
            raise StateUnwritable("cannot write it: disk is full")
        intend(observer, states)

    monkeypatch.setattr(jobs.JournalObserver, "intend", full)
    job = await recorded(state, stubs, colocated=False, sleep_after=2)
    assert job.error is not None and "sleep: cannot write it" in job.error["message"]
    assert not any(engine.sleeping for engine in stubs.engines)
    assert {row.weight_version for row in state.servers()} == {"step-2"}


async def test_an_awake_fleet_is_pushed_to_as_ever_and_it_is_said(stubs: Stubs) -> None:
    result = await push_colocated(stubs)
    assert [(server.state, server.sleep_level) for server in result.servers] == [
        ("ready", None)
    ] * 2
    assert any("no server was asleep" in note for note in result.notes)


@pytest.mark.parametrize("colocated", [True, False])
async def test_one_that_serves_though_it_is_on_record_as_asleep_is_frozen_for_the_push(
    stubs: Stubs, state: FleetState, colocated: bool
) -> None:
    """Another fleet woke it, or it was started again."""
    stubs.record(sleep_level=2, weights_awake=True)
    job = await recorded(state, stubs, colocated=colocated)
    assert job.state == "succeeded"
    for engine in stubs.engines:
        assert not any("unpaused" in what for what in engine.served) and not engine.paused
    rows = [(row.sleep_level, row.weights_awake) for row in state.servers()]
    assert rows == [(0, False)] * 2


@pytest.mark.parametrize("other", [{"rolling": 1}, {"trial": {"prompts": [{"prompt": "a"}]}}])
@pytest.mark.parametrize("mine", [{"colocated": True}, {"colocated": False, "sleep_after": 1}])
async def test_it_excludes_pushes_into_fleets_that_serve(
    stubs: Stubs, mine: dict[str, Any], other: dict[str, Any]
) -> None:
    with pytest.raises(PreflightError, match="are for fleets that serve nobody meanwhile"):
        await push_colocated(stubs, pause_mode="wait", **mine, **other)
    assert all(engine.log == [] for engine in stubs.engines)


@pytest.mark.parametrize("level", [-1, 3])
async def test_a_level_that_there_is_not_is_refused_before_anything_is_sent(
    stubs: Stubs, level: int
) -> None:
    with pytest.raises(PreflightError, match=f"--sleep-after {level}"):
        await push_colocated(stubs, sleep_after=level)
    assert all(engine.log == [] for engine in stubs.engines)


async def test_sleeping_and_waking_have_the_deadline_of_an_update(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.limit(control_s=5.0, update_s=60.0)
    await asleep(stubs)
    deadlines: dict[str, set[float]] = {}
    async with stubs.client() as client:
        call = client.call

        async def note(target: ServerTarget, method: str, path: str, **how: Any) -> Any:
            deadlines.setdefault(path, set()).add(how["timeout_s"])
            return await call(target, method, path, **how)

        monkeypatch.setattr(client, "call", note)
        request = PushRequest(str(stubs.new), colocated=True, sleep_after=1)
        await push(request, stubs.fleet, client=client, observer=Recorder())
    assert deadlines["/wake_up"] == deadlines["/sleep"] == {60.0}
    assert deadlines["/start_weight_update"] == {5.0}

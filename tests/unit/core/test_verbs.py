"""Pausing and waking many servers: what is done, what is undone, and what is said of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.core import actions as verbs
from skyctl.core.requests import Resume, Sleep, Wake
from skyctl.core.verbs import run
from skyctl.errors import ConflictError, StateUnwritable
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, OutcomeStatus
from skyctl.http.target import ServerTarget
from skyctl.store.state import FleetState
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport

OK, FAILED, TIMEOUT = OutcomeStatus.OK, OutcomeStatus.FAILED, OutcomeStatus.TIMEOUT
UNREACHABLE, ROLLED_BACK = OutcomeStatus.UNREACHABLE, OutcomeStatus.ROLLED_BACK


# deadlines of servers that are meant to miss them, in seconds
SOON: dict[str, Any] = {"timeout_s": 0.05, "read_back_timeout_s": 0.05}


@asynccontextmanager
async def fleet(*stubs: StubServer) -> AsyncIterator[tuple[ControlClient, list[ServerTarget]]]:
    transport = StubTransport(stubs)
    async with ControlClient(transport=transport) as client:
        yield client, transport.targets


def stub(**faults: Fault) -> StubServer:
    return StubServer(faults={f"/{route}": fault for route, fault in faults.items()})


def unwritable() -> AbstractContextManager[None]:
    raise StateUnwritable("cannot write it: disk is full")


def statuses(outcomes: list[Outcome[None]]) -> list[OutcomeStatus]:
    return [outcome.status for outcome in outcomes]


async def test_pause_and_resume_reach_every_server() -> None:
    stubs = [stub(), stub()]
    async with fleet(*stubs) as (client, targets):
        assert statuses(await verbs.pause(client, targets, mode="keep")) == [OK, OK]
        assert [s.engine.scheduler.value for s in stubs] == ["paused-all"] * 2
        assert statuses(await verbs.resume(client, targets)) == [OK, OK]
    assert not any(s.engine.paused for s in stubs)


@pytest.mark.parametrize("verb", [verbs.pause, verbs.sleep])
async def test_prefill_servers_have_answered_before_decode_servers_are_asked(verb: Any) -> None:
    """One answers when decode servers have fetched the KV cache that waits there."""
    slow = Fault("delay", seconds=0.1)
    stubs = [stub(), stub(pause=slow, sleep=slow)]
    order: list[str] = []

    class Log(list[str]):
        def __init__(self, role: str) -> None:
            self._role = role

        def append(self, line: str) -> None:
            order.append(self._role)

    async with fleet(*stubs) as (client, targets):
        roles = ("decode", "prefill")
        for server, role in zip(stubs, roles, strict=True):
            server.engine.log = Log(role)
        asked = [replace(one, role=role) for one, role in zip(targets, roles, strict=True)]
        outcomes = await verb(client, asked)
    assert [outcome.server for outcome in outcomes] == [target.name for target in asked]
    assert statuses(outcomes) == [OK, OK]
    assert set(order) == set(roles) and order == sorted(order, reverse=True)


async def test_a_partial_pause_is_rolled_back_and_says_who_is_to_blame() -> None:
    good, bad = stub(), stub(pause=Fault("status"))
    async with fleet(good, bad) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="keep")
    assert statuses(outcomes) == [ROLLED_BACK, FAILED]
    assert outcomes[0].detail == "paused, then resumed because stub-1 did not pause"
    assert "injected fault" in outcomes[1].detail
    assert good.engine.log == ["pause keep", "resume"]


async def test_a_partial_pause_is_kept_when_asked() -> None:
    good, bad = stub(), stub(pause=Fault("status"))
    async with fleet(good, bad) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="keep", keep_partial=True)
    assert statuses(outcomes) == [OK, FAILED]
    assert good.engine.paused


async def test_a_rollback_leaves_paused_what_was_paused_before() -> None:
    before, good, bad = stub(), stub(), stub(pause=Fault("status"))
    await before.engine.pause("keep")
    async with fleet(before, good, bad) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="keep")
    assert statuses(outcomes) == [OK, ROLLED_BACK, FAILED]
    assert outcomes[0].detail == "was paused already"
    assert before.engine.paused
    assert not good.engine.paused


async def test_a_rollback_does_not_resume_what_must_not_answer() -> None:
    half_loaded, good, bad = stub(), stub(), stub(pause=Fault("status"))
    async with fleet(half_loaded, good, bad) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="keep", unfit={targets[0].name})
    assert statuses(outcomes) == [FAILED, ROLLED_BACK, FAILED]
    assert "not resumed" in outcomes[0].detail and "quarantined" in outcomes[0].detail
    assert half_loaded.engine.paused
    assert not good.engine.paused


async def test_a_server_that_cannot_be_resumed_is_said_to_be_still_paused() -> None:
    stuck, bad = stub(resume=Fault("status")), stub(pause=Fault("status"))
    async with fleet(stuck, bad) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="keep")
    assert statuses(outcomes) == [FAILED, FAILED]
    assert "is still paused; resuming it failed" in outcomes[0].detail


async def test_nothing_is_rolled_back_when_no_server_paused() -> None:
    stubs = [stub(pause=Fault("status")), stub(pause=Fault("status"))]
    async with fleet(*stubs) as (client, targets):
        assert statuses(await verbs.pause(client, targets)) == [FAILED, FAILED]
    assert [s.engine.log for s in stubs] == [[], []]


@pytest.mark.parametrize("kind", ["hang-after", "reset-after"])
async def test_a_pause_whose_answer_is_lost_is_read_back_and_not_sent_again(kind: str) -> None:
    lost = stub(pause=Fault(kind))
    async with fleet(lost) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="keep", **SOON)
    assert statuses(outcomes) == [OK]
    assert outcomes[0].detail == "paused; the answer was lost, the state was read back"
    assert lost.asgi.calls["/pause"] == 1


@pytest.mark.parametrize(("kind", "status"), [("hang", TIMEOUT), ("reset", UNREACHABLE)])
async def test_a_pause_that_never_arrived_is_known_not_to_have_happened(
    kind: str, status: OutcomeStatus
) -> None:
    async with fleet(stub(pause=Fault(kind))) as (client, targets):
        outcomes = await verbs.pause(client, targets, **SOON)
    assert statuses(outcomes) == [status]
    assert outcomes[0].detail.endswith("; not paused")


async def test_a_server_that_hangs_entirely_is_never_asked_to_pause() -> None:
    hung = StubServer(faults={"*": Fault("hang")})
    async with fleet(hung) as (client, targets):
        outcomes = await verbs.pause(client, targets, **SOON)
    assert statuses(outcomes) == [TIMEOUT]
    assert "not asked to pause" in outcomes[0].detail
    assert hung.asgi.calls["/pause"] == 0


async def test_a_wait_that_runs_out_of_time_is_no_success_and_is_rolled_back() -> None:
    busy, good = stub(), stub()
    busy.engine.requests = 1  # a request that does not end
    async with fleet(busy, good) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="wait", **SOON)
    assert statuses(outcomes) == [TIMEOUT, ROLLED_BACK]
    assert "running ones have not ended; resumed again" in outcomes[0].detail
    assert not busy.engine.paused


async def test_a_wait_that_runs_out_of_time_on_every_server_is_rolled_back() -> None:
    busy = [stub(), stub()]
    for each in busy:
        each.engine.requests = 1
    async with fleet(*busy) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="wait", **SOON)
        assert statuses(outcomes) == [TIMEOUT, TIMEOUT]
        assert not any(each.engine.paused for each in busy)
        outcomes = await verbs.pause(client, targets, mode="wait", keep_partial=True, **SOON)
    assert statuses(outcomes) == [TIMEOUT, TIMEOUT]
    assert all(each.engine.paused for each in busy)


async def test_a_server_whose_state_cannot_be_read_is_resumed() -> None:
    hung = stub(pause=Fault("hang-after"), is_paused=Fault("hang", calls=(2,)))
    async with fleet(hung) as (client, targets):
        outcomes = await verbs.pause(client, targets, mode="keep", **SOON)
    assert statuses(outcomes) == [TIMEOUT]
    assert outcomes[0].detail.endswith("; state unknown; resumed again")
    assert not hung.engine.paused


async def test_a_resume_whose_answer_is_lost_is_read_back() -> None:
    stubs = [stub(resume=Fault("reset-after")), stub(resume=Fault("reset"))]
    for each in stubs:
        await each.engine.pause("keep")
    async with fleet(*stubs) as (client, targets):
        outcomes = await verbs.resume(client, targets)
    assert statuses(outcomes) == [OK, UNREACHABLE]
    assert outcomes[1].detail.endswith("; still paused")


async def test_sleep_says_of_cpu_servers_that_only_the_state_changes() -> None:
    async with fleet(stub()) as (client, targets):
        on_cpu = await verbs.sleep(client, targets, level=1, device="cpu")
        on_cuda = await verbs.sleep(client, targets, level=1, device="cuda")
    assert "no memory" in on_cpu[0].detail
    assert on_cuda[0].detail == ""


async def test_resume_leaves_a_server_that_sleeps_although_its_sleep_is_not_on_record(
    tmp_path: Path,
) -> None:
    """It would run without its memory."""
    sleeper = stub()
    await sleeper.engine.sleep(1, "abort")
    with FleetState(tmp_path / "state.sqlite") as state:
        async with fleet(sleeper) as (client, targets):
            [outcome] = await run(Resume(), targets, client=client, state=state, timeout_s=5.0)
        assert outcome.detail == "asleep; type: skyctl wake"
        assert state.server(targets[0].name).sleep_level == 1
    assert "resume" not in sleeper.engine.log


async def test_a_lost_sleep_is_told_from_a_mere_pause_by_its_level() -> None:
    slept, paused = stub(sleep=Fault("reset-after")), stub(sleep=Fault("reset"))
    await paused.engine.pause("keep")
    async with fleet(slept, paused) as (client, targets):
        outcomes = await verbs.sleep(client, targets, level=2)
    assert statuses(outcomes) == [OK, UNREACHABLE]
    assert outcomes[1].detail.endswith("paused, and not known to be asleep")


async def test_waking_in_part_says_so_and_waking_the_rest_wakes_entirely() -> None:
    sleeper = stub()
    await sleeper.engine.sleep(1, "abort")
    async with fleet(sleeper) as (client, targets):
        part = await verbs.wake(client, targets, tags=["weights"])
        rest = await verbs.wake(client, targets, tags=["kv_cache"])
    assert (part[0].status, part[0].value) == (OK, False)
    assert part[0].detail == "awake in part: weights"
    assert (rest[0].value, sleeper.engine.sleeping) == (True, False)


@pytest.mark.parametrize("woken", [True, False])
@pytest.mark.parametrize("asleep", [True, False])
async def test_waking_the_weights_of_a_quarantined_server_that_does_not_sleep_is_refused(
    asleep: bool, woken: bool, tmp_path: Path
) -> None:
    """Its record says that it sleeps: that of its last wake was lost. vLLM would thaw it."""
    server = stub()
    await (server.engine.sleep(1, "abort") if asleep else server.engine.pause("keep"))
    with FleetState(tmp_path / "state.sqlite") as state:
        async with fleet(server) as (client, targets):
            recorded = {"sleep_level": 1, "weights_awake": woken, "quarantine": "half loaded"}
            state.update_server(targets[0].name, **recorded)
            outcomes = await run(
                Wake(tags=("weights",)), targets, client=client, state=state, timeout_s=5.0
            )
    assert server.engine.paused
    if asleep:
        assert outcomes[0].detail == "awake in part: weights"
    else:
        assert statuses(outcomes) == [OutcomeStatus.SKIPPED]
        assert "half loaded" in outcomes[0].detail


async def test_the_cache_is_not_woken_before_the_weights(tmp_path: Path) -> None:
    """Waking them then would thaw the engine before anything is pushed."""
    server = stub()
    await server.engine.sleep(1, "abort")
    with FleetState(tmp_path / "state.sqlite") as state:
        async with fleet(server) as (client, targets):
            state.update_server(targets[0].name, sleep_level=1)
            [outcome] = await run(
                Wake(tags=("kv_cache",)), targets, client=client, state=state, timeout_s=5.0
            )
    assert outcome.detail == "its weights sleep; first: skyctl wake --tags weights"
    assert server.engine.asleep == {"weights", "kv_cache"}


@pytest.mark.parametrize("request_", [Wake(), Sleep()])
async def test_what_another_program_discarded_is_on_record_before_a_verb(
    request_: Wake | Sleep, tmp_path: Path
) -> None:
    server = stub()
    await server.engine.sleep(2, "abort")
    with FleetState(tmp_path / "state.sqlite") as state:
        async with fleet(server) as (client, targets):
            state.update_server(targets[0].name, sleep_level=1)
            with pytest.raises(ConflictError) if isinstance(request_, Wake) else nullcontext():
                await run(request_, targets, client=client, state=state, timeout_s=5.0)
        assert state.server(targets[0].name).sleep_level == 2


@pytest.mark.parametrize(("label", "pushed"), [("v1", "v1"), ("v2", "v1"), ("default", None)])
async def test_awake_weights_on_record_count_under_their_label_only(
    label: str, pushed: str | None, tmp_path: Path
) -> None:
    """Under another one, another fleet has pushed since, and discarded them; without one, only a
    later sleep can be as deep.
    """
    server = stub()
    await server.engine.sleep(2, "abort")
    server.engine.weight_version = label
    with FleetState(tmp_path / "state.sqlite") as state:
        async with fleet(server) as (client, targets):
            recorded = {"sleep_level": 1, "weights_awake": True, "weight_version": pushed}
            state.update_server(targets[0].name, **recorded)
            with nullcontext() if label == "v1" else pytest.raises(ConflictError):
                await run(Wake(), targets, client=client, state=state, timeout_s=5.0)
    assert server.engine.sleeping is (label != "v1")


@pytest.mark.parametrize("disk", ["full", "well"])
async def test_awake_weights_are_forgotten_before_a_sleep_may_discard_them(
    disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the sleep itself may be lost: here its answer is."""
    server = stub(sleep=Fault("reset"))
    await server.engine.sleep(1, "abort")
    await server.engine.wake(["weights"])
    with FleetState(tmp_path / "state.sqlite") as state:
        async with fleet(server) as (client, targets):
            state.update_server(targets[0].name, sleep_level=1, weights_awake=True)
            if disk == "full":
                monkeypatch.setattr(state, "durable", unwritable)
            with pytest.raises(StateUnwritable) if disk == "full" else nullcontext():
                await run(Sleep(level=2), targets, client=client, state=state, timeout_s=5.0)
            assert state.server(targets[0].name).weights_awake is (disk == "full")
    assert server.engine.asleep == ({"kv_cache"} if disk == "full" else set())


async def test_weights_that_are_woken_amid_an_unknown_sleep_are_not_recorded_as_awake(
    tmp_path: Path,
) -> None:
    """The next verb puts that sleep on record, and would take the weights for the new ones."""
    fault = Fault("status", calls=(1,))
    server = stub(**{"metrics/": fault, "metrics": fault})
    await server.engine.sleep(2, "abort")
    with FleetState(tmp_path / "state.sqlite") as state:
        async with fleet(server) as (client, targets):
            wake = Wake(tags=("weights",))
            await run(wake, targets, client=client, state=state, timeout_s=5.0)
            assert not state.server(targets[0].name).weights_awake
            with pytest.raises(ConflictError):
                await run(Wake(), targets, client=client, state=state, timeout_s=5.0)
    assert server.engine.asleep == {"kv_cache"}


async def test_a_lost_wake_is_read_back() -> None:
    sleeper = stub(wake_up=Fault("reset-after"))
    await sleeper.engine.sleep(1, "abort")
    async with fleet(sleeper) as (client, targets):
        outcomes = await verbs.wake(client, targets)
    assert (outcomes[0].status, outcomes[0].value) == (OK, True)

"""pause, resume, sleep and wake with one bad server among three, over real sockets.

Each verb meets each fault: the other two servers are done, the outcome of the bad one is what is
known of it, its call is sent once, and what is recorded is what is true.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyctl.core import actions as verbs
from skyctl.core.requests import Pause, Resume, Sleep, Wake
from skyctl.http.client import ControlClient
from skyctl.push.request import PushRequest
from skyctl.service.attached import AttachedFleet
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import JobState
from skyctl.store.state import FleetState
from tests.faults.attached_fleet import attached_fleet
from tests.faults.command import attached, skyctl
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.running import running
from tests.unit.docs.bounds import evaluated, worst
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

TIMEOUT_S = 0.6
PATIENT_S = 20.0  # where no deadline is meant to pass, however busy the machine is
ROUTES = {"pause": "/pause", "resume": "/resume", "sleep": "/sleep", "wake": "/wake_up"}
BAD = 1


@dataclass(frozen=True)
class Told:
    """What the bad server's outcome is, and whether it did what was asked."""

    status: str
    done: bool
    words: str = ""


LOST = "the answer was lost, the state was read back"
ENDLESS = ("hangs", "hangs after the commit", "drips its answer")
FAULTS: dict[str, tuple[Fault, Told]] = {
    "answers 500": (Fault("status"), Told("failed", False, "injected fault")),
    "slow": (Fault("delay", seconds=0.15), Told("ok", True)),
    "hangs": (Fault("hang"), Told("timeout", False, f"no answer in {TIMEOUT_S:g} s")),
    "hangs after the commit": (Fault("hang-after"), Told("ok", True, LOST)),
    "drips its answer": (Fault("drip", seconds=2.0), Told("ok", True, LOST)),
    "reset before the commit": (Fault("reset"), Told("unreachable", False)),
    "reset after the commit": (Fault("reset-after"), Told("ok", True, LOST)),
    "cut in the answer": (Fault("cut", pieces=0), Told("ok", True, LOST)),
}


async def call(
    fleet: AttachedFleet, verb: str, timeout_s: float = PATIENT_S
) -> list[tuple[str, str]]:
    """Status and detail of each server's outcome."""
    asked = {
        "pause": Pause(mode="keep", clear_cache=False, timeout_s=timeout_s),
        "resume": Resume(timeout_s=timeout_s),
        "sleep": Sleep(timeout_s=timeout_s),
        "wake": Wake(timeout_s=timeout_s),
    }[verb]
    return [(outcome.status, outcome.detail) for outcome in await fleet.control(asked)]


async def make_ready_for(fleet: AttachedFleet, verb: str) -> None:
    """Pause what is to be resumed, put to sleep what is to be woken."""
    before = {"resume": "pause", "wake": "sleep"}.get(verb)
    if before is not None:
        assert [status for status, _ in await call(fleet, before)] == ["ok"] * 3


def is_done(stub: StubServer, verb: str) -> bool:
    """Whether the server is in the state that the verb asks for."""
    if verb in ("sleep", "wake"):
        return bool(stub.engine.asleep) == (verb == "sleep")
    return stub.engine.paused == (verb == "pause")


def recorded(fleet: AttachedFleet, verb: str) -> list[bool]:
    """For each server, whether the state file says that it is as the verb asks."""
    with FleetState(fleet.ref.paths.database) as state:
        rows = [state.server(target.name) for target in fleet.targets]
    if verb in ("sleep", "wake"):
        return [bool(row.sleep_level) == (verb == "sleep") for row in rows]
    return [row.paused == (verb == "pause") for row in rows]


@pytest.mark.parametrize("verb", ROUTES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_one_bad_server_of_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, fault: str
) -> None:
    stubs = [StubServer() for _ in range(3)]
    played, told = FAULTS[fault]
    async with attached_fleet(tmp_path, monkeypatch, stubs) as fleet:
        await make_ready_for(fleet, verb)
        stubs[BAD].asgi.faults[ROUTES[verb]] = played
        calls = stubs[BAD].asgi.calls[ROUTES[verb]]
        outcomes = await call(fleet, verb, TIMEOUT_S if fault in ENDLESS else PATIENT_S)
        assert stubs[BAD].asgi.calls[ROUTES[verb]] == calls + 1, "a verb is never sent twice"
        assert outcomes[BAD][0] == told.status and told.words in outcomes[BAD][1]
        undone = verb == "pause" and not told.done
        assert [outcomes[0][0], outcomes[2][0]] == ["rolled-back" if undone else "ok"] * 2
        expected = [told.done if n == BAD else not undone for n in range(3)]
        assert [is_done(stub, verb) for stub in stubs] == expected
        assert recorded(fleet, verb) == expected

        # the fault goes away: the same command again brings every server there
        stubs[BAD].asgi.faults.clear()
        assert [status for status, _ in await call(fleet, verb)] == ["ok"] * 3
        assert all(is_done(stub, verb) for stub in stubs)
        assert recorded(fleet, verb) == [True] * 3


@pytest.mark.parametrize("verb", ROUTES)
async def test_one_dead_server_of_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    stubs = [StubServer(), None, StubServer()]
    async with attached_fleet(tmp_path, monkeypatch, stubs) as fleet:
        outcomes = await call(fleet, verb)
    undone = verb == "pause"
    assert outcomes[BAD][0] == "unreachable"
    assert [outcomes[0][0], outcomes[2][0]] == ["rolled-back" if undone else "ok"] * 2
    assert [is_done(stub, verb) for stub in stubs if stub] == [not undone] * 2


@pytest.mark.parametrize("verb", ROUTES)
async def test_one_half_dead_server_of_three_whose_api_answers_for_a_dead_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    stubs = [StubServer() for _ in range(3)]
    async with attached_fleet(tmp_path, monkeypatch, stubs) as fleet:
        await make_ready_for(fleet, verb)
        stubs[BAD].engine.dead = True
        outcomes = await call(fleet, verb)
        assert outcomes[BAD][0] == "failed" and "EngineCore encountered" in outcomes[BAD][1]
        assert recorded(fleet, verb)[BAD] is False
        status = await fleet.status()
        assert status.replicas[BAD].state == "unreachable" and status.health != "healthy"


@pytest.mark.parametrize("verb", ROUTES)
async def test_one_server_that_hangs_altogether_ends_with_both_deadlines(verb: str) -> None:
    """The worst case of a verb: its own deadline, and that of reading the state back."""
    stubs = [StubServer() for _ in range(3)]
    stubs[BAD].asgi.faults["*"] = Fault("hang")
    known = {"control_timeout_s": TIMEOUT_S, "READ_BACK_TIMEOUT_S": 0.3}
    [bound_s] = [evaluated(row[2], known) for row in worst() if row[0] == verb]
    async with running(stubs) as targets, ControlClient() as client:
        run = getattr(verbs, verb)
        async with asyncio.timeout(bound_s + 5):
            outcomes = await run(client, targets, timeout_s=TIMEOUT_S, read_back_timeout_s=0.3)
    assert outcomes[BAD].status.value == "timeout"
    assert "state unknown" in outcomes[BAD].detail or "not asked" in outcomes[BAD].detail
    done = "rolled-back" if verb == "pause" else "ok"
    assert [outcomes[0].status.value, outcomes[2].status.value] == [done] * 2


@pytest.mark.parametrize("verb", ["resume", "sleep", "wake"])
async def test_the_command_says_partial_and_names_the_bad_server(tmp_path: Path, verb: str) -> None:
    stubs = [StubServer() for _ in range(3)]
    stubs[BAD].asgi.faults[ROUTES[verb]] = Fault("status", text="no")
    async with running(stubs) as targets:
        file = attached(tmp_path, targets)
        code, envelope = await skyctl(verb, home=tmp_path / "home", file=file)
    assert (code, envelope["error"]["kind"]) == (3, "PartialFailure")
    assert [row["status"] for row in envelope["data"]["outcomes"]] == ["ok", "failed", "ok"]
    assert "eight-1" in envelope["error"]["message"]


async def test_a_rollback_that_fails_says_that_a_server_is_still_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = [StubServer() for _ in range(3)]
    stubs[BAD].asgi.faults["/pause"] = Fault("status")
    stubs[2].asgi.faults["/resume"] = Fault("status", text="cannot")
    async with attached_fleet(tmp_path, monkeypatch, stubs) as fleet:
        outcomes = await call(fleet, "pause")
        assert [status for status, _ in outcomes] == ["rolled-back", "failed", "failed"]
        assert "is still paused" in outcomes[2][1]
        assert (await fleet.status()).replicas[2].state == "paused"


@pytest.mark.parametrize("bad", [[BAD], [0, 1, 2]], ids=["one", "all"])
@pytest.mark.parametrize("remedy", ["recover", "push", "resume"])
async def test_a_server_that_stops_amid_its_pause_is_not_left_frozen(
    remedy: str, bad: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause has failed; once the server goes on, it carries it out."""
    monkeypatch.setitem(verbs.pause.__kwdefaults__, "read_back_timeout_s", 0.2)
    checkpoint = write_checkpoint(tmp_path / "v1", tiny_tensors())
    stubs = [StubServer() for _ in range(3)]
    for number in bad:
        stubs[number].asgi.faults = {
            "/pause": Fault("hang-after"),
            "/is_paused": Fault("hang", calls=(2,)),
            "/resume": Fault("hang"),
        }
    async with attached_fleet(tmp_path, monkeypatch, stubs) as fleet:
        outcomes = await call(fleet, "pause", TIMEOUT_S)
        assert {outcomes[number][0] for number in bad} == {"timeout"}
        for number in bad:
            stubs[number].asgi.faults = {}
        assert [stub.engine.paused for stub in stubs] == [n in bad for n in range(3)]
        if remedy == "recover":
            assert all(repair.ok for repair in await fleet.recover())
        elif remedy == "push":
            push = await fleet.start_push(PushRequest(checkpoint=str(checkpoint)))
            assert (await fleet.wait_job(push)).state == JobState.SUCCEEDED
        else:
            assert [status for status, _ in await call(fleet, "resume")] == ["ok"] * 3
        assert not any(stub.engine.paused for stub in stubs)
        assert not in_doubt(fleet.state)


async def test_out_of_memory_on_waking_the_cache_leaves_a_server_that_can_be_woken_in_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = [StubServer() for _ in range(3)]
    async with attached_fleet(tmp_path, monkeypatch, stubs) as fleet:
        await make_ready_for(fleet, "wake")
        oom = "CUDA out of memory. Tried to allocate 2.00 GiB"
        stubs[BAD].asgi.faults["/wake_up"] = Fault("status", text=oom, calls=(1,))
        outcomes = await call(fleet, "wake")
        assert outcomes[BAD][0] == "failed" and "out of memory" in outcomes[BAD][1]
        assert [r.state for r in (await fleet.status()).replicas] == ["ready", "asleep", "ready"]
        for tag in ("weights", "kv_cache"):
            [outcome] = await fleet.wake(Wake(tags=(tag,), servers=("far-1",)))
            assert outcome.ok
        assert (await fleet.status()).health == "healthy"


async def test_ctrl_c_in_the_middle_of_a_pause_leaves_the_truth_to_be_read(tmp_path: Path) -> None:
    """The command ends with 130 at once; what was frozen is shown by the next status."""
    stubs = [StubServer(), StubServer(faults={"/pause": Fault("hang")})]
    async with running(stubs) as targets:
        file, home = attached(tmp_path, targets), tmp_path / "home"
        file.write_text(file.read_text().replace("control_timeout_s: 1", "control_timeout_s: 60"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "skyctl", "pause", "--mode", "keep", "--file", str(file)),
            env={"SKYCTL_HOME": str(home), "PATH": "", "HOME": str(home)},
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(30):
            await stubs[1].asgi.until("/pause")
            await stubs[0].engine.until_logged("pause keep")
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
        stubs[1].asgi.faults.clear()
        code, envelope = await skyctl("status", home=home, file=file)
        assert code == 0
        rows = envelope["data"]["replicas"]
        assert [row["state"] for row in rows] == ["paused", "ready"]
        assert (await skyctl("resume", home=home, file=file))[0] == 0
    assert not any(stub.engine.paused for stub in stubs)

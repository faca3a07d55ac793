"""Two fleets that list the same servers: the second waits, or is refused, where its own commands
would be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyctl.core.arbiter import Act, Arbiter
from skyctl.core.recovery import clear
from skyctl.errors import ConflictError, StateUnwritable
from skyctl.store import locks
from skyctl.store.in_doubt import InDoubt, in_doubt, put_in_doubt
from skyctl.store.journal import JobEvent
from skyctl.store.paths import FleetPaths
from skyctl.store.server_locks import ServerLocks, Unrepaired
from skyctl.store.server_names import name_servers, record_names
from skyctl.store.state import FleetState
from tests.faults.shell_commands import attached, stop
from tests.stub.faults import Fault

URL = "http://10.0.0.1:8000"
OTHER_URL = "http://127.0.0.1:8001"


async def test_no_verb_of_another_fleet_thaws_what_a_push_has_frozen(tmp_path: Path) -> None:
    async with attached(tmp_path) as fleet:
        file = (tmp_path / "fleet.yaml").read_text()
        (tmp_path / "near.yaml").write_text(file.replace("name: far", "name: near"))
        fleet.hang("/start_weight_update")
        with fleet.started("sync-weights", "v1") as push:
            await fleet.stubs[1].asgi.until("/start_weight_update")
            for verb in ("resume", "pause", "sleep", "wake", "sync-weights v1"):
                code, envelope = await fleet.skyctl(*verb.split(), "-f", "near.yaml")
                assert code != 0 and "fleet far has it: push-1" in envelope["error"]["message"]
                assert (
                    envelope["error"]["hint"] == "wait for it: skyctl jobs wait push-1 --fleet far"
                )
            assert fleet.frozen == [True, True]
            stop(push)
            _, envelope = await fleet.skyctl("resume", "-f", "near.yaml")
            assert f"kill -CONT {push.pid}" in envelope["error"]["hint"]
            assert "skyctl recover --fleet far" in envelope["error"]["hint"]
        fleet.mend()
        code, _ = await fleet.skyctl("recover", "--yes")
        assert code == 0 and fleet.frozen == [False, False]
        code, _ = await fleet.skyctl("sync-weights", "v1", "-f", "near.yaml")
        assert code == 0


async def test_fleets_that_each_left_a_server_of_the_other_repair_their_own(
    tmp_path: Path,
) -> None:
    async with attached(tmp_path) as fleet:
        both = (tmp_path / "fleet.yaml").read_text()
        servers = both.partition("servers: [")[2].partition("]")[0]
        for name, url, stub in zip(("far", "near"), servers.split(", "), fleet.stubs, strict=True):
            own = tmp_path / f"{name}.yaml"
            own.write_text(both.replace("far", name).replace(servers, url))
            stub.asgi.faults = {"/update_weights": Fault("status")}
            code, _ = await fleet.skyctl("sync-weights", "v1", "-f", own.name)
            assert code == 1 and stub.engine.paused
            stub.asgi.faults = {}
            own.write_text(both.replace("far", name))
        for _ in range(2):  # the second has nothing to repair itself
            code, envelope = await fleet.skyctl("recover", "--yes", "-f", "far.yaml")
            assert code == 3 and fleet.frozen == [False, True]
            assert "type: skyctl recover --fleet near" in envelope["error"]["message"]
        code, _ = await fleet.skyctl("recover", "--yes", "--fleet", "near")
        assert code == 0 and fleet.frozen == [False, False]
        code, _ = await fleet.skyctl("sync-weights", "v1", "-f", "far.yaml")
        assert code == 0


# A push of fleet far that holds the server's lock.
_PUSH = """
import sys
from pathlib import Path
from skyctl.store.paths import FleetPaths
from skyctl.store.server_locks import ServerLocks
claim = ServerLocks(FleetPaths(Path(sys.argv[1]), "far"), tuple).take_all(
    {"far-0": sys.argv[2]}, "push-1", shared=False, pushes=True
)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def pushing(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A push of fleet far to the server at URL; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PUSH, str(home), URL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def fleet_state(home: Path, name: str) -> FleetState:
    """The record of a fleet whose only server is at URL."""
    paths = FleetPaths(home, name)
    paths.prepare()
    state = FleetState(paths.database)
    record_names(state, name_servers(name, [("", URL)], {}))
    return state


@pytest.mark.parametrize("touched", [True, False])
def test_what_a_dead_push_has_touched_is_for_its_own_fleet_to_repair(
    touched: bool, tmp_path: Path
) -> None:
    near = ServerLocks(FleetPaths(tmp_path, "near"), tuple)
    with fleet_state(tmp_path, "far") as state, pushing(tmp_path) as process:
        with pytest.raises(ConflictError, match="fleet far has it: push-1"):
            near.take_all({"near-0": URL}, "skyctl resume", shared=True)
        if touched:
            doubt = InDoubt("far-0", "push-1", "update", half_updated=True, thaw=True)
            put_in_doubt(state, {"far-0": doubt})
        process.kill()
        process.wait()
        for _ in range(2 if touched else 0):
            with pytest.raises(Unrepaired) as caught:
                near.take_all({"near-0": f"{URL}/"}, "skyctl resume", shared=True)
            assert caught.value.hint == "first: skyctl recover --fleet far"
        clear(state, "far-0")
        near.take_all({"near-0": URL}, "skyctl resume", shared=True).release()


async def test_a_recovery_does_not_wait_for_a_push_of_another_fleet_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.core.arbiter.PATIENCE_S", 0.1)
    paths = FleetPaths(tmp_path, "near")
    with (
        fleet_state(tmp_path, "far"),
        fleet_state(tmp_path, "near") as state,
        pushing(tmp_path) as push,
    ):
        stop(push)
        arbiter = Arbiter(state.locks, ServerLocks(paths, tuple))
        with pytest.raises(ConflictError, match="fleet far has it: push-1") as caught:
            await arbiter.turn(Act.RECOVER, "recover", servers={"near-0": URL}, wait_s=3600)
        assert f"kill -CONT {push.pid}" in caught.value.hint


def test_a_fleet_that_has_dropped_what_it_has_to_repair_is_to_list_it_again(
    tmp_path: Path,
) -> None:
    near = ServerLocks(FleetPaths(tmp_path, "near"), tuple)
    with fleet_state(tmp_path, "far") as state, pushing(tmp_path):
        put_in_doubt(state, {"far-0": InDoubt("far-0", "push-1", "update", True, True)})
    with fleet_state(tmp_path, "far") as state:
        record_names(state, name_servers("far", [("", "http://10.0.0.2:8000")], {"far-0": URL}))
    with pytest.raises(Unrepaired) as caught:
        near.take_all({"near-0": URL}, "skyctl resume", shared=True)
    hint = f"first: skyctl recover --fleet far, once its file lists {URL} again"
    assert caught.value.hint == hint


def test_a_push_that_fails_leaves_its_mark_until_the_server_is_repaired(tmp_path: Path) -> None:
    with fleet_state(tmp_path, "far") as state:
        far = ServerLocks(FleetPaths(tmp_path, "far"), lambda: in_doubt(state))
        near = ServerLocks(FleetPaths(tmp_path, "near"), tuple)
        claim = far.take_all({"far-0": URL}, "push-1", shared=False, pushes=True)
        put_in_doubt(state, {"far-0": InDoubt("far-0", "push-1", "update", True, True)})
        claim.release()
        with pytest.raises(Unrepaired, match=r"push-1 broke off in stage update.*fleet far"):
            near.take_all({"near-0": URL}, "skyctl wake", shared=False)
        verb = far.take_all({"far-0": URL}, "skyctl pause", shared=True)
        with pytest.raises(Unrepaired):  # a verb of fleet far repairs nothing
            near.take_all({"near-0": URL}, "skyctl resume", shared=True)
        verb.release()
        both = {"near-0": URL, "near-1": OTHER_URL}
        for _ in range(2):
            others = near.take_all(both, "skyctl wake", shared=False, leaves_unrepaired=True)
            assert list(others.locks) == ["near-1"] and list(others.unrepaired) == ["near-0"]
            assert others.unrepaired["near-0"].endswith("first: skyctl recover --fleet far")
            others.release()
        claim = far.take_all({"far-0": URL}, "skyctl recover", shared=False, pushes=True)
        clear(state, "far-0")
        claim.release()
        near.take_all({"near-0": URL}, "skyctl wake", shared=False).release()


def test_so_does_one_whose_end_could_not_be_recorded(tmp_path: Path) -> None:
    """Its process lives, and knows what it left; on record the push runs."""
    with fleet_state(tmp_path, "far") as state:
        job = state.journal.begin("push", {"checkpoint": "c"})
        steps = JobEvent.server("far-0", "pausing"), JobEvent.stage("update")
        state.journal.add_events(job.id, JobEvent.stage("pause"), *steps)
        far = ServerLocks(FleetPaths(tmp_path, "far"), lambda: {"far-0"})
        far.take_all({"far-0": URL}, job.id, shared=False, pushes=True).release()
        near = ServerLocks(FleetPaths(tmp_path, "near"), tuple)
        with pytest.raises(Unrepaired, match=f"{job.id} broke off in stage update"):
            near.take_all({"near-0": URL}, "skyctl resume", shared=True)


def test_a_verb_needs_no_room_for_a_lock_that_no_push_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(path: Path, flags: int = 0) -> int:
        raise StateUnwritable(f"cannot open {path}: No space left on device")

    monkeypatch.setattr(locks, "create_private_file", no_room)
    near = ServerLocks(FleetPaths(tmp_path, "near"), tuple)
    assert near.take_all({"near-0": URL}, "skyctl resume", shared=True).locks == {}
    with pytest.raises(StateUnwritable):
        near.take_all({"near-0": URL}, "push-1", shared=False, pushes=True)

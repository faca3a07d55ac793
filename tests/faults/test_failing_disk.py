"""Verbs on a fleet whose state disk is full, read-only or not there, as typed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from skyctl.store.in_doubt import InDoubt, put_in_doubt
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from tests.faults.command import attached, skyctl
from tests.faults.stub_fleet import StubFleet
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.stub.state import Scheduler
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.store.disks import fill, mounted, remount


@pytest.fixture(params=["full", "full from the start", "read-only", "no directory"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    nowhere = Path("/dev/null/home")
    needs = mounted(tmp_path / "home") if "no" not in request.param else nullcontext(nowhere)
    with needs as directory:
        yield directory, request.param


async def test_a_fleet_can_be_looked_at_frozen_and_thawed_and_is_not_pushed_to(
    home: tuple[Path, str], tmp_path: Path
) -> None:
    directory, fault = home
    stubs = [StubServer(), StubServer()]
    checkpoint = write_checkpoint(tmp_path / "ckpt", tiny_tensors())
    async with running(stubs) as targets:
        file = attached(tmp_path, targets)

        async def run(*arguments: str, expect: int = 0) -> dict[str, object]:
            code, envelope = await skyctl(*arguments, home=directory, file=file)
            assert code == expect, envelope
            assert "bug" not in str(envelope["error"])
            return envelope

        if fault in ("full", "read-only"):
            await run("status")
        filler = None
        if fault.startswith("full"):
            filler = fill(directory)
        elif fault == "read-only":
            remount(directory, "ro")

        status = await run("status")
        assert status["data"]["health"] == "healthy"  # type: ignore[index]
        await run("pause", "--mode", "keep")
        assert [stub.engine.scheduler is not Scheduler.RUNNING for stub in stubs] == [True, True]
        await run("resume")
        assert [stub.engine.scheduler is not Scheduler.RUNNING for stub in stubs] == [False, False]
        await run("recover", "--yes")
        before = [len(stub.engine.log) for stub in stubs]
        refused = await run("sync-weights", str(checkpoint), expect=1)
        assert refused["error"]["kind"] == "StateUnwritable"  # type: ignore[index]
        assert refused["error"]["hint"]  # type: ignore[index]
        assert [stub.engine.log[n:] for stub, n in zip(stubs, before, strict=True)] == [[], []]

        if filler is not None:
            filler.unlink()
        elif fault == "read-only":
            remount(directory, "rw")
        else:
            return
        await run("pause", "--mode", "keep")
        with FleetState(FleetPaths(directory, "eight").database) as state:
            assert [row.paused for row in state.servers()] == [True, True]


@pytest.mark.parametrize("fault", ["full", "read-only"])
async def test_recovery_thaws_without_a_disk_and_pushes_once_there_is_one(
    fault: str, tmp_path: Path
) -> None:
    stubs = [StubServer(), StubServer()]
    checkpoint = write_checkpoint(tmp_path / "ckpt", tiny_tensors())
    with mounted(tmp_path / "home", "16m") as directory:
        async with running(stubs) as targets:
            file = attached(tmp_path, targets)

            async def run(*arguments: str, expect: int = 0) -> list[dict[str, object]]:
                code, envelope = await skyctl(*arguments, home=directory, file=file)
                assert code == expect, envelope
                return envelope["data"].get("recovered", [])  # type: ignore[no-any-return]

            await run("sync-weights", str(checkpoint))
            paths = FleetPaths(directory, "eight")
            with FleetState(paths.database) as state:
                first, second = (row.name for row in state.servers())
                one = InDoubt(first, "push-9", "pause", half_updated=False, thaw=True)
                other = InDoubt(second, "push-9", "update", half_updated=True, thaw=True)
                put_in_doubt(state, {first: one, second: other})
            for stub in stubs:
                await stub.engine.pause("keep")
            filler = fill(directory) if fault == "full" else remount(directory, "ro")
            thawed, waits = await run("recover", "--yes", expect=3)
            assert thawed["ok"] and stubs[0].engine.scheduler is Scheduler.RUNNING
            assert stubs[1].engine.scheduler is not Scheduler.RUNNING
            assert str(waits["detail"]).endswith("; then type: skyctl recover")
            if filler is not None:
                filler.unlink()
            else:
                remount(directory, "rw")
            await run("recover", "--yes")
            assert stubs[1].engine.scheduler is Scheduler.RUNNING


def test_a_fleet_on_a_disk_that_fills_up_is_paused_resumed_healed_and_ended(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path / "home", "16m") as directory:
        fleet = StubFleet(tmp_path)
        fleet.write()
        checkpoint = write_checkpoint(tmp_path / "ckpt", tiny_tensors())
        fleet.run("up")
        try:
            filler = fill(directory)
            before = {name: row["pid"] for name, row in fleet.replicas().items()}
            for _ in range(30):  # until what was free in the state file is used up
                fleet.run("pause", "--mode", "keep")
                assert {row["state"] for row in fleet.replicas().values()} == {"paused"}
                fleet.run("resume")
                status = fleet.json("status")["data"]
                if "cannot be written" in str(status["reasons"]):
                    break
            assert "cannot be written" in str(status["reasons"])
            assert {name: row["pid"] for name, row in fleet.replicas().items()} == before
            refused = fleet.json("sync-weights", str(checkpoint), expect=1)
            assert refused["error"]["kind"] == "StateUnwritable"
            psutil.Process(before["stubs-0"]).kill()
            wait_until(
                lambda: (
                    (row := fleet.replicas()["stubs-0"])["state"] == "ready"
                    and row["pid"] != before["stubs-0"]
                )
            )
            filler.unlink()
            wait_until(lambda: "cannot be written" not in str(fleet.json("status")["data"]))
            with FleetState(FleetPaths(directory, "stubs").database) as state:
                record = state.process("stubs-0")
            assert record is not None and record.identity is not None
            assert record.identity.pid == fleet.replicas()["stubs-0"]["pid"]
            fleet.run("sync-weights", str(checkpoint))
            fill(directory)
        finally:
            fleet.run("down", "--drain-timeout", "0")
        assert not psutil.pid_exists(before["stubs-1"])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


async def test_what_could_not_be_recorded_is_said_once(tmp_path: Path) -> None:
    async with running([StubServer()]) as targets:
        file = attached(tmp_path, targets)
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "skyctl", "pause", "-f", str(file)],
            env={"SKYCTL_HOME": "/dev/null/home", "PATH": "", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
        assert len(warnings) == 1 and "changes are not recorded in" in warnings[0]
        assert "Not a directory; make " in warnings[0]


@pytest.mark.parametrize("arguments", [["--version"], ["help"], ["help", "--json"]])
def test_a_full_stdout_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "skyctl", *arguments],
            env={"SKYCTL_HOME": str(tmp_path), "PATH": "", "HOME": str(tmp_path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write: No space left on device\n"

"""The failure matrix: rows of replicas whose weights were pushed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.requests import Sleep
from skyctl.errors import ConflictError
from skyctl.push.request import PushRequest
from skyctl.supervisor import weights
from skyctl.supervisor.resident import Supervisor
from tests.processes.supervisor.supervising import (
    bring_up,
    ended,
    pid_of,
    pushable,
    pushed,
    routed,
    set_faults,
    states,
    stub_state,
    supervising,
)
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_router


@asynccontextmanager
async def two_pushable(
    tmp_path: Path, draft: Path | None = None, names: str = "ab"
) -> AsyncIterator[tuple[Supervisor, Path]]:
    """Servers, `a` and `b` unless named, behind a router, on one checkpoint, and drafting with
    `draft`; and another checkpoint to push.
    """
    base = write_checkpoint(tmp_path / "base")
    new = write_checkpoint(tmp_path / "new", tiny_tensors(50))
    async with supervising(tmp_path) as supervisor:
        servers = [pushable(name, base, draft) for name in names]
        await bring_up(supervisor, fleet_plan(servers, stub_router()))
        yield supervisor, new


async def test_a_replica_killed_after_a_push_is_routed_only_with_the_weights_of_the_push(
    tmp_path: Path,
) -> None:
    async with two_pushable(tmp_path) as (supervisor, new):
        await pushed(supervisor, new)
        expected = (await stub_state(supervisor, "b"))["digest"]
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: routed(supervisor) == {"b"})
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert (await stub_state(supervisor, "a"))["digest"] == expected


async def test_a_replica_that_dies_while_it_takes_the_fleets_weights_is_not_routed_without_them(
    tmp_path: Path,
) -> None:
    async with two_pushable(tmp_path) as (supervisor, new):
        await pushed(supervisor, new)
        expected = (await stub_state(supervisor, "b"))["digest"]
        replica = supervisor.replicas["a"]
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: replica.phase == "admitting")
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: replica.phase != "admitting")
        await eventually(lambda: replica.phase == "up")
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert (await stub_state(supervisor, "a"))["digest"] == expected


@pytest.mark.parametrize(
    ("fault", "event"),
    [
        ("", "its workers copied those of b"),
        ("share", "it is quantized; b writes them to a file"),
        ("fill", "was given up"),
        ("digest", "does not hold what was announced"),
    ],
)
async def test_a_replica_whose_fleets_checkpoint_was_deleted_takes_it_from_its_sibling(
    tmp_path: Path, fault: str, event: str
) -> None:
    async with two_pushable(tmp_path) as (supervisor, new):
        await pushed(supervisor, new)
        expected = (await stub_state(supervisor, "b"))["digest"]
        await set_faults(supervisor, "b", {"copies": fault})
        (new / "model.safetensors").unlink()
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: routed(supervisor) == {"b"})
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        assert (await stub_state(supervisor, "a"))["digest"] == expected
        assert event in " ".join(e.message for e in supervisor.state.events() if e.subject == "a")
        assert not list(supervisor.paths.staging.iterdir())


@pytest.mark.parametrize("fault", ["", "share"], ids=["copied", "written to a file"])
async def test_a_replica_is_not_put_to_sleep_while_its_sibling_takes_weights_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its memory is unmapped in its sleep: its engine would die of the next read."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    def held(read: Any) -> Any:
        async def later(*arguments: Any, **options: Any) -> Any:
            begun.set()
            await go_on.wait()
            return await read(*arguments, **options)

        return later

    async with two_pushable(tmp_path) as (supervisor, new):
        await pushed(supervisor, new)
        await set_faults(supervisor, "b", {"copies": fault})
        (new / "model.safetensors").unlink()
        name = "write_weights" if fault else "_pushed"
        monkeypatch.setattr(weights, name, held(getattr(weights, name)))
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await asyncio.wait_for(begun.wait(), 20)
        with pytest.raises(ConflictError, match="takes its weights from b"):
            await supervisor.control(Sleep(servers=("b",)))
        assert states(supervisor)["b"] == "ready"
        go_on.set()
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        [slept] = await supervisor.control(Sleep(servers=("b",)))
        assert slept.ok


async def test_two_replicas_that_restart_together_copy_from_one_sibling_in_turn(
    tmp_path: Path,
) -> None:
    async with two_pushable(tmp_path, names="abc") as (supervisor, new):
        await pushed(supervisor, new)
        expected = (await stub_state(supervisor, "b"))["digest"]
        (new / "model.safetensors").unlink()
        for name in "ac":
            os.kill(pid_of(supervisor, name), signal.SIGKILL)
        await eventually(lambda: routed(supervisor) == {"b"})
        await eventually(lambda: routed(supervisor) == {"a", "b", "c"})
        events = supervisor.state.events()
        copied = [e.subject for e in events if e.message.startswith("its workers copied")]
        assert sorted(copied) == ["a", "c"]
        for name in "ac":
            assert (await stub_state(supervisor, name))["digest"] == expected


async def test_a_replica_that_takes_weights_from_its_sibling_takes_the_draft_from_its_files(
    tmp_path: Path,
) -> None:
    drafts = [write_checkpoint(tmp_path / f"draft{n}", tiny_tensors(n)) for n in (70, 90)]
    async with two_pushable(tmp_path, drafts[0]) as (supervisor, new):
        await pushed(supervisor, new, draft=str(drafts[1]))
        expected = await stub_state(supervisor, "b")
        (new / "model.safetensors").unlink()
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: routed(supervisor) == {"b"})
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        state = await stub_state(supervisor, "a")
        for digest in ("digest", "draft_digest"):
            assert state[digest] == expected[digest]


async def test_a_replica_whose_sibling_is_not_what_is_on_record_is_quarantined(
    tmp_path: Path,
) -> None:
    async with two_pushable(tmp_path) as (supervisor, new):
        await pushed(supervisor, new)
        (new / "model.safetensors").unlink()
        supervisor.replicas["b"].update_row(weights_digest="another")
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        assert routed(supervisor) == {"b"}
        assert "b does not hold the weights" in (supervisor.replicas["a"].row.quarantine or "")


async def test_a_replica_whose_fleets_checkpoint_was_deleted_is_quarantined_without_a_sibling(
    tmp_path: Path,
) -> None:
    async with two_pushable(tmp_path) as (supervisor, new):
        await pushed(supervisor, new)
        (new / "model.safetensors").unlink()
        supervisor.replicas["b"].update_row(quarantine="a test")
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await eventually(lambda: states(supervisor)["a"] == "quarantined")
        await eventually(lambda: supervisor.replicas["a"].phase == "up")
        assert routed(supervisor) == set()
        assert "skyctl sync-weights" in (supervisor.replicas["a"].row.quarantine or "")
        held = supervisor.paths.hold_file("a")
        assert held.exists()  # who asks it directly would hear the weights it was started from
        supervisor.replicas["a"].update_row(quarantine=None)
        assert not held.exists()


@pytest.mark.parametrize("left", ["both", "one"])
async def test_what_a_push_left_in_doubt_is_put_right_without_being_asked(
    tmp_path: Path, left: str
) -> None:
    bad = ["a", "b"] if left == "both" else ["b"]
    async with two_pushable(tmp_path) as (supervisor, new):
        for name in bad:  # every update, again and again, as long as this process lives
            await set_faults(supervisor, name, {"/update_weights": {"kind": "status"}})
        job = await supervisor.start_push(PushRequest(str(new)))
        await eventually(lambda: supervisor.state.journal.job(job).state == "failed")
        # nobody types anything
        await eventually(lambda: states(supervisor) == {"a": "ready", "b": "ready"})
        await eventually(lambda: routed(supervisor) == {"a", "b"})
        await ended(supervisor)
        assert {one.server for one in supervisor.recovered if one.action == "restart"} == set(bad)
        held = {(await stub_state(supervisor, name))["digest"] for name in ("a", "b")}
        versions = {supervisor.replicas[name].row.weight_version for name in ("a", "b")}
        assert len(held) == len(versions) == 1


async def test_a_server_killed_in_a_push_is_replaced_at_the_version_of_the_others(
    tmp_path: Path,
) -> None:
    async with two_pushable(tmp_path) as (supervisor, new):
        # held in its update until it is killed
        await set_faults(supervisor, "a", {"/update_weights": {"kind": "hang"}})
        pid = pid_of(supervisor, "a")
        await supervisor.start_push(PushRequest(str(new)))
        await eventually(lambda: states(supervisor).get("a") == "updating")
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: supervisor.push_job is None)
        await eventually(
            lambda: (
                states(supervisor)["a"] in ("ready", "quarantined")
                and pid_of(supervisor, "a") != pid
            )
        )
        both = [await stub_state(supervisor, name) for name in ("a", "b")]
        in_router = routed(supervisor)
        assert len({s["digest"] for s, n in zip(both, "ab", strict=True) if n in in_router}) == 1
        assert "b" in in_router and not both[1]["paused"]

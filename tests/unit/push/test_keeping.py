"""The fleet's own copies: they outlive what the trainer does to its directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.checkpoints import keeping
from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.keeping import delete_copy, keep_copy, mark_recorded, sweep_kept
from skyctl.core import jobs, saving
from skyctl.core import keeping as core_keeping
from skyctl.core.arbiter import Turn
from skyctl.core.keeping import place_copies
from skyctl.core.requests import SaveWeights
from skyctl.core.saving import source_of
from skyctl.errors import PreflightError, SkyctlError
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.push.source import rollback
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.kept_weights import KeptWeights, forget, kept_weights, remember
from skyctl.store.paths import FleetPaths, sync_directory
from skyctl.store.state import FleetState
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.push.fleets import Stubs


@pytest.fixture
def state(tmp_path: Path) -> Iterator[FleetState]:
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        yield state


async def pushed(state: FleetState, stubs: Stubs, kept: Path, **changes: Any) -> Any:
    asked: dict[str, Any] = {"checkpoint": str(stubs.new), "keep": True, **changes}
    request = PushRequest(**asked)
    job = jobs.open_push(state.journal, Turn(None), request)
    async with stubs.client() as client:
        await jobs.run_push(job, request, stubs.fleet, client=client, state=state, kept=kept)
    return state.journal.job(job.id)


async def test_what_is_kept_is_pushed_and_outlives_its_source(
    tmp_path: Path, state: FleetState
) -> None:
    stubs = Stubs(tmp_path)
    (stubs.new / "optimizer.pt").write_bytes(b"state of the trainer")
    job = await pushed(state, stubs, tmp_path / "kept", weight_version="step-1")
    assert job.state == "succeeded", job.error
    [one] = kept_weights(state)
    copy = Path(one.checkpoint)
    assert (one.version, one.source, copy.name) == ("step-1", str(stubs.new), "new")
    assert state.weights().checkpoint == one.checkpoint
    assert state.weights().checkpoint_digest == one.checkpoint_digest
    assert one.content_digest and one.bytes == read_checkpoint(one.checkpoint).total_bytes
    assert "optimizer.pt" not in files_of(copy)
    assert modes_of(copy) == {0o600}
    shutil.rmtree(stubs.new)
    assert read_checkpoint(one.checkpoint).identity_digest == one.checkpoint_digest
    request = rollback(PushRequest(""), state.journal.pushes(), kept_weights(state), "step-1")
    assert (request.checkpoint, request.expected_digest) == (one.checkpoint, one.checkpoint_digest)
    again = await pushed(state, stubs, tmp_path / "kept", **_plain(request))
    assert again.state == "succeeded", again.error


async def test_a_copy_outlives_the_state_file_that_has_its_record(tmp_path: Path) -> None:
    stubs, kept = Stubs(tmp_path), tmp_path / "kept"
    for number in (1, 2):
        with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
            write_checkpoint(tmp_path / f"step-{number}", tiny_tensors(number))
            asked = {"checkpoint": str(tmp_path / f"step-{number}")}
            job = await pushed(state, stubs, kept, **asked)
            assert job.state == "succeeded", job.error
        state.path.rename(tmp_path / f"damaged-{number}")
    assert sorted(path.name for path in kept.glob("*/step-*")) == ["step-1", "step-2"]


async def test_a_copy_that_the_fleet_runs_outlives_a_push_that_never_recorded_it(
    tmp_path: Path, state: FleetState
) -> None:
    stubs, kept = Stubs(tmp_path), tmp_path / "kept"
    assert (await pushed(state, stubs, kept, weight_version="v1")).state == "succeeded"
    assert forget(state, "v1")  # as if its process had died before, and recovery had committed it
    other = write_checkpoint(tmp_path / "other", {"w": ("F32", [1], b"1234")})
    assert (await pushed(state, stubs, kept, checkpoint=str(other))).state == "failed"
    assert read_checkpoint(str(state.weights().checkpoint))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def modes_of(directory: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in directory.iterdir()}


def _plain(request: PushRequest) -> dict[str, Any]:
    names = ("checkpoint", "weight_version", "expected_digest")
    return {name: getattr(request, name) for name in names}


async def test_a_source_that_is_overwritten_in_place_leaves_the_copy_as_it_was(
    tmp_path: Path, state: FleetState
) -> None:
    stubs = Stubs(tmp_path)
    await pushed(state, stubs, tmp_path / "kept")
    [one] = kept_weights(state)
    copied = files_of(Path(one.checkpoint))
    for shard in stubs.new.glob("*.safetensors"):
        with shard.open("r+b") as file:  # the same inode, as safetensors' save_file does
            file.truncate(0)
    assert files_of(Path(one.checkpoint)) == copied


async def test_the_same_files_are_copied_once(tmp_path: Path, state: FleetState) -> None:
    stubs = Stubs(tmp_path)
    for version in ("step-1", "again"):
        job = await pushed(state, stubs, tmp_path / "kept", weight_version=version)
        assert job.state == "succeeded"
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert [one.version for one in kept_weights(state)] == ["again", "step-1"]
    assert forget(state, "step-1") == []  # `again` needs the copy
    assert [one.version for one in forget(state, "again")] == ["again"]


async def test_a_push_that_fails_keeps_nothing(tmp_path: Path, state: FleetState) -> None:
    stubs = Stubs(tmp_path)
    stubs.fail_update(1, calls=range(1, 100))
    stubs.fail_update(0, calls=range(1, 100))
    job = await pushed(state, stubs, tmp_path / "kept")
    assert job.state == "failed"
    assert kept_weights(state) == []
    assert list((tmp_path / "kept").iterdir()) == []


async def test_a_copy_that_some_servers_run_stays(tmp_path: Path, state: FleetState) -> None:
    """The fleet is pointed at it: those that failed join it when they are restarted."""
    stubs = Stubs(tmp_path)
    stubs.fail_update(1, calls=range(1, 100))
    job = await pushed(state, stubs, tmp_path / "kept", weight_version="step-1")
    assert job.state == "failed"
    [one] = kept_weights(state)
    assert (one.version, one.checkpoint) == ("step-1", state.weights().checkpoint)
    assert read_checkpoint(one.checkpoint).identity_digest == one.checkpoint_digest


async def test_without_keep_and_in_a_dry_run_nothing_is_copied(
    tmp_path: Path, state: FleetState
) -> None:
    stubs = Stubs(tmp_path)
    assert (await pushed(state, stubs, tmp_path / "kept", dry_run=True)).state == "succeeded"
    assert (await pushed(state, stubs, tmp_path / "kept", keep=False)).state == "succeeded"
    assert not (tmp_path / "kept").exists()
    assert state.weights().checkpoint == str(stubs.new)


async def test_a_copy_that_is_cancelled_ends_and_leaves_nothing(
    tmp_path: Path, state: FleetState, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, of_the_kernel = asyncio.get_running_loop(), os.copy_file_range
    pieces: list[int] = []

    def cancel(done: threading.Event) -> None:
        copying.cancel()
        loop.call_soon(done.set)

    def cancelled_meanwhile(read: int, write: int, count: int) -> int:
        pieces.append(count)
        done = threading.Event()
        loop.call_soon_threadsafe(cancel, done)
        done.wait()
        return of_the_kernel(read, write, count)

    monkeypatch.setattr("skyctl.checkpoints.keeping.os.copy_file_range", cancelled_meanwhile)
    request = PushRequest(str(Stubs(tmp_path).new), keep=True)
    context = core_keeping.keeping(request, tmp_path / "kept", state)
    copying = asyncio.ensure_future(context.__aenter__())
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert list((tmp_path / "kept").iterdir()) == []
    assert len(pieces) == 1


async def test_a_copy_that_cannot_be_read_does_not_stay(
    tmp_path: Path, state: FleetState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: str) -> Any:
        if Path(path).is_relative_to(tmp_path / "kept"):
            raise PreflightError("it is broken")
        return read_checkpoint(path)

    monkeypatch.setattr(core_keeping, "read_checkpoint", read)
    job = await pushed(state, Stubs(tmp_path), tmp_path / "kept")
    assert job.error is not None and job.error["message"] == "it is broken"
    assert list((tmp_path / "kept").iterdir()) == []


async def test_without_room_it_is_refused_before_anything_is_touched(
    tmp_path: Path, state: FleetState, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        "skyctl.checkpoints.keeping.shutil.disk_usage", lambda path: usage(10, 10, 10)
    )
    stubs = Stubs(tmp_path)
    job = await pushed(state, stubs, tmp_path / "kept")
    assert job.error is not None and job.error["kind"] == "PreflightError"
    assert "do not fit" in job.error["message"] and "10 B are free" in job.error["message"]
    assert all(engine.log == [] for engine in stubs.engines)


def test_a_disk_that_fills_up_leaves_no_part_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_checkpoint(str(write_checkpoint(tmp_path / "new", tiny_tensors(5), shards=2)))

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("skyctl.checkpoints.keeping.os.copy_file_range", full)
    monkeypatch.setattr("skyctl.checkpoints.keeping.shutil.copyfileobj", full)
    with pytest.raises(SkyctlError, match="cannot be kept: No space left"):
        keep_copy(source, tmp_path / "kept", ())
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_kernel_that_cannot_copy_between_file_systems_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_checkpoint(str(write_checkpoint(tmp_path / "new", tiny_tensors(5))))

    def cannot(*arguments: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("skyctl.checkpoints.keeping.os.copy_file_range", cannot)
    copy = keep_copy(source, tmp_path / "kept", ())
    assert read_checkpoint(str(copy)).layout_digest == source.layout_digest
    for path in source.path.glob("*.safetensors"):
        assert (copy / path.name).read_bytes() == path.read_bytes()


def test_a_file_system_whose_files_the_kernel_stops_copying_is_copied_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_checkpoint(str(write_checkpoint(tmp_path / "new", tiny_tensors(5))))
    of_the_kernel = os.copy_file_range
    calls: list[int] = []

    def first_only(read: int, write: int, count: int) -> int:
        calls.append(count)
        return of_the_kernel(read, write, 100) if len(calls) % 2 else 0

    monkeypatch.setattr("skyctl.checkpoints.keeping.os.copy_file_range", first_only)
    copy = keep_copy(source, tmp_path / "kept", ())
    for path in source.path.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes()


def test_a_source_that_changes_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_checkpoint(str(write_checkpoint(tmp_path / "new", tiny_tensors(5))))

    def touch(directory: Path) -> None:
        for shard in source.path.glob("*.safetensors"):
            os.utime(shard, ns=(1, 1))
        sync_directory(directory)

    monkeypatch.setattr(keeping, "sync_directory", touch)
    with pytest.raises(PreflightError, match="changed while it was copied"):
        keep_copy(source, tmp_path / "kept", ())
    assert list((tmp_path / "kept").iterdir()) == []


def test_what_a_dead_push_copied_is_swept_by_the_next(tmp_path: Path) -> None:
    source = read_checkpoint(str(write_checkpoint(tmp_path / "new", tiny_tensors(5))))
    first = keep_copy(source, tmp_path / "kept", ())
    second = keep_copy(source, tmp_path / "kept", {str(first)})
    third = keep_copy(source, tmp_path / "kept", {str(first)})
    assert first.exists() and third.exists() and not second.exists()
    delete_copy(first, tmp_path / "kept")
    delete_copy(source.path, tmp_path / "kept")
    assert not first.parent.exists() and source.path.exists()


def test_a_copy_whose_deletion_broke_off_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_checkpoint(str(write_checkpoint(tmp_path / "new", tiny_tensors(5))))
    copy = keep_copy(source, tmp_path / "kept", ())
    mark_recorded(copy)
    with monkeypatch.context() as dying:
        dying.setattr("skyctl.checkpoints.keeping.shutil.rmtree", lambda *_, **__: None)
        delete_copy(copy, tmp_path / "kept")
    sweep_kept(tmp_path / "kept", ())
    assert list((tmp_path / "kept").iterdir()) == []


def test_copies_are_on_record_without_the_links_on_the_way_to_them(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    source = read_checkpoint(str(write_checkpoint(tmp_path / "new", tiny_tensors(5))))
    copy = keep_copy(source, tmp_path / "home" / "kept", ())
    assert copy.is_relative_to(tmp_path / "disk")
    delete_copy(copy, tmp_path / "home" / "kept")
    assert not copy.exists()


def test_a_shared_directory_is_where_its_link_led_when_it_was_taken(
    tmp_path: Path, state: FleetState
) -> None:
    for disk in ("one", "two"):
        (tmp_path / disk).mkdir()
    shared = tmp_path / "shared"
    shared.symlink_to(tmp_path / "one")
    paths = FleetPaths(tmp_path, "demo")
    paths.directory.mkdir(parents=True, exist_ok=True)
    place_copies(paths, state, str(shared))
    place = paths.shared
    assert place is not None and place.parent == tmp_path / "one"
    shared.unlink()
    shared.symlink_to(tmp_path / "two")
    place_copies(paths, state, str(shared))  # the fleet's copies are where they were
    assert paths.shared == place
    place_copies(paths, state, None)
    assert paths.shared is None


def test_shards_that_are_links_are_copied_by_their_names(tmp_path: Path) -> None:
    real = write_checkpoint(tmp_path / "blobs", tiny_tensors(5))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(path)
    copy = keep_copy(read_checkpoint(str(snapshot)), tmp_path / "kept", ())
    assert not any(path.is_symlink() for path in copy.iterdir())
    assert {path.name for path in copy.iterdir()} == {path.name for path in real.iterdir()}


def test_a_kept_copy_goes_before_the_directory_of_then(state: FleetState) -> None:
    kept = KeptWeights("v1", "/kept/1/a", "/runs/a", "copy", "source", "content", 5, 1.0)
    remember(state, kept)
    state.journal.record_push(
        "push-1", ok=True, version="v1", checkpoint="/runs/a", checkpoint_digest="s", result={}
    )
    state.journal.record_push(
        "push-2", ok=True, version="v2", checkpoint="/runs/b", checkpoint_digest="t", result={}
    )
    request = rollback(PushRequest(""), state.journal.pushes(), kept_weights(state))
    assert (request.checkpoint, request.expected_digest) == ("/kept/1/a", "copy")
    by_name = rollback(PushRequest(""), state.journal.pushes(), [], "v1")
    assert (by_name.checkpoint, by_name.expected_digest) == ("/runs/a", "s")
    with pytest.raises(SkyctlError, match="no version v9") as caught:
        rollback(PushRequest(""), state.journal.pushes(), kept_weights(state), "v9")
    assert caught.value.hint == "its versions: v2, v1"


async def test_what_is_saved_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, state: FleetState, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, synced, sync = tmp_path / "saved", set[str](), os.fsync

    async def write_weights(server: Any, model: Any, directory: Path, **_: Any) -> Any:
        write_checkpoint(directory, tiny_tensors(5))
        return SimpleNamespace(tensors=1, total_bytes=1, digest="")

    async def weight_version() -> None:
        return None

    def note(descriptor: int) -> None:
        if not to.exists():
            synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(saving, "write_weights", write_weights)

    async def metrics() -> Any:
        return SimpleNamespace(sleep_level=0)

    server = SimpleNamespace(weight_version=weight_version, metrics=metrics)
    monkeypatch.setattr(saving.engines, "server", lambda *_, **__: server)
    monkeypatch.setattr(os, "fsync", note)
    targets, client = [ServerTarget("a", "http://127.0.0.1:1")], SimpleNamespace()
    request = SaveWeights(str(to))
    await saving.save_weights(request, targets, base=None, state=state, client=client)  # type: ignore[arg-type]
    assert files_of(to).keys() < synced


def test_a_server_with_other_files_under_the_fleets_label_is_no_source(state: FleetState) -> None:
    """As those of a canary may be: what is saved of it would not be the fleet's version."""
    target = ServerTarget("a", "http://127.0.0.1:1")
    state.set_weights(FleetWeights("latest", "/ckpt", "these"))
    state.update_server("a", weight_version="latest", checkpoint_digest="others")
    with pytest.raises(PreflightError, match="no server is awake that has the fleet's weights"):
        source_of([target], state)
    state.update_server("a", checkpoint_digest="these")
    assert source_of([target], state) is target

"""The scheduler of training requests with a worker that only takes notes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
from skyctl.errors import StateUnwritable
from skyctl.tinker import files, open_models, records, requests
from skyctl.tinker.housekeeping import Housekeeping, Keep
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.open_models import Run
from skyctl.tinker.training import Training
from skyctl.tinker.training_process import Refused, WorkerDied
from tests.unit.tinker.recording_worker import Notes, Sliced, training_of


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


async def add(
    ledger: Ledger, scheduler: Training, model: str, *kinds: str, first: int = 0, rank: int = 8
) -> None:
    """Accept requests of a model, in this order; passes have 120 bytes."""
    for seq, kind in enumerate(kinds, first):

        def commit(connection: Any, seq: int = seq, kind: str = kind) -> None:
            if seq == 0:
                records.add_model(connection, model, "s", {"lora": {"rank": rank}}, None)
            extra = {"params": {}, "path": "tinker://gone", "optimizer": False}
            records.add_request(connection, model, seq, kind, extra, b"")

        await ledger.run(commit)
        scheduler.accepted(model, seq, 120 if kind == requests.FORWARD_BACKWARD else 0)


async def until_ended(ledger: Ledger, model: str) -> list[str]:
    sql = "SELECT state FROM requests WHERE owner = ? ORDER BY seq"
    async with asyncio.timeout(5):
        while "accepted" in (states := [row[0] for row in await ledger.rows(sql, model)]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return states


async def test_a_ledger_goes_on_after_an_error_of_the_disk_in_a_change(ledger: Ledger) -> None:
    def change(_: Any) -> None:
        raise PermissionError("storage cannot be looked at")

    async with asyncio.timeout(5):
        with pytest.raises(StateUnwritable, match="cannot be looked at"):
            await ledger.run(change)
        assert await ledger.rows("SELECT id FROM models") == []
        # nor does it fail what waits beside it for the same commit
        pause = ledger.run(lambda _: time.sleep(0.1))
        beside = (ledger.rows("SELECT id FROM models"), ledger.run(change))
        _, rows, failed = await asyncio.gather(pause, *beside, return_exceptions=True)
        assert rows == [] and isinstance(failed, StateUnwritable)


@pytest.mark.parametrize("step", ["_digest", "sync_directory"])
def test_a_disk_that_fails_at_any_step_of_a_save_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, step, full)
    with pytest.raises(OSError, match="No space"):
        files.write_checkpoint(tmp_path / "c", lambda beside: (beside / "a").touch(), {})
    assert list(tmp_path.iterdir()) == []


async def test_checkpoints_of_a_storage_that_was_moved_are_kept_and_found(
    ledger: Ledger, tmp_path: Path
) -> None:
    now, storage = time.time(), tmp_path / "here"
    for name in ("checkpoints/c", "snapshots/s", "checkpoints/unrecorded"):
        (storage / name).mkdir(parents=True)
    await ledger.run(lambda c: records.add_model(c, "m", "s", {}, None))
    await ledger.write("UPDATE models SET snapshot = '/before/snapshots/s'")
    await ledger.write(
        "INSERT INTO checkpoints (path, model, kind, name, directory, config, optimizer, created, "
        "size) VALUES ('tinker://m/weights/c', 'm', 'training', 'c', '/before/checkpoints/c', "
        "'{}', 1, ?, 1)",
        now,
    )
    await training_of(ledger, storage, Notes()).load()
    assert sorted(found.name for found in storage.glob("*/*")) == ["c", "s"]
    [row] = await ledger.rows("SELECT directory, snapshot FROM checkpoints, models")
    assert tuple(row) == (str(storage / "checkpoints/c"), str(storage / "snapshots/s"))


async def test_a_load_that_fails_leaves_an_incomplete_gradient_incomplete(
    ledger: Ledger, tmp_path: Path
) -> None:
    worker = Notes()
    worker.refused.add("forward_backward")
    scheduler = training_of(ledger, tmp_path, worker)
    kinds = (requests.CREATE, requests.FORWARD_BACKWARD, requests.LOAD, requests.OPTIM_STEP)
    await add(ledger, scheduler, "m", *kinds)
    task = asyncio.create_task(scheduler.run())
    assert await until_ended(ledger, "m") == ["done", "failed", "failed", "failed"]
    assert worker.calls[-1] == "zero_gradients" and "optim_step" not in worker.calls
    task.cancel()


async def test_what_failed_is_not_repeated_once_its_result_is_gone(
    ledger: Ledger, tmp_path: Path
) -> None:
    worker = Notes()
    worker.refused.add("forward_backward")
    scheduler = training_of(ledger, tmp_path, worker)
    kinds = (requests.CREATE, requests.FORWARD_BACKWARD, requests.OPTIM_STEP)
    await add(ledger, scheduler, "m", *kinds, requests.OPTIM_STEP)
    for _ in kinds:
        await scheduler._carry_out("m")
    await ledger.write("UPDATE requests SET done_at = 0 WHERE state = 'failed'")
    await Housekeeping(ledger, scheduler, None, Keep()).remove_old()  # type: ignore[arg-type]
    worker.life, worker.calls = 2, []  # it died, and is rebuilt
    await scheduler._carry_out("m")
    assert worker.calls == ["create", "zero_gradients", "optim_step"]


async def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_loaded(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Notes()
    scheduler = training_of(ledger, tmp_path, worker)
    await add(ledger, scheduler, "m", requests.LOAD)
    extra, config = {"path": "tinker://gone"}, '{"lora": {"rank": 4}}'
    for statement in requests.add_checkpoint("m", requests.SAVE, "/c", config, 1, extra):
        await ledger.write(statement[0], *statement[1])

    async def delete(header: dict[str, Any], *body: bytes, **options: Any) -> Any:
        await ledger.write("DELETE FROM checkpoints")
        return await Notes.call(worker, header, *body, **options)

    monkeypatch.setattr(worker, "call", delete)
    await scheduler._carry_out("m")
    assert await until_ended(ledger, "m") == ["done"]
    assert (await scheduler._models.row("m"))["config"] == config


async def test_a_step_that_the_disk_does_not_take_is_recorded_once_it_does_and_done_once(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.tinker.ledger._DISK_S", 0.01)
    worker, run, failures = Notes(), ledger.run, 3
    scheduler = training_of(ledger, tmp_path, worker)
    await add(ledger, scheduler, "m", requests.CREATE, requests.OPTIM_STEP)

    async def full(change: Any) -> Any:
        nonlocal failures
        if change.__name__ == "commit" and "optim_step" in worker.calls and failures:  # no read
            failures -= 1
            raise StateUnwritable("the disk is full")
        return await run(change)

    monkeypatch.setattr(ledger, "run", full)
    task = asyncio.create_task(scheduler.run())
    async with asyncio.timeout(5):
        while failures and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await until_ended(ledger, "m") == ["done", "done"]
    assert worker.calls.count("optim_step") == 1
    task.cancel()


async def test_a_step_is_done_though_its_snapshot_cannot_be_written(
    ledger: Ledger, tmp_path: Path
) -> None:
    worker = Notes()
    worker.refused.add("save")
    scheduler = training_of(ledger, tmp_path, worker, snapshot_steps=2)
    await add(ledger, scheduler, "m", requests.CREATE, *[requests.OPTIM_STEP] * 5)
    task = asyncio.create_task(scheduler.run())
    assert await until_ended(ledger, "m") == ["done"] * 6
    assert (worker.calls.count("optim_step"), worker.calls.count("save")) == (5, 2)
    task.cancel()


@pytest.mark.parametrize("kind", [requests.OPTIM_STEP, requests.SAVE])
async def test_what_a_worker_that_dies_in_a_save_has_written_is_removed(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    worker = Notes()
    call, saves = worker.call, 0

    def write_parts(directory: Path) -> None:
        for part in ("0.partial", "1.partial", "partial"):
            directory.with_name(f".{directory.name}.{part}").mkdir(parents=True)
        directory.mkdir()

    async def dying(header: dict[str, Any], *body: bytes, **options: Any) -> Any:
        nonlocal saves
        if header["do"] == "save":
            saves += 1
            write_parts(Path(header["directory"]))
            raise WorkerDied("a rank ended")
        return await call(header, *body, **options)

    monkeypatch.setattr(worker, "call", dying)
    scheduler = training_of(ledger, tmp_path, worker, snapshot_steps=1)
    await add(ledger, scheduler, "m", requests.CREATE, kind)
    task = asyncio.create_task(scheduler.run())
    assert await until_ended(ledger, "m") == ["done", "failed"]
    assert saves == 3 and await asyncio.to_thread(lambda: [*tmp_path.glob("*/*")]) == []
    task.cancel()


async def test_a_worker_that_dies_while_the_disk_is_full_ends_no_training(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyctl.tinker.ledger._DISK_S", 0.01)
    worker, run, failures = Notes(), ledger.run, iter(range(3))

    async def full(change: Any) -> Any:
        texts = [str(cell.cell_contents) for cell in change.__closure__ or ()]
        counts = any(text.startswith("UPDATE requests SET attempts") for text in texts)
        if counts and next(failures, None) is not None:
            raise StateUnwritable("the disk is full")
        return await run(change)

    async def die(header: dict[str, Any], *args: Any, **named: Any) -> Any:
        if header["do"] == "optim_step" and worker.life == 1:
            worker.life = 2
            raise WorkerDied("killed")
        return await Notes.call(worker, header, *args, **named)

    monkeypatch.setattr(worker, "call", die)
    monkeypatch.setattr(ledger, "run", full)
    scheduler = training_of(ledger, tmp_path, worker)
    await add(ledger, scheduler, "m", requests.CREATE, requests.OPTIM_STEP)
    task = asyncio.create_task(scheduler.run())
    assert await until_ended(ledger, "m") == ["done", "done"]
    assert not task.done()
    task.cancel()


async def test_eight_models_have_turns_and_nobody_waits_for_anothers_queue(
    ledger: Ledger, tmp_path: Path
) -> None:
    worker = Notes()
    scheduler = training_of(ledger, tmp_path, worker)
    models = [f"m{number}" for number in range(8)]
    await add(ledger, scheduler, models[0], requests.CREATE, *[requests.OPTIM_STEP] * 30)
    for model in models[1:]:
        await add(ledger, scheduler, model, requests.CREATE, *[requests.OPTIM_STEP] * 3)
    task = asyncio.create_task(scheduler.run())
    for model in models:
        await until_ended(ledger, model)
    task.cancel()
    for begin in range(0, 32, 8):  # everybody's first request, everybody's second, …
        assert sorted(worker.turns[begin : begin + 8]) == models
    assert set(worker.turns[32:]) == {models[0]}


async def test_the_worker_holds_one_whole_model_and_few_adapters(
    ledger: Ledger, tmp_path: Path
) -> None:
    worker = Notes()
    scheduler = training_of(ledger, tmp_path, worker, open_models=3, parked_bytes=0)
    kinds = (requests.CREATE, requests.OPTIM_STEP)
    for number in range(4):
        await add(ledger, scheduler, f"whole-{number}", *kinds, rank=0)
        await add(ledger, scheduler, f"lora-{number}", *kinds)
    task = asyncio.create_task(scheduler.run())
    for number in range(4):
        assert await until_ended(ledger, f"whole-{number}") == ["done", "done"]
        assert await until_ended(ledger, f"lora-{number}") == ["done", "done"]
    task.cancel()
    assert len([name for name in worker.opened if name.startswith("whole")]) == 1
    assert len(worker.opened) <= 3


async def test_a_model_whose_place_was_taken_is_parked_and_not_rebuilt(
    ledger: Ledger, tmp_path: Path
) -> None:
    worker = Notes()
    scheduler = training_of(ledger, tmp_path, worker, open_models=3, parked_bytes=1)
    models = [f"m{number}" for number in range(5)]
    for number in range(3):
        for model in models:
            kinds = (requests.OPTIM_STEP,) if number else (requests.CREATE,)
            await add(ledger, scheduler, model, *kinds, first=number)
    for model in models[:4]:  # as much as may be parked
        for _ in range(3):
            await scheduler._carry_out(model)
    assert worker.calls.count("create") == 4 and worker.calls.count("close") == 0
    assert worker.calls.count("park") == 1
    for _ in range(3):
        await scheduler._carry_out(models[4])
    assert worker.calls.count("close") == 1 and models[0] not in worker.opened


async def test_a_model_that_is_to_be_parked_when_the_worker_dies_fails_no_request(
    ledger: Ledger, tmp_path: Path
) -> None:
    class Dying(Notes):
        async def call(self, header: Any, body: bytes = b"", *, life: int | None = None) -> Any:
            if header["do"] == "park" and self.life == 1:  # a sample has another one started first
                self.life, self.opened = 2, set()
            if life not in (None, self.life):
                raise WorkerDied("another worker lives now")
            if header["do"] == "park" and header["model"] not in self.opened:
                raise Refused("the trainer failed: KeyError", "server")
            return await super().call(header, body, life=life)

    scheduler = training_of(ledger, tmp_path, Dying(), open_models=1)
    for name in "ab":
        await add(ledger, scheduler, name, requests.CREATE)
    running = asyncio.create_task(scheduler.run())
    assert [await until_ended(ledger, name) for name in "ab"] == [["done"], ["done"]]
    running.cancel()


@pytest.mark.parametrize("joined", [True, False])
async def test_passes_that_wait_are_computed_at_once_and_repeated_as_they_were(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    worker, asked = Notes(), []

    async def call(header: dict[str, Any], body: bytes = b"", **named: Any) -> Any:
        if "units" in header:
            asked.append([len(unit) for unit in header["units"]])
        return await Notes.call(worker, header, body, **named)

    monkeypatch.setattr(worker, "call", call)
    scheduler = training_of(ledger, tmp_path, worker, join_requests=joined)
    kinds = (requests.CREATE, *[requests.FORWARD_BACKWARD] * 3, requests.OPTIM_STEP)
    await add(ledger, scheduler, "m", *kinds, requests.FORWARD_BACKWARD)
    task = asyncio.create_task(scheduler.run())
    assert await until_ended(ledger, "m") == ["done"] * 6
    once = [[3]] if joined else [[1, 1, 1]]
    assert asked == [*once, [1]]
    worker.life += 1  # it died, and is rebuilt
    await add(ledger, scheduler, "m", requests.OPTIM_STEP, first=6)
    await until_ended(ledger, "m")
    task.cancel()
    again = once if joined else [[1]] * 3
    assert asked[2:] == [*again, [1]]


@pytest.mark.parametrize(
    ("waiting", "changed", "wait_s"),
    [
        ({5: 120, 6: 120}, {}, 0.02),
        ({5: 120, 6: 120, 7: 0}, {}, 0.0),  # a step follows
        ({5: 120, 6: 900}, {}, 0.0),  # they fill a pass
        ({5: 120, 7: 0}, {}, 0.02),  # one is missing
        ({5: 120}, {"gathers": False}, 0.0),
        ({5: 120}, {"alone_to": 5}, 0.0),
        ({5: 120}, {"pass_s": 0.01}, 0.005),
        ({5: 120}, {"arrived": 107.0}, 1.0),  # for a burst that does not end
    ],
)
def test_passes_of_a_burst_wait_for_more(
    waiting: dict[int, int], changed: dict[str, Any], wait_s: float
) -> None:
    state = {"arrived": 100.0, "turn_at": 100.0, "pass_s": 1.0, "gathers": True, **changed}
    run = Run(5, False, waiting, **state)
    assert run.due_at(full_bytes=1000) == pytest.approx(100.0 + wait_s)


async def test_a_burst_is_computed_at_once_when_a_step_follows(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_models, "QUIET_S", 1e6)
    worker = Notes()
    scheduler = training_of(ledger, tmp_path, worker, join_requests=True)
    await add(ledger, scheduler, "m", requests.CREATE)
    task = asyncio.create_task(scheduler.run())
    await until_ended(ledger, "m")
    run = scheduler._runs["m"]
    run.gathers, run.pass_s = True, 1e6
    for seq in (1, 2, 3):
        await add(ledger, scheduler, "m", requests.FORWARD_BACKWARD, first=seq)
        for _ in range(5):
            await ledger.rows("SELECT 1")  # the scheduler asks it too, and has had its chance
    assert "forward_backward" not in worker.calls
    await add(ledger, scheduler, "m", requests.OPTIM_STEP, first=4)
    assert await until_ended(ledger, "m") == ["done"] * 5
    assert worker.calls.count("forward_backward") == 1 and run.gathers
    task.cancel()


async def test_a_pass_that_takes_long_gives_way_to_other_models(
    ledger: Ledger, tmp_path: Path
) -> None:
    worker = Sliced(5)
    scheduler = training_of(ledger, tmp_path, worker)
    await add(ledger, scheduler, "long", requests.CREATE, requests.FORWARD_BACKWARD)
    await add(ledger, scheduler, "short", requests.CREATE, *[requests.OPTIM_STEP] * 2)
    task = asyncio.create_task(scheduler.run())
    assert await until_ended(ledger, "long") == ["done", "done"]
    assert await until_ended(ledger, "short") == ["done"] * 3
    task.cancel()
    assert worker.turns[:6] == ["long", "short"] * 3
    assert worker.calls.count("forward_backward") == 1 and worker.calls.count("go_on") == 4


@pytest.mark.parametrize(("rank", "limits"), [(0, {}), (8, {"open_models": 1, "parked_bytes": 0})])
async def test_models_that_have_no_room_together_do_not_drop_what_the_other_has_half_computed(
    ledger: Ledger, tmp_path: Path, rank: int, limits: dict[str, int]
) -> None:
    worker = Sliced(3)
    scheduler = training_of(ledger, tmp_path, worker, **limits)
    for model in "ab":
        await add(ledger, scheduler, model, requests.CREATE, requests.FORWARD_BACKWARD, rank=rank)
    turns = []
    for _ in range(8):
        model, _ = scheduler._models.next_turn()
        assert model is not None
        turns.append(model)
        await scheduler._carry_out(model)
    assert turns == [*"ab", *"aaa", *"bbb"] and scheduler._models.next_turn()[0] is None


async def test_a_gap_is_given_up_while_another_model_is_busy(
    ledger: Ledger, tmp_path: Path
) -> None:
    scheduler = training_of(ledger, tmp_path, Notes(), gap_s=1.0)
    await add(ledger, scheduler, "gap", requests.CREATE)
    await add(ledger, scheduler, "gap", requests.OPTIM_STEP, first=2)
    await add(ledger, scheduler, "busy", requests.CREATE)
    task = asyncio.create_task(scheduler.run())

    async def keep_busy() -> None:
        for seq in range(1, 10_000):
            await add(ledger, scheduler, "busy", requests.OPTIM_STEP, first=seq)
            await asyncio.sleep(0.005)

    busy = asyncio.create_task(keep_busy())
    assert await until_ended(ledger, "gap") == ["done", "failed"]
    busy.cancel()
    task.cancel()
    [row] = await ledger.rows("SELECT result FROM requests WHERE owner = 'gap' AND seq = 2")
    assert b"request 1 of this model never came" in row[0]


@pytest.mark.parametrize("late", ["is there", "is refused"])
async def test_a_request_that_comes_as_its_gap_is_given_up_is_done_or_refused(
    ledger: Ledger, tmp_path: Path, late: str
) -> None:
    """It is on disk before the scheduler is told: one that was skipped then had no answer, ever."""
    worker = Notes()
    scheduler = training_of(ledger, tmp_path, worker, gap_s=0.0)
    await add(ledger, scheduler, "m", requests.CREATE)
    await scheduler._carry_out("m")
    await add(ledger, scheduler, "m", requests.OPTIM_STEP, first=2)
    done: list[int] = []

    def commit(connection: Any) -> None:
        done.append(records.model(connection, "m")["done_seq"])
        if done[0] < 1:  # as the API, which refuses it otherwise
            records.add_request(connection, "m", 1, requests.OPTIM_STEP, {"params": {}}, b"")

    order = [ledger.run(commit), scheduler._skip_gaps()]
    await asyncio.gather(*(order if late == "is there" else reversed(order)))
    if late == "is there":
        scheduler.accepted("m", 1)
    else:
        assert done == [2]
    task = asyncio.create_task(scheduler.run())
    states = ["done", "done", "done"] if late == "is there" else ["done", "failed"]
    assert await until_ended(ledger, "m") == states
    task.cancel()


async def test_a_step_after_a_gap_does_not_apply_what_is_left_of_its_gradient(
    ledger: Ledger, tmp_path: Path
) -> None:
    scheduler = training_of(ledger, tmp_path, Notes(), gap_s=0.0)
    await add(ledger, scheduler, "m", requests.CREATE)
    await scheduler._carry_out("m")
    await add(ledger, scheduler, "m", requests.FORWARD, first=2)
    await scheduler._skip_gaps()
    await add(ledger, scheduler, "m", requests.OPTIM_STEP, requests.OPTIM_STEP, first=3)
    await scheduler._carry_out("m")
    await scheduler._carry_out("m")
    assert await until_ended(ledger, "m") == ["done", "failed", "failed", "done"]

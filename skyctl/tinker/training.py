"""Carries out training requests: each model's in the order of its seq ids, models in turns.

    accepted ──► its turn ──► the worker does it ──► outcome, position and checkpoint: one commit
                    ▲                │ the worker dies
                    └── rebuilt: snapshot, then every request since ──┘

A model's state is its snapshot and the requests after it; the worker holds nothing that cannot be
recomputed. So whichever process is killed, a step is neither lost nor done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import sqlite3
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from skyctl.tinker import worker_messages
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.open_models import Limits, OpenModels, Run
from skyctl.tinker.records import request_id
from skyctl.tinker.requests import (
    CREATE,
    FORWARD,
    FORWARD_BACKWARD,
    LOAD,
    OPTIM_STEP,
    SAVE,
    Outcome,
    add_checkpoint,
    add_sampler,
    answered,
    failed_with,
    record_outcome,
    skip_gap,
)
from skyctl.tinker.training_process import Refused, Worker, WorkerDied

_LOG = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
"""A request under which the worker died this often has failed."""
MOST_TOGETHER, MOST_TOGETHER_BYTES = 256, 32 << 20
"""Requests, and bytes of their bodies, that the worker gets at once."""

BROKEN = (
    "a forward_backward of this step failed, so its gradient is incomplete: nothing was changed, "
    "and the gradients were dropped"
)


class Training:
    """All models of one API process. `run` works until it is cancelled."""

    def __init__(
        self, ledger: Ledger, worker: Worker, directory: Path, bell: Doorbell, limits: Limits
    ) -> None:
        self._ledger = ledger
        self._worker = worker
        self._snapshots = directory / "snapshots"
        self._checkpoints = directory / "checkpoints"
        self._bell = bell
        self._limits = limits
        self._models = OpenModels(ledger, worker, limits)
        self._runs, self._turns = self._models.runs, self._models.turns
        self._woken = asyncio.Event()

    @property
    def open_models(self) -> int:
        """How many models the worker holds."""
        life = self._worker.life if self._worker.alive else 0
        return sum(0 < life == run.copy.tried for run in self._runs.values())

    async def load(self) -> None:
        """Load what an earlier process left to do; remove what it wrote and did not record."""
        for row in await self._ledger.rows(
            "SELECT id, done_seq, broken FROM models WHERE ended IS NULL"
        ):
            self._runs[row["id"]] = Run(row["done_seq"] + 1, bool(row["broken"]))
        for row in await self._ledger.rows(
            "SELECT owner, seq FROM requests WHERE state = 'accepted' AND owner IN "
            "(SELECT id FROM models)"
        ):
            self.accepted(row["owner"], row["seq"])
        kept = await self._ledger.run(self._follow_move)
        for parent in (self._snapshots, self._checkpoints):
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for directory in parent.iterdir():
                if directory.name not in kept:
                    shutil.rmtree(directory, ignore_errors=True)

    def _follow_move(self, connection: sqlite3.Connection) -> set[str]:
        """Names of the recorded directories, which are unique. Paths are corrected: storage may
        have moved, or its path may be spelled differently.
        """
        kept = set()
        for table, column, parent in (
            ("checkpoints", "directory", self._checkpoints),
            ("models", "snapshot", self._snapshots),
        ):
            sql = f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL"
            for (before,) in connection.execute(sql).fetchall():
                name = Path(before).name
                kept.add(name)
                now = str(parent / name)
                if now != before and Path(now).is_dir():
                    sql = f"UPDATE {table} SET {column} = ? WHERE {column} = ?"
                    connection.execute(sql, (now, before))
        return kept

    def accepted(self, model: str, seq: int, pass_bytes: int = 0) -> None:
        """A request is on disk; its turn comes once those before it are done. `pass_bytes` is the
        size of a pass, which others may join.
        """
        run = self._runs.setdefault(model, Run(0, False))
        if seq >= run.next_seq:
            run.waiting[seq] = pass_bytes
            run.arrived = time.monotonic()
            if seq == run.next_seq:
                run.turn_at = run.arrived
            self._bell.expect(request_id(model, seq))
            if seq == run.next_seq or not (run.gathers and pass_bytes):  # else a burst goes on
                self._woken.set()

    async def forget(self, models: list[str], session: str) -> bool:
        """End a session and its models for good; False if requests of them wait."""

        def commit(connection: sqlite3.Connection) -> bool:
            for model in models:
                sql = "SELECT 1 FROM requests WHERE owner = ? AND state = 'accepted'"
                if connection.execute(sql, (model,)).fetchone():
                    return False
            for model in models:
                connection.execute("DELETE FROM requests WHERE owner = ?", (model,))
                sql = "UPDATE models SET ended = ?, snapshot = NULL WHERE id = ?"
                connection.execute(sql, (time.time(), model))
            connection.execute("DELETE FROM sessions WHERE id = ?", (session,))
            return True

        if not await self._ledger.run(commit):
            return False
        for model in models:
            await self._models.forget(model)
        return True

    async def run(self) -> None:
        """Process accepted requests forever."""
        checked_at = time.monotonic()
        while True:
            self._woken.clear()
            if time.monotonic() - checked_at >= self._limits.gap_s / 10:
                await self._skip_gaps()  # also while other models keep it busy
                checked_at = time.monotonic()
            model, wait_s = self._models.next_turn()
            if model is not None:
                await self._carry_out(model)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, self._limits.gap_s / 10)):
                    await self._woken.wait()

    async def _carry_out(self, model: str) -> None:
        run = self._runs[model]
        if model in self._turns:
            self._turns.remove(model)
        self._turns.append(model)
        if run.copy.life != self._worker.life:
            run.computing = []
        rows = run.computing or await self._due(model, run)
        try:
            outcomes = await self._do(model, run, rows)
        except WorkerDied as error:
            _LOG.warning("%s %s: %s", rows[0]["kind"], rows[0]["id"], error)
            run.copy.life = 0
            names = [(row["id"],) for row in rows]
            sql = "UPDATE requests SET attempts = attempts + 1 WHERE id = ?"
            await self._ledger.insist(lambda c: c.executemany(sql, names))
            if rows[0]["attempts"] + 1 < MOST_ATTEMPTS:
                return
            outcomes = [failed_with(f"{error}, {MOST_ATTEMPTS} times in a row", "server")]
        except Refused as error:
            if error.category != "user":
                run.copy.life = 0  # what it did is unknown: rebuild
            if len(rows) > 1:
                run.alone_to = rows[-1]["seq"]
                return
            outcomes = [failed_with(str(error), error.category)]
        if outcomes:
            await self._record(model, run, rows[: len(outcomes)], outcomes)

    async def _due(self, model: str, run: Run) -> list[sqlite3.Row]:
        """The request whose turn it is, and those of passes that follow it up to the next barrier.
        One that may have killed the worker twice comes alone.
        """
        first = run.next_seq
        last = next(seq for seq in itertools.count(first) if seq + 1 not in run.waiting)
        rows = await self._ledger.rows(
            "SELECT * FROM requests WHERE owner = ? AND seq BETWEEN ? AND ? ORDER BY seq",
            model,
            first,
            first if first <= run.alone_to else min(last, first + MOST_TOGETHER - 1),
        )
        due, size = rows[:1], 0
        for row in rows[1:] if rows[0]["kind"] in (FORWARD, FORWARD_BACKWARD) else ():
            size += len(row["body"] or b"")
            suspect = max(due[0]["attempts"], row["attempts"]) + 1 >= MOST_ATTEMPTS
            if row["kind"] != due[0]["kind"] or suspect or size > MOST_TOGETHER_BYTES:
                break
            due.append(row)
        return due

    async def _do(self, model: str, run: Run, rows: list[sqlite3.Row]) -> list[Outcome]:
        """The outcomes of the first of these requests, perhaps of none."""
        row = rows[0]
        kind, extra = row["kind"], json.loads(row["extra"] or "{}")
        if "refused" in extra and kind != OPTIM_STEP:
            return [failed_with(extra["refused"], "user")]
        if kind == LOAD:
            return [await self._load(model, run, extra)]
        await self._models.ready(model, run)
        if kind == CREATE:
            return [answered({"model_id": model, "type": "create_model"})]
        if kind in (FORWARD, FORWARD_BACKWARD):
            return await self._pass(model, run, rows)
        if kind == OPTIM_STEP:
            return [await self._step(model, run, extra)]
        return [await self._save(model, run, row, extra)]

    async def _pass(self, model: str, run: Run, rows: list[sqlite3.Row]) -> list[Outcome]:
        """Compute the passes of these requests for a while."""
        slice_s, began = self._limits.slice_s, time.monotonic()
        if run.computing:
            answer, content = await self._models.ask(run, "go_on", model, slice_s=slice_s)
        else:
            bodies = [row["body"] for row in rows]
            lengths = [len(body) for body in bodies]
            units = [lengths] if self._limits.join_requests else [[size] for size in lengths]
            answer, content = await self._models.ask(
                run, "forward_backward", model, b"".join(bodies), units=units, slice_s=slice_s
            )
        outcomes: list[Outcome] = []
        for answers, errors in zip(
            worker_messages.cut(content, answer["units"]), answer["errors"], strict=True
        ):
            unit = rows[len(outcomes)]["seq"] if len(answers) > 1 else None
            for body, error in zip(answers, errors, strict=True):
                outcome = Outcome(body, "application/x-protobuf", unit=unit)
                outcomes.append(failed_with(error, "user") if error else outcome)
        run.computing = rows[len(outcomes) :] if answer["more"] else []
        run.pass_s = max(time.monotonic() - began, run.pass_s / 2)
        return outcomes

    async def _step(self, model: str, run: Run, extra: dict[str, Any]) -> Outcome:
        if run.broken or "refused" in extra:
            await self._models.ask(run, "zero_gradients", model)
            return failed_with(extra.get("refused", BROKEN), "user")
        answer, _ = await self._models.ask(run, "optim_step", model, params=extra["params"])
        outcome = answered({"metrics": answer["metrics"], "type": "optim_step"})
        run.snapshot.steps += 1
        if run.snapshot.next_is_due(self._limits):
            try:
                outcome.snapshot = await self._snapshot(model, run)
            except Refused as error:  # such as a full disk: the step is done all the same
                _LOG.warning("%s is not saved: %s", model, error)
                run.snapshot.restart()  # the next one is due later
        return outcome

    async def _load(self, model: str, run: Run, extra: dict[str, Any]) -> Outcome:
        checkpoint = await self._ledger.row(
            "SELECT directory, config FROM checkpoints WHERE path = ?", extra["path"]
        )
        if checkpoint is None:
            return failed_with(f"there is no checkpoint {extra['path']} (any more)", "user")
        await self._models.load(model, checkpoint, optimizer=extra["optimizer"])
        outcome = answered({"path": extra["path"], "model_id": model, "type": "load_weights"})
        # its own copies: the checkpoint may be deleted, even meanwhile
        outcome.rows = [
            ("UPDATE models SET config = ? WHERE id = ?", (checkpoint["config"], model))
        ]
        outcome.snapshot = await self._snapshot(model, run)
        return outcome

    async def _save(self, model: str, run: Run, row: sqlite3.Row, extra: dict[str, Any]) -> Outcome:
        path, training = extra["path"], row["kind"] == SAVE
        before = await self._ledger.row("SELECT directory FROM checkpoints WHERE path = ?", path)
        if before is not None and not extra.get("overwrite"):
            return failed_with(
                f"{path} is there already; give overwrite=True or another name", "user"
            )
        directory, size = await self._write(model, run, self._checkpoints, optimizer=training)
        config = (await self._models.row(model))["config"]
        outcome = answered({"path": path, "size_bytes": size, "type": row["kind"]})
        outcome.rows = [*add_checkpoint(model, row["kind"], directory, config, size, extra)]
        if "sampler" in extra:
            outcome.result = json.dumps({"sampling_session_id": extra["sampler"]}).encode()
            outcome.rows += add_sampler(model, extra)
        return outcome

    async def _snapshot(self, model: str, run: Run) -> str:
        began = time.monotonic()
        directory, _ = await self._write(model, run, self._snapshots, optimizer=True)
        run.snapshot.took_s = time.monotonic() - began
        return directory

    async def _write(
        self, model: str, run: Run, parent: Path, *, optimizer: bool
    ) -> tuple[str, int]:
        """Have the worker save a model in a new directory of `parent`; returns it and its size."""
        directory = parent / uuid.uuid4().hex
        try:
            answer, _ = await self._models.ask(
                run, "save", model, directory=str(directory), optimizer=optimizer
            )
        except WorkerDied:  # all its ranks have ended, and none has removed what it wrote
            await asyncio.to_thread(_remove_saved, directory)
            raise
        return str(directory), answer["size"]

    async def _record(
        self, model: str, run: Run, rows: list[sqlite3.Row], outcomes: list[Outcome]
    ) -> None:
        """Record outcomes, the model's position and all that follows from them: one commit."""
        last, outcome, broken = rows[-1], outcomes[-1], run.broken
        seq, kind, failed = last["seq"], last["kind"], bool(outcome.category)
        if kind == FORWARD_BACKWARD:
            broken = broken or any(outcome.category for outcome in outcomes)
        elif kind == OPTIM_STEP or (kind == LOAD and not failed):
            broken = False
        old = await self._models.row(model)

        def commit(connection: sqlite3.Connection) -> None:
            for row, each in zip(rows, outcomes, strict=True):
                for sql, parameters in each.rows:
                    connection.execute(sql, parameters)
                record_outcome(connection, row, each)
            connection.execute(
                "UPDATE models SET done_seq = ?, broken = ?, used = ? WHERE id = ?",
                (seq, broken, time.time(), model),
            )
            if outcome.snapshot is not None:
                connection.execute(
                    "UPDATE models SET snapshot = ?, snapshot_seq = ? WHERE id = ?",
                    (outcome.snapshot, seq, model),
                )
                connection.execute(
                    "UPDATE requests SET body = NULL WHERE owner = ? AND seq <= ?", (model, seq)
                )

        await self._ledger.insist(commit)  # the worker has done it, and must not do it again
        for row in rows:
            run.waiting.pop(row["seq"], None)
        run.next_seq, run.broken, run.arrived = seq + 1, broken, time.monotonic()
        run.turn_at = run.arrived
        if kind in (FORWARD, FORWARD_BACKWARD):
            more = bool(run.waiting.get(run.next_seq))
            run.gathers = self._limits.join_requests and (more or len(rows) > 1)
        if outcome.snapshot is not None:
            run.snapshot.restart()
            if old["snapshot"] is not None:
                shutil.rmtree(old["snapshot"], ignore_errors=True)
        for row, each in zip(rows, outcomes, strict=True):
            self._bell.ring(row["id"], outcome=each)

    async def _skip_gaps(self) -> None:
        """Fail requests that have waited too long for one that never came, and skip the gap."""
        late = time.monotonic() - self._limits.gap_s
        for model, run in list(self._runs.items()):  # a model may be created during the loop
            if not run.waiting or run.next_seq in run.waiting or run.arrived > late:
                continue
            skipped, broken = await self._ledger.insist(partial(skip_gap, model, run.next_seq))
            if skipped:
                run.next_seq, run.broken = skipped[-1]["seq"] + 1, broken
                run.waiting = {s: size for s, size in run.waiting.items() if s >= run.next_seq}
                run.copy.life = 0  # a failed step drops the gradients: so does rebuilding
                self._bell.ring(*(row["id"] for row in skipped))


def _remove_saved(directory: Path) -> None:
    """Remove what a save into this directory has written, and what each rank has beside it."""
    with contextlib.suppress(OSError):  # the next process that loads the ledger tries again
        for path in [directory, *directory.parent.glob(f".{directory.name}.*partial")]:
            shutil.rmtree(path, ignore_errors=True)

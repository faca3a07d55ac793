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
import json
import logging
import shutil
import sqlite3
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
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

BROKEN = (
    "a forward_backward of this step failed, so its gradient is incomplete: nothing was changed, "
    "and the gradients were dropped"
)


@dataclass(frozen=True)
class Limits:
    """When requests are given up, snapshots taken and models dropped from the worker."""

    gap_s: float = 600.0
    """Seconds that a request waits for a preceding one that never came."""
    snapshot_steps: int = 20
    """A snapshot is due after this many steps."""
    snapshot_s: float = 60.0
    """A snapshot is due after this many seconds."""
    snapshot_share: float = 0.1
    """The share of the time that snapshots may take."""
    open_models: int = 16
    """The most models in the worker; at most one of them is trained as a whole."""


@dataclass
class Run:
    """One model as the scheduler sees it, with the seq ids of accepted requests."""

    next_seq: int
    """The request whose turn is next."""
    broken: bool
    """Whether a forward_backward of the current step has failed."""
    waiting: set[int] = field(default_factory=set)
    """Accepted requests that are not done."""
    arrived: float = 0.0
    """When the last one came, or was done."""
    steps: int = 0
    """Optimizer steps since the snapshot."""
    snapshot_at: float = field(default_factory=time.monotonic)
    """When the last snapshot was taken."""
    snapshot_took_s: float = 0.0
    """Seconds that it took."""
    life: int = 0
    """The worker's life in which the model is open."""
    tried: int = 0
    """The worker's life in which it may use memory: opening it was begun."""


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
        self._runs: dict[str, Run] = {}
        self._woken = asyncio.Event()
        self._turns: list[str] = []

    async def load(self) -> None:
        """Load what an earlier process left to do; remove what it wrote and did not record."""
        for row in await self._ledger.rows("SELECT id, done_seq, broken FROM models"):
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

    def accepted(self, model: str, seq: int) -> None:
        """A request is on disk; its turn comes once those before it are done."""
        run = self._runs.setdefault(model, Run(0, False))
        if seq >= run.next_seq:
            run.waiting.add(seq)
            run.arrived = time.monotonic()
            self._woken.set()

    async def run(self) -> None:
        """Process accepted requests forever."""
        checked_at = time.monotonic()
        while True:
            self._woken.clear()
            if time.monotonic() - checked_at >= self._limits.gap_s / 10:
                await self._skip_gaps()  # also while other models keep it busy
                checked_at = time.monotonic()
            if (model := self._next()) is not None:
                await self._carry_out(model)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.gap_s / 10):
                    await self._woken.wait()

    def _next(self) -> str | None:
        """The model whose turn it is: the one that has waited longest since its last turn."""
        ready = [name for name, run in self._runs.items() if run.next_seq in run.waiting]
        if not ready:
            return None
        order = {name: place for place, name in enumerate(self._turns)}
        return min(ready, key=lambda name: order.get(name, -1))

    async def _carry_out(self, model: str) -> None:
        run = self._runs[model]
        request = request_id(model, run.next_seq)
        if model in self._turns:
            self._turns.remove(model)
        self._turns.append(model)
        row = await self._ledger.row("SELECT * FROM requests WHERE id = ?", request)
        assert row is not None  # it was accepted
        try:
            outcome = await self._do(model, run, row)
        except WorkerDied as error:
            _LOG.warning("%s %s: %s", row["kind"], request, error)
            run.life = 0
            sql = "UPDATE requests SET attempts = attempts + 1 WHERE id = ?"
            await self._ledger.insist(lambda c: c.execute(sql, (request,)))
            if row["attempts"] + 1 < MOST_ATTEMPTS:
                return
            outcome = failed_with(f"{error}, {MOST_ATTEMPTS} times in a row", "server")
        except Refused as error:
            outcome = failed_with(str(error), error.category)
            if error.category != "user":
                run.life = 0  # what it did is unknown: rebuild
        await self._record(model, run, row, outcome)

    async def _do(self, model: str, run: Run, row: sqlite3.Row) -> Outcome:
        kind, extra = row["kind"], json.loads(row["extra"] or "{}")
        if "refused" in extra and kind != OPTIM_STEP:
            return failed_with(extra["refused"], "user")
        if kind == LOAD:
            return await self._load(model, run, extra)
        await self._open(model, run)
        if kind == CREATE:
            return answered({"model_id": model, "type": "create_model"})
        if kind in (FORWARD, FORWARD_BACKWARD):
            _, body = await self._ask(run.life, "forward_backward", model, row["body"])
            return Outcome(body, "application/x-protobuf")
        if kind == OPTIM_STEP:
            return await self._step(model, run, extra)
        return await self._save(model, run, row, extra)

    async def _step(self, model: str, run: Run, extra: dict[str, Any]) -> Outcome:
        if run.broken or "refused" in extra:
            await self._ask(run.life, "zero_gradients", model)
            return failed_with(extra.get("refused", BROKEN), "user")
        answer, _ = await self._ask(run.life, "optim_step", model, params=extra["params"])
        outcome = answered({"metrics": answer["metrics"], "type": "optim_step"})
        run.steps += 1
        since_s = time.monotonic() - run.snapshot_at
        due = since_s > self._limits.snapshot_s or run.steps >= self._limits.snapshot_steps
        if due and run.snapshot_took_s <= since_s * self._limits.snapshot_share:
            try:
                outcome.snapshot = await self._snapshot(model, run)
            except Refused as error:  # such as a full disk: the step is done all the same
                _LOG.warning("%s is not saved: %s", model, error)
                run.steps, run.snapshot_at = 0, time.monotonic()  # the next one is due later
        return outcome

    async def _load(self, model: str, run: Run, extra: dict[str, Any]) -> Outcome:
        checkpoint = await self._ledger.row(
            "SELECT directory, config FROM checkpoints WHERE path = ?", extra["path"]
        )
        if checkpoint is None:
            return failed_with(f"there is no checkpoint {extra['path']} (any more)", "user")
        life = await self._worker.ensure()
        await self._make_room(model, checkpoint)
        directory, optimizer = checkpoint["directory"], extra["optimizer"]
        await self._ask(life, "open", model, directory=directory, optimizer=optimizer)
        run.life = life
        outcome = answered({"path": extra["path"], "model_id": model, "type": "load_weights"})
        # its own copy: the checkpoint may be deleted
        outcome.snapshot = await self._snapshot(model, run)
        return outcome

    async def _save(self, model: str, run: Run, row: sqlite3.Row, extra: dict[str, Any]) -> Outcome:
        path, training = extra["path"], row["kind"] == SAVE
        before = await self._ledger.row("SELECT directory FROM checkpoints WHERE path = ?", path)
        if before is not None and not extra.get("overwrite"):
            return failed_with(
                f"{path} is there already; give overwrite=True or another name", "user"
            )
        directory = str(self._checkpoints / uuid.uuid4().hex)
        answer, _ = await self._ask(
            run.life, "save", model, directory=directory, optimizer=training
        )
        config = (await self._model(model))["config"]
        outcome = answered({"path": path, "type": row["kind"]})
        outcome.rows = [
            *add_checkpoint(model, row["kind"], directory, config, answer["size"], extra)
        ]
        if "sampler" in extra:
            outcome.result = json.dumps({"sampling_session_id": extra["sampler"]}).encode()
            outcome.rows += add_sampler(model, extra)
        return outcome

    async def _snapshot(self, model: str, run: Run) -> str:
        directory = str(self._snapshots / uuid.uuid4().hex)
        began = time.monotonic()
        await self._ask(run.life, "save", model, directory=directory, optimizer=True)
        run.snapshot_took_s = time.monotonic() - began
        return directory

    async def _open(self, model: str, run: Run) -> None:
        """Bring the worker to the model's state after the last recorded request."""
        life = await self._worker.ensure()
        if run.life == life:
            return
        row = await self._model(model)
        first = await self._ledger.row(
            "SELECT state, result FROM requests WHERE owner = ? AND seq = 0", model
        )
        if first is not None and first["state"] == "failed":
            raise Refused(f"this model was not created: {first['result'].decode()}", "user")
        await self._make_room(model, row)
        if row["snapshot"] is None:
            await self._ask(life, "create", model, config=json.loads(row["config"])["lora"])
        else:
            await self._ask(life, "open", model, directory=row["snapshot"], optimizer=True)
        since = await self._ledger.rows(
            "SELECT * FROM requests WHERE owner = ? AND seq > ? AND seq <= ? AND kind IN (?, ?) "
            "ORDER BY seq",
            model,
            row["snapshot_seq"],
            row["done_seq"],
            FORWARD_BACKWARD,
            OPTIM_STEP,
        )
        for request in since:
            done, kind = request["state"] != "failed", request["kind"]
            if done and kind == FORWARD_BACKWARD:
                await self._ask(life, "forward_backward", model, request["body"])
            elif done:
                params = json.loads(request["extra"])["params"]
                await self._ask(life, "optim_step", model, params=params)
            elif kind == OPTIM_STEP:
                await self._ask(life, "zero_gradients", model)
        run.life = life
        run.steps = sum(request["kind"] == OPTIM_STEP for request in since)

    async def _make_room(self, model: str, row: sqlite3.Row) -> None:
        """Before a model is opened, drop from the worker the models with the oldest turns, and
        every other whole model if it is one (`row` has its `config`); they are rebuilt when needed.
        """
        life = self._worker.life
        opened = [name for name in self._turns if self._runs[name].tried == life and name != model]
        closing = opened[: max(0, len(opened) + 1 - self._limits.open_models)]
        if json.loads(row["config"])["lora"].get("rank") == 0:
            rows = await self._ledger.rows(
                "SELECT id FROM models WHERE json_extract(config, '$.lora.rank') = 0"
            )
            whole = {entry["id"] for entry in rows}
            closing += [name for name in opened if name in whole and name not in closing]
        for name in closing:
            self._runs[name].life = self._runs[name].tried = 0
            await self._ask(None, "close", name)
        self._runs[model].tried = life

    async def _record(self, model: str, run: Run, row: sqlite3.Row, outcome: Outcome) -> None:
        """Record the outcome, the model's position and all that follows from it: one commit."""
        seq, kind = row["seq"], row["kind"]
        failed = bool(outcome.category)
        broken = run.broken
        if kind == FORWARD_BACKWARD:
            broken = broken or failed
        elif kind == OPTIM_STEP or (kind == LOAD and not failed):
            broken = False
        old = await self._model(model)

        def commit(connection: sqlite3.Connection) -> None:
            for sql, parameters in outcome.rows:
                connection.execute(sql, parameters)
            record_outcome(connection, row, outcome)
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
            if kind == LOAD and not failed:
                connection.execute(
                    "UPDATE models SET config = (SELECT config FROM checkpoints WHERE path = ?) "
                    "WHERE id = ?",
                    (json.loads(row["extra"])["path"], model),
                )

        await self._ledger.insist(commit)  # the worker has done it, and must not do it again
        run.waiting.remove(seq)
        run.next_seq, run.broken, run.arrived = seq + 1, broken, time.monotonic()
        if outcome.snapshot is not None:
            run.steps, run.snapshot_at = 0, time.monotonic()
            if old["snapshot"] is not None:
                shutil.rmtree(old["snapshot"], ignore_errors=True)
        self._bell.ring(row["id"])

    async def _skip_gaps(self) -> None:
        """Fail requests that have waited too long for one that never came, and skip the gap."""
        late = time.monotonic() - self._limits.gap_s
        for model, run in list(self._runs.items()):  # a model may be created during the loop
            if not run.waiting or run.next_seq in run.waiting or run.arrived > late:
                continue
            skipped, broken = await self._ledger.insist(partial(skip_gap, model, run.next_seq))
            if skipped:
                run.next_seq, run.broken = skipped[-1]["seq"] + 1, broken
                run.waiting = {seq for seq in run.waiting if seq >= run.next_seq}
                run.life = 0  # a failed step drops the gradients: so does rebuilding
                self._bell.ring(*(row["id"] for row in skipped))

    async def _ask(
        self, life: int | None, do: str, model: str, body: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """The worker's answer, in this life of it. Raises WorkerDied, Refused."""
        return await self._worker.call({"do": do, "model": model, **fields}, body, life=life)

    async def _model(self, model: str) -> sqlite3.Row:
        row = await self._ledger.row("SELECT * FROM models WHERE id = ?", model)
        assert row is not None  # its requests are in the ledger, so it is too
        return row

"""The models of the training worker: opened, parked in host memory, dropped, and rebuilt from the
ledger.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from skyctl.tinker.ledger import Ledger
from skyctl.tinker.requests import FORWARD_BACKWARD, OPTIM_STEP
from skyctl.tinker.training_process import Refused, Worker, WorkerDied

WITHOUT_END_S = 1e9
QUIET_S = 0.02
"""A burst of passes is over when none has come for this long."""
LEAST_TOKEN_BYTES = 12
"""Of a token and its target in a request."""


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
    """The most models on the trainer's device; at most one of them is trained as a whole."""
    parked_bytes: int = 16 << 30
    """Host memory for further adapters in the worker; others are rebuilt at their next turn."""
    slice_s: float = 0.5
    """Seconds of a model's passes after which others have a turn."""
    join_requests: bool = False
    """Compute requests that come together at once: faster, and rounded differently."""
    join_tokens: int = 4096
    """Requests with so many tokens do not wait for others."""


@dataclass
class LastSnapshot:
    """A model's latest snapshot, or its beginning."""

    steps: int = 0
    """Optimizer steps since."""
    at: float = field(default_factory=time.monotonic)
    """When it was taken."""
    took_s: float = 0.0
    """Seconds that it took."""

    def next_is_due(self, limits: Limits) -> bool:
        """Whether it is time for another."""
        since_s = time.monotonic() - self.at
        due = since_s > limits.snapshot_s or self.steps >= limits.snapshot_steps
        return due and self.took_s <= since_s * limits.snapshot_share

    def restart(self) -> None:
        """Count steps and time from now."""
        self.steps, self.at = 0, time.monotonic()


@dataclass
class WorkerCopy:
    """What the worker has of a model."""

    life: int = 0
    """The worker's life in which the model is open."""
    tried: int = 0
    """The worker's life in which it may use memory: opening it was begun."""
    whole: bool = False
    """Whether all parameters are trained."""
    bytes: int = 0
    """Memory that it needs there."""
    parked: bool = False
    """Whether it is in host memory, and not on the device."""


@dataclass
class Run:
    """One model as the scheduler sees it, with the seq ids of accepted requests."""

    next_seq: int
    """The request whose turn is next."""
    broken: bool
    """Whether a forward_backward of the current step has failed."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Accepted requests that are not done, with the bytes of those that are passes."""
    arrived: float = 0.0
    """When the last one came, or was done."""
    turn_at: float = 0.0
    """When the turn of its next request came."""
    pass_s: float = 0.0
    """Seconds that the last passes took; half of those before, if that is more."""
    gathers: bool = False
    """Whether passes come in bursts, and so wait for others to be computed with."""
    computing: list[sqlite3.Row] = field(default_factory=list)
    """The requests whose passes the worker has begun in this life."""
    alone_to: int = -1
    """Up to this request each is computed by itself: one of them has failed."""
    snapshot: LastSnapshot = field(default_factory=LastSnapshot)
    """From when its requests would be repeated."""
    copy: WorkerCopy = field(default_factory=WorkerCopy)
    """The model in the worker."""

    def due_at(self, full_bytes: int) -> float:
        """When to compute what waits. While a burst of passes lasts, that is later than its turn,
        by at most `pass_s`, unless they have that many bytes or another request follows them.
        """
        if not self.gathers or self.computing or self.next_seq <= self.alone_to:
            return self.turn_at
        size = 0
        for seq in count(self.next_seq):
            if (more := self.waiting.get(seq)) is None:
                quiet_s = min(QUIET_S, self.pass_s / 2)
                return min(self.arrived + quiet_s, self.turn_at + self.pass_s)
            size += more
            if not more or size >= full_bytes:
                break
        return self.turn_at


class OpenModels:
    """The runs of one API process, and what the worker has of them. `turns` has the names of models
    in the order of their last turn.
    """

    def __init__(self, ledger: Ledger, worker: Worker, limits: Limits) -> None:
        self._ledger = ledger
        self._worker = worker
        self._limits = limits
        self.runs: dict[str, Run] = {}
        self.turns: list[str] = []

    def next_turn(self) -> tuple[str | None, float]:
        """The model whose turn it is: the one that has waited longest since its last turn, and
        whose place costs no other its passes. If there is none, the seconds until one may be.
        """
        now, full_bytes = time.monotonic(), self._limits.join_tokens * LEAST_TOKEN_BYTES
        due = {
            name: run.due_at(full_bytes)
            for name, run in self.runs.items()
            if run.next_seq in run.waiting
        }
        ready = [name for name, at in due.items() if at <= now]
        if not ready:
            return None, min(due.values(), default=math.inf) - now
        order = {name: place for place, name in enumerate(self.turns)}
        life = self._worker.life
        begun = {name for name, run in self.runs.items() if run.computing and run.copy.life == life}

        def precedence(model: str) -> tuple[bool, int]:
            # two that dropped each other's passes at each turn would never end theirs
            drops = bool(begun) and not begun.isdisjoint(self._displaced_by(model)[0])
            return drops, order.get(model, -1)

        return min(ready, key=precedence), 0.0

    async def ready(self, model: str, run: Run) -> None:
        """Bring the worker to the model's state after the last recorded request.

        Raises:
            WorkerDied: it ended meanwhile. Refused: the model cannot be opened.
        """
        life = await self._worker.ensure()
        if run.copy.life == life:
            if run.copy.parked:
                await self._make_room(model)
                run.copy.parked = False  # its next operation brings it back
            return
        row = await self.row(model)
        first = await self._ledger.row(
            "SELECT state, result FROM requests WHERE owner = ? AND seq = 0", model
        )
        if first is not None and first["state"] == "failed":
            raise Refused(f"this model was not created: {first['result'].decode()}", "user")
        if row["snapshot"] is None:
            await self._new(model, row, "create", config=json.loads(row["config"])["lora"])
        else:
            await self._new(model, row, "open", directory=row["snapshot"], optimizer=True)
        run.snapshot.steps = await self._repeat(model, row, life)
        run.copy.life = life

    async def load(self, model: str, checkpoint: sqlite3.Row, *, optimizer: bool) -> None:
        """Replace a model by a checkpoint. Raises WorkerDied, Refused."""
        life = await self._worker.ensure()
        directory = checkpoint["directory"]
        await self._new(model, checkpoint, "open", directory=directory, optimizer=optimizer)
        self.runs[model].copy.life = life

    async def ask(
        self, run: Run, do: str, model: str, body: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """The answer of the worker in whose life the model is open. Raises WorkerDied, Refused."""
        return await self._ask(run.copy.life, do, model, body, **fields)

    async def forget(self, model: str) -> None:
        """Drop a model that has ended."""
        run = self.runs.pop(model, None)
        if model in self.turns:
            self.turns.remove(model)
        if run is not None and run.copy.tried == self._worker.life and run.copy.tried:
            with contextlib.suppress(WorkerDied):
                await self._ask(run.copy.tried, "close", model)

    async def row(self, model: str) -> sqlite3.Row:
        """The model's row."""
        row = await self._ledger.row("SELECT * FROM models WHERE id = ?", model)
        assert row is not None  # its requests are in the ledger, so it is too
        return row

    async def _new(self, model: str, row: sqlite3.Row, do: str, **fields: Any) -> None:
        """Create or open a model; `row` has its `config`."""
        run = self.runs[model]
        run.copy.whole = json.loads(row["config"])["lora"].get("rank") == 0
        run.computing, run.copy.parked = [], False
        await self._make_room(model)
        answer, _ = await self._ask(run.copy.tried, do, model, **fields)
        run.copy.bytes = answer["bytes"]

    async def _repeat(self, model: str, row: sqlite3.Row, life: int) -> int:
        """Repeat the recorded requests since the snapshot, in the units in which they were
        computed; returns the number of steps.
        """
        since = await self._ledger.rows(
            "SELECT * FROM requests WHERE owner = ? AND seq > ? AND seq <= ? AND kind IN (?, ?) "
            "ORDER BY seq",
            model,
            row["snapshot_seq"],
            row["done_seq"],
            FORWARD_BACKWARD,
            OPTIM_STEP,
        )
        steps = 0
        for _, unit in groupby(since, key=_unit_of):
            rows = list(unit)
            # whose result is gone has no other sign of a failure than its category
            done, kind = not rows[0]["category"], rows[0]["kind"]
            if kind == OPTIM_STEP:
                steps += 1
            if done and kind == FORWARD_BACKWARD:
                await self._compute_again(model, rows, life)
            elif done:
                params = json.loads(rows[0]["extra"])["params"]
                await self._ask(life, "optim_step", model, params=params)
            elif kind == OPTIM_STEP:
                await self._ask(life, "zero_gradients", model)
        return steps

    async def _compute_again(self, model: str, rows: list[sqlite3.Row], life: int) -> None:
        bodies = [row["body"] for row in rows]
        units, slice_s = [[len(body) for body in bodies]], WITHOUT_END_S
        answer, _ = await self._ask(
            life, "forward_backward", model, b"".join(bodies), units=units, slice_s=slice_s
        )
        if answer["errors"] != [[""] * len(bodies)]:
            raise Refused(f"a step cannot be repeated: {answer['errors']}", "server")

    async def _make_room(self, model: str) -> None:
        """Before a model comes to the device, park or drop others."""
        copies = {name: run.copy for name, run in self.runs.items()}
        life, (dropped, parked) = self._worker.life, self._displaced_by(model)
        for name in dropped:
            copies[name].life = copies[name].tried = 0
            await self._ask(life, "close", name)
        for name in parked:
            await self._ask(life, "park", name)
            copies[name].parked = True
        copies[model].tried = life

    def _displaced_by(self, model: str) -> tuple[list[str], list[str]]:
        """Whom a model's coming to the device costs their place: those to drop, which are whole
        models and what is over the memory's limit, and the adapters with the oldest turns, to park
        in host memory.
        """
        life, copies = self._worker.life, {name: run.copy for name, run in self.runs.items()}
        names = [name for name in self.turns if copies[name].tried == life and name != model]
        on_device = [name for name in names if not copies[name].parked]
        parking = set(on_device[: max(0, len(on_device) + 1 - self._limits.open_models)])
        dropped, parked, host_bytes = [], [], 0
        for name in reversed(names):  # those with the latest turns stay
            other = copies[name]
            if other.parked or name in parking:
                host_bytes += other.bytes
            if (other.whole and (copies[model].whole or name in parking)) or (
                host_bytes > self._limits.parked_bytes and (other.parked or name in parking)
            ):
                dropped.append(name)
            elif name in parking:
                parked.append(name)
        return dropped, parked

    async def _ask(
        self, life: int, do: str, model: str, body: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """The worker's answer, in this life of it. Raises WorkerDied, Refused."""
        return await self._worker.call({"do": do, "model": model, **fields}, body, life=life)


def _unit_of(row: sqlite3.Row) -> int:
    """The seq id of the first request with which this one was computed."""
    extra = json.loads(row["extra"] or "{}")
    return int(extra.get("unit", row["seq"]))

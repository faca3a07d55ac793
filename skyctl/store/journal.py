"""The journal of jobs (weight pushes): what was asked, how far it got, how it ended."""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from skyctl.errors import NotFoundError
from skyctl.store.database import Database, understood
from skyctl.store.identity import ProcessIdentity, own_identity
from skyctl.store.locks import News

_QUEUED = "queued"
"""The stage of a job that has not entered one."""
_PRUNE_EVERY_JOBS = 20
PUSH = "push"
DRY_RUN = "dry-run"
"""Kind of a push that only checks and plans."""

LATEST = 50
"""How many jobs are listed."""
RECENT = 50
"""Jobs and pushes that are kept at any age: what commands list, and what recovery reads."""
_OF_A_VERSION = 3
"""Pushes that are kept of each version that is served or kept: what a rollback reads."""
_DAY_S = 86_400.0


class JobState(StrEnum):
    """running ─► succeeded, failed, or interrupted: cancelled, or its process died."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"

    @property
    def ended(self) -> bool:
        return self is not JobState.RUNNING


class EventKind(StrEnum):
    """What an event of a job reports, and what its data are."""

    STAGE = "stage"
    """`stage`."""
    SERVER = "server"
    """`server`, `state` and `detail`."""
    PREPARED = "prepared"
    """What the push found before it touched a server (`PushObserver.fact`)."""
    VERIFIED = "verified"
    """Which servers hold which digests of which version."""
    NOTE = "note"
    """`message`."""
    PROGRESS = "progress"
    """`done_bytes` and `total_bytes`; not journaled."""
    END = "end"
    """`state`, a `JobState`."""


@dataclass(frozen=True)
class Job:
    """One long operation. Times are seconds since the epoch."""

    id: str
    """Like `push-3` or `dry-run-1`."""
    kind: str
    """push or dry-run; of those that are not on record adapters, or an operation's kind."""
    state: JobState
    """How it ended, if it has."""
    stage: str
    """The latest it entered."""
    done_bytes: int
    """Sent so far."""
    total_bytes: int
    """To be sent; 0 until that is known."""
    request: dict[str, Any]
    """The request as JSON."""
    servers: dict[str, dict[str, str]]
    """A server's name, and its last {`state`, `detail`}."""
    created_at: float
    """When it began."""
    finished_at: float | None = None
    """When it ended."""
    error: dict[str, Any] | None = None
    """Of a failed job: {`kind`, `message`, `hint`, `exit_code`, `details`}."""
    result: dict[str, Any] | None = None
    """Of one that succeeded: the result's JSON."""

    @property
    def ended(self) -> bool:
        return self.state.ended

    @property
    def is_push(self) -> bool:
        """Whether it concerns weights."""
        return self.kind in (PUSH, DRY_RUN)

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class JobEvent:
    """One thing that happened in a job. Its `sequence` is 0 until it is written."""

    sequence: int
    at: float
    kind: EventKind
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def now(cls, kind: EventKind, /, **data: Any) -> JobEvent:
        """One that is about to be written."""
        return cls(0, time.time(), kind, data)

    @classmethod
    def stage(cls, name: str) -> JobEvent:
        return cls.now(EventKind.STAGE, stage=name)

    @classmethod
    def server(cls, name: str, state: str, detail: str = "", requests: int = 0) -> JobEvent:
        data = {"server": name, "state": state, "detail": detail}
        return cls.now(EventKind.SERVER, **data, **({"requests": requests} if requests else {}))

    @classmethod
    def note(cls, message: str) -> JobEvent:
        return cls.now(EventKind.NOTE, message=message)

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class PushRecord:
    """One push of the fleet's history."""

    job: str
    """Its id."""
    at: float
    """When it ended, in epoch seconds."""
    ok: bool
    """Whether it succeeded."""
    version: str | None
    """What it pushed; None if it did not get that far."""
    checkpoint: str
    """The path it was pushed from."""
    checkpoint_digest: str | None
    """Of the identity of its files."""
    result: dict[str, Any]
    """PushResult's JSON; of one that failed, its error and how it left the servers, if known."""

    @property
    def content_digest(self) -> str:
        """Covers every byte that was pushed; "" if it was not computed."""
        return str(self.result.get("content_digest") or "")

    @property
    def draft(self) -> str:
        """The directory of the model that servers drafted tokens with; "" if none was given."""
        return str(self.result.get("draft") or "")

    @property
    def draft_digest(self) -> str:
        """The identity of that model's files."""
        return str(self.result.get("draft_digest") or "")

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Journal:
    """Jobs, their events and the push history of one fleet. `news` is told when a job ends."""

    def __init__(self, database: Database, news: News | None = None) -> None:
        self._database = database
        self._news = news or News()

    def begin(self, kind: str, request: dict[str, Any]) -> Job:
        """A new running job, owned by this process.

        Raises:
            StateUnwritable: it cannot be put on record, or there is no room for what follows.
        """
        self._database.reserve()
        owner, created_at = own_identity(), time.time()
        # dry runs count down from -1, so that they use up no push numbers
        number = "(SELECT MIN(0, COALESCE(MIN(number), 0)) - 1 FROM jobs)"
        cursor = self._database.write(
            "INSERT INTO jobs (number, kind, state, done_bytes, total_bytes, request, created_at, "
            f"owner) VALUES ({number if kind == DRY_RUN else 'NULL'}, ?, 'running', 0, 0, ?, ?, ?)",
            kind, json.dumps(request), created_at, json.dumps(owner.__dict__), durable=True,
        )  # fmt: skip
        name = f"{kind}-{abs(cursor.lastrowid or 0)}"
        return Job(name, kind, JobState.RUNNING, _QUEUED, 0, 0, request, {}, created_at)

    def progress(self, job_id: str, done_bytes: int, total_bytes: int) -> None:
        self._database.write(
            "UPDATE jobs SET done_bytes = ?, total_bytes = ? WHERE number = ?",
            done_bytes, total_bytes, number_of(job_id),
        )  # fmt: skip

    def add_events(self, job_id: str, *events: JobEvent, durable: bool = False) -> None:
        """Add events to a job. `durable`: they must be on record before they are acted upon."""
        number = number_of(job_id)
        self._database.write_rows(
            "INSERT INTO job_events (job, at, kind, data, server)",
            [
                (number, event.at, event.kind, json.dumps(event.data), event.data.get("server"))
                for event in events
            ],
            durable=durable,
        )

    def end(
        self,
        job_id: str,
        state: JobState,
        *,
        result: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> None:
        """Close a job as succeeded, failed or interrupted."""
        number = number_of(job_id)
        with self._database.transaction():
            self._database.write(
                "UPDATE jobs SET state = ?, finished_at = ?, result = ?, error = ? "
                "WHERE number = ?",
                state, time.time(), result and json.dumps(result), error and json.dumps(error),
                number,
            )  # fmt: skip
            self.add_events(job_id, JobEvent.now(EventKind.END, state=state))
        self._news.notify()
        if number % _PRUNE_EVERY_JOBS == 0:
            prune(self._database)

    @understood
    def job(self, job_id: str, *, in_full: bool = True) -> Job:
        """One job by its id. Unless `in_full`, which takes longer the more servers there are, its
        `stage` and `servers` are left out.

        Raises:
            NotFoundError: there is none.
        """
        jobs = self._jobs("WHERE number = ?", number_of(job_id), in_full=in_full)
        if not jobs or jobs[0].id != job_id:
            raise NotFoundError(f"there is no job {job_id!r}", hint="list them: skyctl jobs")
        return jobs[0]

    @understood
    def jobs(self, limit: int = LATEST) -> list[Job]:
        """The latest jobs, newest first; a clock that is set back changes no order of pushes."""
        order = "ORDER BY at DESC, abs(number) DESC"
        at = "max(created_at) OVER (PARTITION BY number > 0 ORDER BY abs(number)) AS at"
        latest = f"SELECT number AS listed, {at} FROM jobs {order} LIMIT ?"
        return self._jobs(f"JOIN ({latest}) ON number = listed {order}", limit)

    @understood
    def events(self, job_id: str, after: int = 0) -> list[JobEvent]:
        """Events of a job with a sequence number above `after`, oldest first."""
        rows = self._database.rows(
            "SELECT * FROM job_events WHERE job = ? AND sequence > ? ORDER BY sequence",
            number_of(job_id), after,
        )  # fmt: skip
        return [
            JobEvent(r["sequence"], r["at"], EventKind(r["kind"]), json.loads(r["data"]))
            for r in rows
        ]

    @understood
    def owner_alive(self, job_id: str) -> bool:
        """Whether the process that runs this job is still alive."""
        row = self._database.row("SELECT owner FROM jobs WHERE number = ?", number_of(job_id))
        return row is not None and ProcessIdentity(**json.loads(row["owner"])).alive()

    def interrupt_orphans(self, *, living: bool = False) -> list[Job]:
        """Close running jobs whose process is dead; returns them as they were found. `living`: also
        those of living processes, none of which has the fleet's turn.
        """
        orphans = self.orphans(living=living)
        for job in orphans:
            message = f"the process that ran {job.id} died in stage {job.stage}"
            hint = "put right what it left: skyctl recover"
            error = {"kind": "PushError", "message": message, "hint": hint}
            self.end(job.id, JobState.INTERRUPTED, error=error)
        return orphans

    @understood
    def orphans(self, *, living: bool = False) -> list[Job]:
        """Running jobs whose process is dead; with `living`, of any process."""
        rows = self._database.rows("SELECT number, owner FROM jobs WHERE state = 'running'")
        dead = [
            row["number"]
            for row in rows
            if living or not ProcessIdentity(**json.loads(row["owner"])).alive()
        ]
        if not dead:
            return []
        return self._jobs(f"WHERE number IN ({_marks(len(dead))})", *dead)

    def record_push(
        self,
        job_id: str,
        *,
        ok: bool,
        version: str | None,
        checkpoint: str,
        checkpoint_digest: str | None,
        result: dict[str, Any],
    ) -> None:
        """Add one push to the history."""
        self._database.write(
            "INSERT INTO pushes (job, at, ok, version, checkpoint, checkpoint_digest, result) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            job_id, time.time(), int(ok), version, checkpoint, checkpoint_digest,
            json.dumps(result),
        )  # fmt: skip

    @understood
    def pushes(self, limit: int = 50) -> list[PushRecord]:
        """The latest pushes, newest first."""
        rows = self._database.rows("SELECT * FROM pushes ORDER BY number DESC LIMIT ?", limit)
        return [
            PushRecord(
                r["job"], r["at"], bool(r["ok"]), r["version"], r["checkpoint"],
                r["checkpoint_digest"], json.loads(r["result"]),
            )
            for r in rows
        ]  # fmt: skip

    def _jobs(self, where: str, *parameters: Any, in_full: bool = True) -> list[Job]:
        """Jobs `WHERE …`, with the latest stage and server states from their events."""
        rows = self._database.rows(f"SELECT * FROM jobs {where}", *parameters)
        if not in_full:
            return [_job(row, _QUEUED, {}) for row in rows]
        stages = {row["number"]: _QUEUED for row in rows}
        servers: dict[int, dict[str, dict[str, str]]] = {row["number"]: {} for row in rows}
        for row in self._database.rows(
            "SELECT job, kind, data FROM job_events JOIN (SELECT min(sequence) AS first, "
            f"max(sequence) AS last FROM job_events WHERE job IN ({_marks(len(rows))}) "
            "AND kind IN ('stage', 'server') GROUP BY job, server) ON sequence = last "
            "ORDER BY first",
            *servers,
        ):
            data = json.loads(row["data"])
            if row["kind"] == EventKind.STAGE:
                stages[row["job"]] = data["stage"]
            else:
                latest = {"state": data["state"], "detail": data["detail"]}
                servers[row["job"]][data["server"]] = latest
        return [_job(row, stages[row["number"]], servers[row["number"]]) for row in rows]


def number_of(job_id: str) -> int:
    """The row's number; 0, which no row has, for an invalid id. Later pushes have larger ones."""
    kind, _, tail = job_id.rpartition("-")
    number = int(tail) if tail.isdecimal() and len(tail) < 19 else 0  # SQLite's have 63 bits
    return -number if kind == DRY_RUN else number


def _marks(count: int) -> str:
    """A list of `count` SQL parameters."""
    return ", ".join("?" * count)


def _job(row: sqlite3.Row, stage: str, servers: dict[str, dict[str, str]]) -> Job:
    return Job(
        id=f"{row['kind']}-{abs(row['number'])}",
        kind=row["kind"],
        state=JobState(row["state"]),
        stage=stage,
        done_bytes=row["done_bytes"],
        total_bytes=row["total_bytes"],
        request=json.loads(row["request"]),
        servers=servers,
        created_at=row["created_at"],
        finished_at=row["finished_at"],
        error=row["error"] and json.loads(row["error"]),
        result=row["result"] and json.loads(row["result"]),
    )


def prune(database: Database) -> None:
    """Forget old jobs, pushes and events.

    Never a running job, one that left servers in doubt, or the latest `RECENT`, with as many dry
    runs, whose numbers are their own; never the latest pushes of a version that a server has or the
    fleet keeps.
    """
    before = time.time() - database.retention.days * _DAY_S
    latest = max(database.retention.pushes, RECENT)
    with database.transaction():
        database.write(
            "DELETE FROM jobs WHERE state <> 'running' "
            "AND kind || '-' || number NOT IN (SELECT job FROM in_doubt) AND number IN ("
            "SELECT number FROM (SELECT number, created_at, row_number() OVER "
            "(PARTITION BY number > 0 ORDER BY abs(number) DESC) AS age FROM jobs) "
            "WHERE age > ? AND (age > ? OR created_at < ?))",
            RECENT, latest, before,
        )  # fmt: skip
        database.write("DELETE FROM job_events WHERE job NOT IN (SELECT number FROM jobs)")
        database.write(
            "DELETE FROM pushes WHERE (number <= (SELECT max(number) FROM pushes) - ? OR at < ?) "
            "AND number <= (SELECT max(number) FROM pushes) - ? AND number NOT IN ("
            "SELECT number FROM (SELECT number, row_number() OVER "
            "(PARTITION BY version ORDER BY number DESC) AS age FROM pushes WHERE version IN ("
            "SELECT weight_version FROM servers WHERE weight_version IS NOT NULL "
            "UNION SELECT json_extract(value, '$.version') FROM meta WHERE key = 'weights' "
            "UNION SELECT json_extract(kept.value, '$.version') FROM meta, json_each(meta.value) "
            "AS kept WHERE meta.key = 'kept_weights')) WHERE age <= ?)",
            latest, before, RECENT, _OF_A_VERSION,
        )  # fmt: skip
        prune_events(database)


def prune_events(database: Database) -> None:
    """Forget old lines of history."""
    database.write(
        "DELETE FROM events WHERE sequence <= (SELECT max(sequence) FROM events) - ? OR at < ?",
        database.retention.events, time.time() - database.retention.days * _DAY_S,
    )  # fmt: skip

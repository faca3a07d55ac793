"""Servers in doubt: a push touched them and did not release them. What they hold, and what has to
be undone.

A push that fails, or whose process dies, leaves such servers. They are quarantined, and recorded
here until a push, a restart or `skyctl recover` has repaired them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from skyctl.errors import ConflictError
from skyctl.states import PushStage, PushState
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.identity import ProcessIdentity
from skyctl.store.journal import EventKind, Job, JobEvent
from skyctl.store.state import FleetState


@dataclass(frozen=True)
class InDoubt:
    """What a push left of one server."""

    server: str
    """Its name."""
    job: str
    """The push."""
    stage: str
    """Where the push ended; where it was undone, the stage before the undo, or the undo of a server
    in which a session was found, or stayed: it has whole weights only if its digest says so.
    """
    half_updated: bool
    """Bytes may have been sent, so it may hold parts of several checkpoints; otherwise it has whole
    weights, perhaps behind an open session: those on record.
    """
    thaw: bool
    """The push froze it; no command had paused it before."""
    woken: bool = False
    """It slept, and the push woke its weights."""
    digest: str = ""
    """Of its whole weights; "" if the push did not compute it."""
    version: str = ""
    """The label that verified weights get before it is thawed."""

    @property
    def by_verb(self) -> bool:
        """Whether a pause that could not be undone left it, not a push: any verb may follow."""
        return self.job == _PAUSE

    @property
    def by_admission(self) -> bool:
        """Whether the supervisor was pushing to this server alone, without the fleet's turn."""
        return self.job == _ADMISSION

    @property
    def whole(self) -> bool:
        """Whether it holds whole weights that are not the fleet's, and no push froze it."""
        return self.stage == PushStage.NO_PUSH

    @property
    def reason(self) -> str:
        """The reason of the doubt, and what it may hold, in a sentence."""
        if self.whole:
            return "it does not hold the fleet's weights, and recovery could not have them"
        if self.by_verb:
            return "a pause failed, and could not be undone here"
        interrupted = f"{self.job} broke off in stage {self.stage}"
        if self.half_updated:
            return f"{interrupted}: it may hold parts of both weights"
        if self.woken:
            return f"{interrupted}: it sleeps, and its weights do not"
        return f"{interrupted}, before anything was sent"


_PAUSE = "pause"
"""The job of a doubt that a pause left."""
_ADMISSION = "a push of its own"
"""The job of a doubt that a server's admission left."""
_SENDER = "sender"
"""Key of the trainer that sends: `{"job": …}` and its process; "" once it has reported its end."""

NO_DOUBT = InDoubt("", "", "", half_updated=False, thaw=False)


def left_behind(job: Job, events: Sequence[JobEvent]) -> dict[str, InDoubt]:
    """The servers that a push, by its journal, touched and did not release. Pure.

    Stages, `waking` and `pausing` are journaled before they are acted upon, the rest after.
    """
    new = {
        name: (digest, update["version"])
        for update in verified(events)
        for name, digest in update["servers"].items()
        if digest
    }
    stages = [PushStage(event.data["stage"]) for event in events if event.kind is EventKind.STAGE]
    sent = PushStage.UPDATE in stages
    if not sent:
        stages = [stage for stage in stages if stage is not PushStage.RECOVER]  # the undo
    frozen_by_push: dict[str, bool] = {}
    woken: set[str] = set()
    last: dict[str, PushState] = {}
    digests: dict[str, str] = {}
    for event in events:
        if event.kind is EventKind.SERVER:
            name, state = event.data["server"], PushState(event.data["state"])
            if state is PushState.WEIGHED:
                digests[name] = event.data["detail"]
                continue
            last[name] = state
            if state in (PushState.HELD, PushState.PAUSING):
                frozen_by_push[name] = state is PushState.PAUSING
            elif state is PushState.WAKING:
                woken.add(name)

    def given_back(name: str, state: PushState) -> bool:
        if name in woken and not sent:
            return state is PushState.ASLEEP
        # a server that was already paused is unchanged until a session is opened in it
        unchanged = state is PushState.HELD and PushStage.START not in stages
        return state.given_back or unchanged

    if not frozen_by_push and not any(stage.touches for stage in stages):
        return {}
    return {
        name: InDoubt(
            name,
            job.id,
            stages[-1] if sent or name in woken else _undone_stage(stages[-1], state),
            half_updated=sent and name not in new,
            thaw=frozen_by_push.get(name, True),
            woken=name in woken,
            digest=new[name][0] if name in new else digests.get(name, ""),
            version=new[name][1] if name in new else "",
        )
        for name, state in last.items()
        if not given_back(name, state)
    }


def _undone_stage(stage: PushStage, state: PushState) -> PushStage:
    """The stage of a server that was sent nothing, whose last state this is."""
    return PushStage.RECOVER if state is PushState.QUARANTINED else stage


def released_by(events: Iterable[JobEvent]) -> set[str]:
    """The servers that a push has released. A roll that stops has not come to all, and a push that
    breaks off leaves some frozen that hold their old weights.
    """
    states = _last_states(events).items()
    return {name for name, state in states if state.thawed or state is PushState.ASLEEP}


def _last_states(events: Iterable[JobEvent]) -> dict[str, PushState]:
    return {
        event.data["server"]: PushState(event.data["state"])
        for event in events
        if event.kind is EventKind.SERVER
    }


def verified(events: Iterable[JobEvent]) -> list[dict[str, Any]]:
    """What a push had verified by the end of its events, in order (`PushObserver.fact`)."""
    return [event.data for event in events if event.kind is EventKind.VERIFIED]


def in_doubt(state: FleetState) -> dict[str, InDoubt]:
    """Every server in doubt, by name."""
    with state.understanding():
        records = [
            InDoubt(
                row["server"], row["job"], row["stage"],
                bool(row["half_updated"]), bool(row["thaw"]), bool(row["woken"]),
                row["digest"], row["version"],
            )
            for row in state.rows("SELECT * FROM in_doubt ORDER BY server")
        ]  # fmt: skip
    return {record.server: record for record in records}


def in_doubt_or_orphaned(state: FleetState, *, living: bool = False) -> dict[str, InDoubt]:
    """Those, and what pushes left whose process is dead and which no process has closed yet; with
    `living`, which are on record as running: their process may live, and not have recorded the end.
    """
    records = in_doubt(state)
    for job in state.journal.orphans(living=living):
        records |= left_behind(job, state.journal.events(job.id))
    return records


def put_in_doubt(state: FleetState, records: Mapping[str, InDoubt]) -> None:
    """Record these servers as in doubt as well, and quarantine those that are not quarantined.

    What an earlier push left is kept where this one has not undone it.
    """
    with state.transaction():
        earlier = in_doubt(state)
        for name, record in records.items():
            before, row = earlier.get(name, NO_DOUBT), state.server(name)
            woken = record.woken or before.woken
            # once all of it is awake, a freeze is a push's, on record or not
            record = replace(record, woken=woken, thaw=record.thaw or (woken and not row.paused))
            if not record.version:
                sent = before.half_updated and not record.half_updated
                session = before.stage in (PushStage.START, PushStage.RECOVER)
                opened = session and PushStage(record.stage).before_sessions
                if sent or opened:
                    # this push has neither scrubbed nor closed what the earlier one left
                    stage = record.stage if before.whole else before.stage  # it is touched now
                    record = replace(record, half_updated=sent, job=before.job, stage=stage)
                version = "" if record.half_updated else before.version
                record = replace(record, digest=before.digest or record.digest, version=version)
            _save(state, record)
            changes: dict[str, Any] = {"weights_awake": True} if record.woken else {}
            if not row.quarantine:
                changes["quarantine"] = f"{record.job} broke off in stage {record.stage}"
            state.update_server(name, **changes)


def open_sender(state: FleetState, job: str, process: ProcessIdentity | None) -> None:
    """Record that this process may write to servers from now on; None: whether it lives
    cannot be seen.
    """
    state.set(_SENDER, json.dumps({"job": job, **asdict(process)}) if process else "")


def close_sender(state: FleetState, job: str) -> None:
    """Record that the trainer of this update has reported that it sends nothing more."""
    if (sender := state.get(_SENDER)) and json.loads(sender)["job"] == job:
        state.set(_SENDER, "")


def held_by(state: FleetState) -> tuple[ProcessIdentity, frozenset[str]] | None:
    """A living trainer that has not left an update although it is over, and the servers to which it
    may still send: if they were resumed, they would serve whatever it writes.
    """
    if not (recorded := state.get(_SENDER)):
        return None
    sender = json.loads(recorded)
    job, process = sender.pop("job"), ProcessIdentity(**sender)
    names = {
        n for n, record in in_doubt(state).items() if record.half_updated and record.job == job
    }
    return (process, frozenset(names)) if names and process.alive() else None


def why_held(process: ProcessIdentity) -> str:
    return f"its trainer (pid {process.pid}) lives, and may still send to it"


def refuse_held(state: FleetState, process: ProcessIdentity | None) -> None:
    """Raise ConflictError if a trainer other than this one holds servers."""
    holder = held_by(state)
    if holder is not None and holder[0] != process:
        raise ConflictError(
            f"{', '.join(sorted(holder[1]))}: {why_held(holder[0])}",
            hint=f"leave its update, or end it (kill {holder[0].pid})",
        )


def touch(state: FleetState, name: str) -> None:
    """Record that a server is about to be pushed to by its own admission, which has no journal.

    Raises:
        StateUnwritable: it cannot be put on record.
    """
    with state.durable():
        _save(state, InDoubt(name, _ADMISSION, PushStage.UPDATE, True, True))


def doubt_pause(state: FleetState, name: str) -> None:
    """Record that this server may be frozen, or may become so, by a pause that failed and could
    not be undone.
    """
    if name not in in_doubt(state):
        _save(state, InDoubt(name, _PAUSE, PushStage.PAUSE, half_updated=False, thaw=True))


def leave_to_next_push(state: FleetState, name: str) -> None:
    """Record that this server holds whole weights other than the fleet's, and the fleet's are
    unavailable: a push takes in a quarantined server only if it is in doubt.
    """
    if name not in in_doubt(state):
        thaw = not state.server(name).paused
        _save(state, InDoubt(name, "recovery", PushStage.NO_PUSH, half_updated=True, thaw=thaw))


def clear_doubt(state: FleetState, *names: str) -> None:
    """Remove the records of servers that were repaired, or run in a new process."""
    marks = ", ".join("?" * len(names))
    state.write(f"DELETE FROM in_doubt WHERE server IN ({marks})", *names)


def close_orphans(state: FleetState, *, in_turn: bool = False) -> list[Job]:
    """Close running jobs whose process is dead, commit what they had verified, and record the
    servers they left as in doubt; returns those jobs.

    `in_turn`: this process has the fleet's turn, so no push is under way. A job recorded as running
    has then ended, even if its process lives and could not record the end.
    """
    if not state.journal.orphans(living=in_turn):
        return []
    with state.understanding(), state.transaction():  # atomic: another process may do the same
        orphans = state.journal.interrupt_orphans(living=in_turn)
        for job in orphans:
            record_cut_short(state, job)
    return orphans


def record_cut_short(state: FleetState, job: Job) -> None:
    """Commit what a push that was cut short had verified, and record what it left in doubt."""
    events = state.journal.events(job.id)
    suspects = left_behind(job, events)
    with state.transaction():
        put_in_doubt(state, suspects)
        running = (PushState.READY, PushState.RESUMED, PushState.SLEEPING)
        ran = {name: last for name, last in _last_states(events).items() if last in running}
        _roll_forward(state, job, verified(events), suspects, ran)


def _roll_forward(
    state: FleetState,
    job: Job,
    done: Sequence[Mapping[str, Any]],
    suspects: Collection[str],
    ran: Mapping[str, PushState],
) -> None:
    """Every byte was sent and verified: the weights are the servers', and the fleet's if the push
    was for all of it. A server that was not to be verified has them if the push released it, and is
    not among the `suspects`. What an earlier push left in it is cleared. Those that `ran` generated
    at the push's end.
    """
    for update in done:
        source = {key: update[key] for key in ("checkpoint", "checkpoint_digest")}
        holding = {
            n: digest for n, digest in update["servers"].items() if digest or n not in suspects
        }
        released = [name for name in in_doubt(state) if name in holding and name not in suspects]
        clear_doubt(state, *released)
        state.update_servers({name: {"quarantine": None} for name in released})
        for name, digest in holding.items():
            # weights that a level-2 sleep discarded exist again
            level = min(state.server(name).sleep_level, 1)
            now = {**source, "checkpoint": update["checkpoint"] or None, "sleep_level": level}
            if name in ran:  # all of it was awake; all of it may have been put to sleep since
                now["weights_awake"] = False
            if ran.get(name) is PushState.SLEEPING:
                now["sleep_level"] = job.request["sleep_after"]
            state.update_server(
                name, weight_version=update["version"], weights_digest=digest or None, **now
            )
        if update["whole"] and holding:
            state.set_weights(FleetWeights.pushed(update))
            state.add_event(
                "fleet", f"{job.id} was cut short; weights {update['version']} were verified"
            )
            state.journal.record_push(
                job.id, ok=True, version=update["version"], result=dict(update), **source
            )


def _save(state: FleetState, record: InDoubt) -> None:
    state.write(
        "INSERT OR REPLACE INTO in_doubt "
        "(server, job, stage, half_updated, thaw, woken, digest, version) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        record.server, record.job, record.stage, record.half_updated, record.thaw, record.woken,
        record.digest, record.version,
    )  # fmt: skip

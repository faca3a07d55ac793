"""States that several packages act on. Their values are what journals and JSON hold."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of the requests that run when a server is paused."""

TRAINER = "trainer"
"""Transport of weights that a trainer sends itself."""
LIVE = "live"
"""Transport of weights that servers copy out of a trainer's memory."""
SIBLING = "sibling"
"""Transport of weights that a server copies from another of its fleet, worker to worker."""

UNLABELLED = "default"
"""The weight version that a server reports which was never given one."""
DISCARDED = 2
"""The level of a sleep that discards the weights."""


def label_matches(reported: str | None, recorded: str | None) -> bool:
    """Whether a server's label is the one on record; True if its engine reports none."""
    return reported in (None, recorded or UNLABELLED)


def is_empty(slept: int, reported: str | None, recorded: str | None) -> bool:
    """Whether a server that is awake, and was put to sleep at level `slept`, is known to hold no
    weights: the sleep discarded them, and it still has the label that it was given, which one that
    was started again has not.
    """
    return slept == DISCARDED and bool(recorded) and reported == recorded


class FleetEvent(StrEnum):
    """Events that a fleet file can have a command for (`on_event:`)."""

    PUSH_SUCCEEDED = "push_succeeded"
    PUSH_FAILED = "push_failed"
    REPLICA_READY = "replica_ready"
    REPLICA_REPLACED = "replica_replaced"
    PROCESS_DIED = "process_died"
    OPERATION_DONE = "operation_done"
    OPERATION_FAILED = "operation_failed"


class Phase(StrEnum):
    """Where a server, the router or the Tinker API is in its life under a supervisor.

    stopped ─► waiting ─► starting ─► admitting ─► up (a server) or ready (a front)
                  ▲          │            │                     │
                  │          └────────────┴──── it died ────────┤
                  │                                             ▼
                  └─ restarting ◄─ its policy allows another ◄──┤
                         ▲                                      ▼
                  unreachable                             dead, failed
    """

    STOPPED = "stopped"
    """It has no process, and needs none."""
    WAITING = "waiting"
    """Its GPU is loading another server, or a front has no server yet."""
    STARTING = "starting"
    """It was spawned, and is not ready."""
    ASLEEP = "asleep"
    """It died while its fleet sleeps, and starts once the fleet is switched to."""
    ADMITTING = "admitting"
    """It is ready, and takes the fleet's weights; a front skips this."""
    UP = "up"
    """A server takes part. It shows its condition instead."""
    READY = "ready"
    """A front serves."""
    RESTARTING = "restarting"
    """It died, and waits for its backoff."""
    UNREACHABLE = "unreachable"
    """Its machine is silent, and it may still run there: no other is started."""
    STOPPING = "stopping"
    DEAD = "dead"
    """It died, and its policy is never to restart."""
    FAILED = "failed"
    """It never got ready, was restarted too often, or could not be ended."""

    @property
    def settled(self) -> bool:
        """Whether nothing is to be waited for: it serves, or will not by itself."""
        return self.ended or self in (Phase.UP, Phase.READY, Phase.UNREACHABLE, Phase.ASLEEP)

    @property
    def given_up(self) -> bool:
        """Whether the supervisor starts it again only when told to."""
        return self in (Phase.DEAD, Phase.FAILED)

    @property
    def ended(self) -> bool:
        """Whether it has no process and gets none by itself."""
        return self.given_up or self is Phase.STOPPED

    @property
    def state(self) -> ReplicaState:
        """What `status` shows of a process that does not serve yet, or of a front."""
        return ReplicaState.STARTING if self is Phase.WAITING else ReplicaState(self)


class ReplicaState(StrEnum):
    """What `status` shows of a server; a front is in none of the states that only weights explain.

        starting ─► updating ─► ready ◄─► paused, asleep, updating      as intended
                        └─► quarantined, unreachable                    until `recover`
        restarting, stopping, stopped, dead, failed                     as its `Phase`

    `unsupervised`: it runs, and the supervisor is gone.
    """

    STARTING = "starting"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DEAD = "dead"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    """It does not answer, or it is unknown whether it still runs."""
    UNSUPERVISED = "unsupervised"
    QUARANTINED = "quarantined"
    """It runs, and must not serve: what it holds is not certain, or not the fleet's."""
    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    UPDATING = "updating"
    """A push has it, or it takes the fleet's weights."""

    @property
    def as_intended(self) -> bool:
        """Whether it does what it was asked to."""
        return self.answers or self is ReplicaState.UPDATING

    @property
    def answers(self) -> bool:
        """Whether its engine answers questions: it is up, and no push has it."""
        return self in (ReplicaState.READY, ReplicaState.PAUSED, ReplicaState.ASLEEP)

    @property
    def in_transition(self) -> bool:
        """Whether its process is being started or ended."""
        return self in (ReplicaState.STARTING, ReplicaState.RESTARTING, ReplicaState.STOPPING)

    @property
    def busy(self) -> bool:
        """Whether another state follows by itself."""
        return self.in_transition or self is ReplicaState.UPDATING

    @property
    def lives(self) -> bool:
        """Whether it has a process, or gets one by itself."""
        return self.as_intended or self.in_transition or self is ReplicaState.QUARANTINED

    @property
    def given_up(self) -> bool:
        """Whether the supervisor starts it again only when told to."""
        return self in (ReplicaState.DEAD, ReplicaState.FAILED)

    @property
    def ended(self) -> bool:
        """Whether it has no process and gets none by itself."""
        return self.given_up or self is ReplicaState.STOPPED

    @property
    def stuck(self) -> bool:
        """Whether it runs into no other state by itself: a push or a recovery may take it out."""
        return self.given_up or self is ReplicaState.QUARANTINED

    @property
    def recoverable(self) -> bool:
        """Whether `skyctl recover` is what to type."""
        return self in (
            ReplicaState.QUARANTINED,
            ReplicaState.UNREACHABLE,
            ReplicaState.UNSUPERVISED,
        )

    @property
    def queues(self) -> bool:
        """Whether requests that reach it wait, and are answered later."""
        return self in (ReplicaState.PAUSED, ReplicaState.UPDATING)

    @property
    def fails_requests(self) -> bool:
        """Whether requests that reach it fail, so that no router may list it."""
        return (
            self.stuck
            or self.ended
            or self in (ReplicaState.ASLEEP, ReplicaState.UNREACHABLE, ReplicaState.STOPPING)
        )


class PushState(StrEnum):
    """Where a server is in a push. Stages in brackets are those of some pushes only.

        weighed ─► [draining] ─► [waking] ─► pausing ─► paused ─► updating ─► [trying] ─► updated
                                    └──────► held ─────────────────┘                         │
                                                                                             ▼
        ends:   ready ◄─ resumed ◄───────────────── it was frozen by the push ◄──────────────┤
                kept  ◄──────────────────────────── it was paused before ◄───────────────────┤
                asleep ◄─────────────────────────── it slept, and the push was undone ◄──────┤
                quarantined ◄────────────────────── what it holds is not certain ◄───────────┘

    A server whose resume failed ends `paused`. A push that is undone before its first byte leads
    from `draining` to `paused` straight to an end. With `--sleep-after`, `ready` and `kept` are
    followed by `sleeping`.
    """

    WEIGHED = "weighed"
    """Its weights were read; nothing was touched."""
    DRAINING = "draining"
    """It left the router; nothing was touched."""
    WAKING = "waking"
    """It slept, and its weights are woken."""
    HELD = "held"
    """It was paused before the push, and stays paused after it."""
    PAUSING = "pausing"
    """It is told to freeze its requests; until it answers, it may still generate."""
    PAUSED = "paused"
    UPDATING = "updating"
    """Bytes go into it."""
    TRYING = "trying"
    """It answers trial prompts and nothing else."""
    UPDATED = "updated"
    """It holds the new version, verified and labelled."""
    RESUMED = "resumed"
    """It generates; it is routed to once all are resumed."""
    READY = "ready"
    KEPT = "kept"
    SLEEPING = "sleeping"
    """The push is over, and it is told to sleep, which may discard what was pushed."""
    ASLEEP = "asleep"
    QUARANTINED = "quarantined"

    @classmethod
    def _missing_(cls, value: object) -> PushState:
        """A state that another version of skyctl wrote: nothing may be concluded from it."""
        return cls.QUARANTINED

    @property
    def must_be_recorded_first(self) -> bool:
        """Whether the journal has it on disk before the push acts: recovery depends on it."""
        return self in (PushState.WAKING, PushState.HELD, PushState.PAUSING)

    @property
    def given_back(self) -> bool:
        """Whether the push has released the server, or has not touched it yet."""
        return self.thawed or self is PushState.DRAINING

    @property
    def thawed(self) -> bool:
        """Whether the server is as it was meant to be before the push."""
        return self.complete or self is PushState.RESUMED

    @property
    def complete(self) -> bool:
        """Whether the push has nothing more to do with it."""
        return self in (PushState.READY, PushState.KEPT, PushState.SLEEPING)

    @property
    def serves_or_sleeps(self) -> bool:
        """Whether it ended as it should, unless it was paused before."""
        return self in (PushState.READY, PushState.ASLEEP)

    @property
    def frozen(self) -> bool:
        """Whether the server generates for no user."""
        return self in (
            PushState.HELD,
            PushState.PAUSING,
            PushState.PAUSED,
            PushState.UPDATING,
            PushState.TRYING,
            PushState.UPDATED,
            PushState.QUARANTINED,
        )

    @property
    def answered(self) -> bool:
        """Whether a frozen server has answered that it is frozen."""
        return self.frozen and self not in (PushState.PAUSING, PushState.QUARANTINED)

    @property
    def shown_as_updating(self) -> bool:
        """Whether `status` says so. A server that was paused or asleep before shows that."""
        return self in (
            PushState.DRAINING,
            PushState.PAUSING,
            PushState.PAUSED,
            PushState.UPDATING,
            PushState.TRYING,
            PushState.UPDATED,
            PushState.RESUMED,
        )


class PushStage(StrEnum):
    """What a push does, with all of its servers at once.

        queued ─► [keep] ─► preflight ─► stage ─► [drain] ─► [wake] ─► pause ─► init ─► start ─►
        └──────── nothing is touched ─────────┘   └── old weights: it can be undone ──────────┘

        update ─► finish ─► [recover] ─► verify ─► [trial] ─► resume
        └── half updated: recover is a second attempt; else quarantined

    Before the first byte, `recover` is the undo.
    """

    QUEUED = "queued"
    KEEP = "keep"
    """The fleet makes its own copy of the checkpoint."""
    CHECK = "preflight"
    STAGE = "stage"
    DRAIN = "drain"
    WAKE = "wake"
    PAUSE = "pause"
    INIT = "init"
    """The servers form a group with the sender, where there is one."""
    START = "start"
    """The servers open an update session."""
    UPDATE = "update"
    FINISH = "finish"
    VERIFY = "verify"
    TRIAL = "trial"
    RECOVER = "recover"
    RESUME = "resume"
    NO_PUSH = "left"
    """Of a server in doubt: not a push left it, recovery could not repair it."""

    @classmethod
    def _missing_(cls, value: object) -> PushStage:
        """A stage that another version of skyctl wrote: bytes may have been sent."""
        return cls.UPDATE

    @property
    def must_be_recorded_first(self) -> bool:
        """Whether the journal has it on disk before the push acts: recovery depends on it."""
        return self in (PushStage.START, PushStage.UPDATE)

    @property
    def touches(self) -> bool:
        """Whether it is a first act on servers that serve or sleep."""
        return self in (PushStage.WAKE, PushStage.PAUSE)

    @property
    def before_sessions(self) -> bool:
        """Whether servers are touched, and no session has been opened in them yet."""
        return self.touches or self is PushStage.INIT

    @property
    def before_bytes(self) -> bool:
        """Whether servers are touched, and hold their old weights for certain."""
        return self.before_sessions or self is PushStage.START

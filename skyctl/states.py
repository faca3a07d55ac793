"""States that several packages act on. Their values are what journals and JSON hold."""

from __future__ import annotations

from enum import StrEnum


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
    from `draining` to `paused` straight to an end.
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
    """It answers canary prompts and nothing else."""
    UPDATED = "updated"
    """It holds the new version, verified and labelled."""
    RESUMED = "resumed"
    """It generates; it is routed to once all are resumed."""
    READY = "ready"
    KEPT = "kept"
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
        return self in (PushState.READY, PushState.KEPT)

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

        update ─► finish ─► [recover] ─► verify ─► [canary] ─► resume
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
    CANARY = "canary"
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

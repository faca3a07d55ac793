"""Which committed weights could have produced an answer: pure, from the journal and the records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from skyctl.store.journal import Job, JobEvent

Outcome = Literal["answered", "failed", "hung"]
Verdict = Literal["pure", "frozen", "empty", "uncommitted", "mixed", "unknown"]
VIOLATIONS = ("uncommitted", "mixed", "unknown")


@dataclass(frozen=True)
class Record:
    """One request. `via` is `router` or a server's name; times are seconds since the epoch.

    `status` is the HTTP status, 0 where there was none. `why` says how it failed.
    """

    number: int
    via: str
    prompt: int
    wanted: int
    began_at: float
    ended_at: float
    outcome: Outcome
    status: int = 0
    tokens: tuple[int, ...] = ()
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Span:
    """While some server may have served `version`; `until` is when none could any more."""

    version: str
    since: float
    until: float = math.inf

    def overlaps(self, began_at: float, ended_at: float) -> bool:
        return self.since <= ended_at and began_at <= self.until


@dataclass
class Expected:
    """Greedy tokens by version and prompt, and those of a generation that a push froze.

    `frozen` has, by (old, new, prompt), the tokens after k old ones: `frozen[...][k - 1]`.
    """

    pure: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    frozen: dict[tuple[str, str, int], list[tuple[int, ...]]] = field(default_factory=dict)


def committed_spans(initial: str, jobs: Sequence[tuple[Job, Sequence[JobEvent]]]) -> list[Span]:
    """When each version could be served, from the pushes in order of their numbers.

    A version may be served from the moment it is journaled as verified, which is before a server is
    resumed: recovery thaws what is known to hold it. The others end when a push of it succeeded.
    """
    open_since = {initial: 0.0}
    spans: list[Span] = []
    for job, events in jobs:
        commits = [event for event in events if event.kind == "verified"]
        if not commits:
            continue
        version = version_of(commits[0].data["version"])
        open_since.setdefault(version, commits[0].at)
        if job.state == "succeeded" and job.finished_at is not None:
            for other in [name for name in open_since if name != version]:
                spans.append(Span(other, open_since.pop(other), job.finished_at))
    return spans + [Span(version, since) for version, since in open_since.items()]


def version_of(label: str) -> str:
    """The version's letter in the label of a push (`a-17`)."""
    return label.partition("-")[0].partition("@")[0]


def judge(record: Record, spans: Iterable[Span], expected: Expected) -> Verdict:
    """What an answer says of the weights behind it."""
    tokens, prompt = record.tokens, record.prompt
    if not tokens:
        return "empty"
    during = [span for span in spans if span.overlaps(record.began_at, record.ended_at)]
    for (version, asked), known in expected.pure.items():
        if asked == prompt and known[: len(tokens)] == tokens:
            committed = any(span.version == version for span in during)
            return "pure" if committed else "uncommitted"
    possible = {span.version for span in during}
    for (old, new, asked), known_after in expected.frozen.items():
        if asked == prompt and any(known[: len(tokens)] == tokens for known in known_after):
            return "frozen" if {old, new} <= possible else "mixed"
    return "unknown"

"""When each stage of a push ran, and what each server did meanwhile: read from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyctl.states import PushState
from skyctl.store.journal import EventKind, JobEvent


@dataclass(frozen=True)
class Span:
    """Seconds after the push began."""

    name: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class ServerTimeline:
    """`states` in order, up to where the server was thawed or given up; `frozen_s` runs from its
    own answer to the pause to its own answer to the resume. It is None for a server that the push
    did not freeze, and lasts to the end for one that it left frozen.
    """

    server: str
    states: tuple[Span, ...]
    frozen_s: float | None


@dataclass(frozen=True)
class Timeline:
    """Stages in the order in which they began; a repeated stage is listed again."""

    seconds: float
    stages: tuple[Span, ...]
    servers: tuple[ServerTimeline, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def timeline(events: Sequence[JobEvent]) -> Timeline:
    """The timeline of a job's events, in order. Empty without any stage. One still running ends at
    its last event.
    """
    began = next((event.at for event in events if event.kind is EventKind.STAGE), None)
    if began is None:
        return Timeline(0.0, (), ())
    end_s = max(event.at for event in events) - began
    stages = _spans(
        ((e.data["stage"], e.at - began) for e in events if e.kind is EventKind.STAGE), end_s=end_s
    )
    by_server: dict[str, list[tuple[str, float]]] = {}
    for event in events:
        if event.kind is EventKind.SERVER:
            moments = by_server.setdefault(event.data["server"], [])
            moments.append((event.data["state"], event.at - began))
    servers = tuple(_server(name, moments, end_s) for name, moments in sorted(by_server.items()))
    return Timeline(end_s, stages, servers)


def _server(name: str, moments: Sequence[tuple[str, float]], end_s: float) -> ServerTimeline:
    spans = [span for span in _spans(moments, end_s=end_s) if not PushState(span.name).thawed]
    frozen = [span for span in spans if PushState(span.name).frozen]
    # `pausing` is the call: until it is answered the server may still generate
    answered = [span for span in frozen if PushState(span.name).answered]
    frozen_s = frozen[-1].end_s - (answered or frozen)[0].begin_s if frozen else None
    return ServerTimeline(name, tuple(spans), frozen_s)


def _spans(moments: Iterable[tuple[str, float]], *, end_s: float) -> tuple[Span, ...]:
    """Each state lasts until the next begins; a repeated state is merged."""
    merged: list[tuple[str, float]] = []
    for name, at in moments:
        if not merged or merged[-1][0] != name:
            merged.append((name, at))
    ends = [at for _, at in merged[1:]] + [end_s]
    return tuple(Span(name, at, end) for (name, at), end in zip(merged, ends, strict=True))

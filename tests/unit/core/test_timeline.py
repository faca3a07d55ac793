"""A push's timeline, from its events."""

from __future__ import annotations

from skyctl.core.timeline import Span, timeline
from skyctl.store.journal import EventKind, JobEvent


def events(*rows: tuple[float, str, str, str]) -> list[JobEvent]:
    """Rows of (seconds, kind, stage or server, state)."""
    made = []
    for number, (at, kind, name, state) in enumerate(rows):
        data = {"stage": name} if kind == "stage" else {"server": name, "state": state}
        made.append(JobEvent(number, 1000.0 + at, EventKind(kind), data))
    return made


def test_a_stage_lasts_until_the_next_begins_and_the_last_until_the_end() -> None:
    drawn = timeline(
        events((0, "stage", "preflight", ""), (1, "stage", "stage", ""), (4, "end", "", ""))
    )
    assert drawn.stages == (Span("preflight", 0, 1), Span("stage", 1, 4))
    assert drawn.seconds == 4


def test_a_server_is_frozen_from_its_own_answer_to_its_own_resume() -> None:
    drawn = timeline(
        events(
            (0, "stage", "pause", ""),
            (1.0, "server", "a", "pausing"),
            (1.5, "server", "b", "pausing"),
            (1.75, "server", "a", "paused"),
            (2.0, "server", "a", "updating"),
            (2.25, "server", "b", "paused"),
            (2.5, "server", "a", "updating"),
            (3.0, "server", "a", "resumed"),
            (4.5, "server", "b", "resumed"),
            (5.0, "server", "a", "ready"),
            (5.0, "server", "b", "ready"),
            (6.0, "end", "", ""),
        )
    )
    a, b = drawn.servers
    assert a.states == (Span("pausing", 1, 1.75), Span("paused", 1.75, 2), Span("updating", 2, 3))
    assert (a.frozen_s, b.frozen_s) == (1.25, 2.25)


def test_a_server_left_in_quarantine_is_frozen_to_the_end_and_a_kept_one_never_was() -> None:
    drawn = timeline(
        events(
            (0, "stage", "pause", ""),
            (1, "server", "a", "pausing"),
            (2, "server", "a", "quarantined"),
            (2, "server", "b", "kept"),
            (7, "end", "", ""),
        )
    )
    assert [one.frozen_s for one in drawn.servers] == [6.0, None]


def test_a_job_without_a_stage_has_an_empty_timeline() -> None:
    assert timeline(events((3, "end", "", ""))).to_json() == {
        "seconds": 0.0,
        "stages": (),
        "servers": (),
    }

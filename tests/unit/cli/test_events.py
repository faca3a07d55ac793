"""`skyctl events --follow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.cli.events import followed
from skyctl.core.recorded import RecordedFleet
from skyctl.core.requests import EventQuery
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState


@pytest.mark.parametrize(
    ("before", "lines", "shown"), [(3, 0, []), (3, 2, ["1", "2"]), (0, 2, []), (0, 0, [])]
)
async def test_every_event_that_comes_is_followed_whatever_was_shown_first(
    tmp_path: Path, before: int, lines: int, shown: list[str]
) -> None:
    paths = FleetPaths(tmp_path, "demo").prepare()
    with FleetState(paths.database) as state:
        for number in range(before):
            state.add_event("fleet", str(number))
        events = followed(RecordedFleet(paths, state), EventQuery(lines), poll_s=0.0)
        assert [event.message for event in await anext(events)] == shown
        assert not await anext(events)
        for batch in (["a", "b", "c"], ["d"]):
            for message in batch:
                state.add_event("fleet", message)
            assert [event.message for event in await anext(events)] == batch
        await events.aclose()

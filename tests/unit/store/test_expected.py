"""Expected digests in the state file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from skyctl.store import expected_digests
from skyctl.store.expected import BrokenReload, ExpectedDigest, Learned
from skyctl.store.state import FleetState


@pytest.fixture
def state(tmp_path: Path) -> Iterator[FleetState]:
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        yield state


def learned(*digests: ExpectedDigest, broken: BrokenReload | None = None) -> dict[str, object]:
    return Learned(list(digests), broken).to_json()


def test_what_was_learned_is_read_back_by_another_connection(state: FleetState) -> None:
    digests = (
        ExpectedDigest("bytes:1", "0.32.0", "ab:v2-tp2"),
        ExpectedDigest("files:2", "0.32.0", "cd:v2-tp2", "launch"),
    )
    state.expected.learn(learned(*digests, broken=BrokenReload("layout", "0.32.0", "moe")))
    state.expected.launched("a", "files:2")
    with FleetState(state.path) as other:
        known = other.expected.everything()
        assert set(known.digests) == set(digests)
        assert known.broken == (BrokenReload("layout", "0.32.0", "moe"),)
        assert other.expected.launches() == {"a": "files:2"}


def test_one_digest_is_kept_for_each_content_engine_arrangement_and_origin(
    state: FleetState,
) -> None:
    first = ExpectedDigest("bytes:1", "0.32.0", "ab:tp2")
    for digest in (
        first,
        ExpectedDigest("bytes:1", "0.32.0", "new:tp2"),
        ExpectedDigest("bytes:1", "0.32.0", "ab:tp4"),
        ExpectedDigest("bytes:1", "0.32.0", "ab:tp2", "launch"),
        ExpectedDigest("bytes:1", "0.33.0", "ab:tp2"),
    ):
        state.expected.learn(learned(digest))
    assert len(state.expected.everything().digests) == 4
    assert first not in state.expected.everything().digests


def test_what_was_not_seen_for_longest_is_forgotten(
    state: FleetState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_digests, "MOST", 3)
    for number in range(5):
        state.expected.learn(learned(ExpectedDigest(f"bytes:{number}", "0.32.0", "ab")))
        state.expected.learn(learned(ExpectedDigest("bytes:0", "0.32.0", "ab")))
    contents = {one.content for one in state.expected.everything().digests}
    assert contents == {"bytes:0", "bytes:3", "bytes:4"}


def test_it_is_undone_with_the_transaction_it_is_part_of(state: FleetState) -> None:
    def fails() -> None:
        with state.transaction():
            state.expected.learn(learned(ExpectedDigest("bytes:1", "0.32.0", "ab")))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    state.expected.launched("a", "files:1")
    assert state.expected.everything().digests == ()


def test_a_row_of_another_skyctl_is_refused(state: FleetState) -> None:
    row = {**asdict(ExpectedDigest("bytes:1", "0.32.0", "ab")), "surprise": 1}
    with pytest.raises(TypeError):
        state.expected.learn({"digests": [row]})

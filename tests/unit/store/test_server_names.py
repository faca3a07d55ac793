"""Which recorded server is which."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.store.in_doubt import InDoubt, in_doubt, put_in_doubt
from skyctl.store.server_names import Located, name_servers, normalized, record_names
from skyctl.store.state import FleetState

A, B, C, D = (f"http://10.0.0.{number}:8000" for number in range(1, 5))


def listed(*urls: str) -> list[Located]:
    return [("", url) for url in urls]


@pytest.mark.parametrize(
    ("url", "spelling"),
    [
        ("http://Gpu1.Example:80/", "http://gpu1.example"),
        ("HTTPS://gpu1:443/v1/", "https://gpu1/v1"),
        ("https://gpu1:80", "https://gpu1:80"),
        ("http://[FD00:0:0::3]:8000", "http://[fd00::3]:8000"),
    ],
)
def test_a_url_has_one_spelling(url: str, spelling: str) -> None:
    assert normalized(url) == normalized(spelling) == spelling


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        ([B, A, C], ["far-1", "far-0", "far-2"]),
        ([B, C], ["far-1", "far-2"]),
        ([D, A, B], ["far-3", "far-0", "far-1"]),
        ([A, D], ["far-0", "far-3"]),
        ([f"{B}/", "http://10.0.0.3:8000"], ["far-1", "far-2"]),
    ],
)
def test_a_listed_server_keeps_its_name_and_a_new_one_gets_a_free_one(
    urls: list[str], names: list[str]
) -> None:
    recorded = {"far-0": A, "far-1": B, "far-2": C}
    naming = name_servers("far", listed(*urls), recorded)
    assert [name for name, _ in naming.servers] == names and naming.renamed == {}


def test_records_follow_their_servers_through_exchanged_names(tmp_path: Path) -> None:
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        before = {"a": A, "b": B, "old": ""}
        state.update_servers({name: {"url": url} for name, url in before.items()})
        record = InDoubt("a", "push-1", "update", half_updated=True, thaw=True)
        put_in_doubt(state, {"a": record})
        recorded = {row.name: row.url for row in state.servers()}
        record_names(state, name_servers("far", [("a", B), ("b", C), ("old", D)], recorded))
        now = {row.name: row.url for row in state.servers()}
        assert now == {"a": B, f"a@{A}": A, "b": C, "old": D, "old@": ""}
        assert list(in_doubt(state)) == [f"a@{A}"]
        record_names(state, name_servers("far", [("a", A)], now))
        assert {row.url: row.name for row in state.servers()}[A] == "a"
        assert list(in_doubt(state)) == ["a"]

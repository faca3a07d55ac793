"""The environment of children: no proxy stands between the parts of a fleet."""

from __future__ import annotations

import pytest

from skyctl.children import EVERY_ADDRESS, bypassing, child_environment, is_bypassed

PROXY = "http://127.0.0.1:9"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def lists(environment: dict[str, str]) -> set[str | None]:
    return {environment.get("no_proxy"), environment.get("NO_PROXY")}


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"])
@pytest.mark.parametrize("in_file", [True, False])
def test_a_child_asks_no_proxy_for_loopback(
    monkeypatch: pytest.MonkeyPatch, variable: str, in_file: bool
) -> None:
    extra = {variable: PROXY} if in_file else {}
    if not in_file:
        monkeypatch.setenv(variable, PROXY)
    environment = child_environment(extra)
    assert lists(environment) == {"localhost,127.0.0.1,::1"}
    assert environment[variable] == PROXY


def test_what_the_user_excepted_stays_excepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", "example.org, 10.0.0.1")
    monkeypatch.setenv("no_proxy", "lower.org")
    router = bypassing({"no_proxy": "of.the.file"}, EVERY_ADDRESS)
    (entries,) = lists(child_environment(router))
    assert entries is not None
    assert set(entries.split(",")) == {
        *("example.org", "10.0.0.1", "lower.org", "of.the.file"),
        *("localhost", "127.0.0.1", "::1", "0.0.0.0/0", "::/0"),
    }


def test_a_wildcard_takes_the_proxies_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", "*")
    assert child_environment({})["HTTP_PROXY"] == ""


def test_without_a_proxy_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "")
    assert lists(child_environment({})) == {None}
    assert child_environment({"A": "b"})["A"] == "b"


@pytest.mark.parametrize(
    ("host", "listed", "bypassed"),
    [
        ("127.0.0.1", "localhost,127.0.0.1", True),
        ("127.0.0.1", "127.0.0.0/8", True),
        ("127.0.0.1", "localhost", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "*", True),
        ("a.example.org", ".example.org", True),
        ("a.example.org", "example.org", True),
        ("an-example.org", "example.org", False),
        ("10.1.2.3", "10.0.0.0/16", False),
        ("::1", "::1", True),
    ],
)
def test_an_exception_is_a_name_a_domain_an_address_or_a_network(
    host: str, listed: str, bypassed: bool
) -> None:
    assert is_bypassed(host, {"NO_PROXY": listed}) is bypassed

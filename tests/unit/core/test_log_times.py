"""Lines of a log by the times that they begin with."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from skyctl.core.log_times import written

LIVES = """\
── skyctl starts st-0 at 2026-12-31 23:50:00
(APIServer pid=7) INFO 12-31 23:50:02 [api_server.py:1] first
INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK
(APIServer pid=7) INFO 12-31 23:59:59 [api_server.py:1] old year
(APIServer pid=7) INFO 01-01 00:00:01 [api_server.py:1] new year
RuntimeError: no time
── skyctl starts st-0 at 2027-01-01 00:10:00
(APIServer pid=8) INFO 01-01 00:10:02 [api_server.py:1] second life
"""


def shown(path: Path, since: str, until: str | None = None, lines: int = 1000) -> list[str]:
    """The last word of each line, "──" of a mark."""
    moments = [datetime.fromisoformat(at).timestamp() for at in (since, until) if at]
    found = written(path, moments[0], moments[1] if until else None, lines=lines)
    return ["──" if line.startswith("──") else line.split()[-1] for line in found]


@pytest.mark.parametrize(
    ("since", "until", "words"),
    [
        ("2026-12-31T23:50:01", "2026-12-31T23:59:59", ["──", "first", "OK", "year"]),
        ("2026-12-31T23:55", "2027-01-01T00:05", ["──", "year", "year", "time"]),
        ("2027-01-01T00:00", None, ["──", "year", "time", "──", "life"]),
        ("2027-01-01T00:10:01", None, ["──", "life"]),
        ("2027-01-02", None, []),
        ("2026-12-31", "2026-12-31T23:50:01", ["──"]),
    ],
)
def test_a_period_has_the_mark_of_each_life_in_it(
    tmp_path: Path, since: str, until: str | None, words: list[str]
) -> None:
    (tmp_path / "st-0.log").write_text(LIVES)
    assert shown(tmp_path / "st-0.log", since, until) == words
    assert shown(tmp_path / "st-0.log", since, until, lines=1) == words[-1:]


def test_a_period_reaches_back_before_rotations(tmp_path: Path) -> None:
    lines = LIVES.splitlines(keepends=True)
    (tmp_path / "st-0.log.2").write_text("".join(lines[:2]))
    (tmp_path / "st-0.log.1").write_text("".join(lines[2:4]))
    (tmp_path / "st-0.log").write_text("".join(lines[4:]))
    words = ["──", "first", "OK", "year", "year", "time", "──", "life"]
    assert shown(tmp_path / "st-0.log", "2026-12-31T23:50:01") == words


def test_the_zone_of_a_log_shows_in_its_first_time(tmp_path: Path) -> None:
    """The router writes UTC; a late first line is not another zone."""
    log = tmp_path / "router.log"
    log.write_text(
        "── skyctl starts router at 2026-11-28 12:00:00\n"
        "2026-11-28 03:00:01  INFO vllm_router_rs::server: elsewhere\n"
        "2026-11-28 03:30:00  INFO vllm_router_rs::server: later\n"
        "── skyctl starts router at 2026-11-28 13:00:00\n"
        "2026-11-28 13:20:00  INFO vllm_router_rs::server: here\n"
    )
    assert shown(log, "2026-11-28T12:29", "2026-11-28T12:31") == ["──", "later"]
    assert shown(log, "2026-11-28T13:19") == ["──", "here"]

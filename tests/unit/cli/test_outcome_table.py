"""What the table of a fan-out lists."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from skyctl.output import outcome_table


def shown(outcomes: list[dict[str, Any]]) -> list[str]:
    written = io.StringIO()
    Console(file=written, width=80).print(outcome_table(outcomes))
    return [line.rstrip() for line in written.getvalue().splitlines()]


def outcome(number: int, status: str = "ok", detail: str = "") -> dict[str, Any]:
    return {"server": f"s-{number}", "status": status, "elapsed_ms": 5.0, "detail": detail}


def test_a_few_servers_are_listed_one_by_one() -> None:
    lines = shown([outcome(number) for number in range(64)])
    assert [line.split()[0] for line in lines] == ["SERVER", *(f"s-{n}" for n in range(64))]


def test_of_many_servers_those_with_something_to_say_are_listed() -> None:
    many = [outcome(number) for number in range(98)]
    odd = [outcome(98, "timeout", "no answer in 5 s"), outcome(99, detail="was paused already")]
    lines = shown(many + odd)
    assert [line.split()[0] for line in lines[:-1]] == ["SERVER", "s-98", "s-99"]
    assert lines[-1] == "98 servers ok (--json lists them)"
    assert shown(many) == lines[-1:]

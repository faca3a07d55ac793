"""Logs are rotated, and read across a rotation."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.cli import logs as logs_command
from skyctl.engines.logs import tail
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.local import rotation
from skyctl.launch.local.rotation import rotate
from skyctl.store.paths import FleetPaths
from skyctl.supervisor.daemon import look_after_logs
from tests.unit.launch.logs import numbers


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_as_many_copies_are_kept_as_asked_for(tmp_path: Path, keep: int) -> None:
    log = tmp_path / "a.log"
    for number in range(6):
        log.write_text(f"line {number}\n" * 10)
        assert rotate(log, 10, keep)
        assert log.read_text() == ""
    kept = sorted(path.name for path in tmp_path.glob("*.log.*"))
    assert kept == [f"a.log.{number}" for number in range(1, keep + 1)]
    for number in range(1, keep + 1):
        assert numbers(rotation.earlier(log, number))[0] == 6 - number
    log.write_text("small")
    assert not rotate(log, 10, keep) and not rotate(tmp_path / "none.log", 10, keep)


def test_the_end_of_a_log_is_read_across_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\ntwo\n")
    rotate(log, 1, keep=1)
    log.write_text("three\n")
    assert tail(log, 2) == ["two", "three"]
    assert tail(log, 1) == ["three"] and tail(log, 0) == []
    assert tail(log, 9) == ["one", "two", "three"]


def test_who_follows_a_log_misses_nothing_when_it_is_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Printer(logs_command.LinePrinter):
        def print(self, name: str, line: str) -> None:
            seen.append(line)

    seen: list[str] = []
    log, printer = tmp_path / "a.log", Printer([])
    log.write_text("one\n")
    position = logs_command._print_new(printer, "a", log, 0, False)
    with log.open("a") as more:
        more.write("two\n")
    rotate(log, 1, keep=1)
    position = logs_command._print_new(printer, "a", log, position, False)
    with log.open("a") as more:
        more.write("three\n")
    logs_command._print_new(printer, "a", log, position, False)
    assert seen == ["one", "two", "three"]


async def test_each_log_of_a_fleet_is_looked_after_as_its_file_says(tmp_path: Path) -> None:
    paths = FleetPaths(tmp_path, "a").prepare()
    for name in ("a-0", "router", "supervisor", "guardian"):
        paths.log(name).write_bytes(b"x" * 2000)
    paths.log("a-1").write_bytes(b"x" * 1000)
    config = FleetConfig.model_validate(
        {"name": "a", "model": "m", "logs": {"max_size": "1500B", "keep": 1}}
    )
    await look_after_logs(paths, config)
    sizes = {path.name: path.stat().st_size for path in paths.logs.glob("*.log")}
    assert sizes.pop("a-1.log") == 1000 and set(sizes.values()) == {0}


async def test_logs_of_a_hundred_thousand_pushes_stay_within_their_bound(tmp_path: Path) -> None:
    """A push writes some 2 KB to a server's log; they are looked at between any thousand."""
    paths = FleetPaths(tmp_path, "a").prepare()
    logs = {"max_size": "1MiB", "keep": 2}
    config = FleetConfig.model_validate({"name": "a", "model": "m", "logs": logs})
    lines = b"INFO weights were updated, and the prefix cache was reset: 0123456789\n" * 30_000
    sizes = []
    for _ in range(100):
        for name in ("a-0", "supervisor"):
            with paths.log(name).open("ab") as log:
                log.write(lines)
        await look_after_logs(paths, config)
        sizes.append(sum(path.stat().st_size for path in paths.logs.iterdir()))
    assert max(sizes) == sizes[-1] <= 2 * config.logs.keep * len(lines)
    assert len(list(paths.logs.iterdir())) == 2 * (1 + config.logs.keep)

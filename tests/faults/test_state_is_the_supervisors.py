"""While a supervisor lives, no command opens its state file: everything goes through its API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.store.paths import FleetPaths
from tests.faults.stub_fleet import StubFleet

# imported by every Python of these commands; the supervisor itself is left alone
_WATCH = """
import sys, os
def watch(event, arguments):
    if event == "sqlite3.connect" and "state.sqlite" in str(arguments[0]):
        with open({log!r}, "a") as log:
            log.write(" ".join(sys.argv) + "\\n")
if "skyctl.supervisor" not in " ".join(sys.orig_argv):
    sys.addaudithook(watch)
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path_factory.mktemp("fleet"))
    fleet.write(replicas=1)
    fleet.run("up")
    yield fleet
    fleet.run("down")


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["status", "--exit-code"],
        ["status", "--fleet", "stubs"],
        ["pause"],
        ["resume"],
        ["jobs"],
        ["weights"],
        ["weights", "history"],
        ["weights", "kept"],
        ["urls"],
        ["plan"],
        ["validate"],
        ["wait"],
        ["top", "--once"],
        ["recover", "--dry-run"],
        ["scale", "1"],
        ["up"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_a_command_leaves_the_state_file_to_the_supervisor(
    fleet: StubFleet, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "opened"
    (tmp_path / "sitecustomize.py").write_text(_WATCH.format(log=str(log)))
    process = fleet.start(*command, path=tmp_path)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (0, 1), stderr
    assert not log.exists(), log.read_text()


def test_the_watch_sees_one_that_does(tmp_path: Path) -> None:
    """The state of a fleet that is down is read: no supervisor could be asked."""
    other = StubFleet(tmp_path)
    other.write(name="other")
    directory = FleetPaths(tmp_path / "home", "other").prepare().directory
    (directory / "state.sqlite").touch(mode=0o600)
    log = tmp_path / "opened"
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(_WATCH.format(log=str(log)))
    process = other.start("jobs", path=tmp_path / "watch")
    process.communicate(timeout=60)
    assert log.exists()

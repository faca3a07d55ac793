"""Names, states and versions stay whole in every table of every command, however narrow the
terminal is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.faults.stub_fleet import StubFleet
from tests.unit.push.checkpoints import write_checkpoint

NAME = "policy-of-the-second-run"
LABEL = "step-000200-with-a-long-label"
SERVERS = (f"{NAME}-0", f"{NAME}-1")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubFleet]:
    """Two stub servers after a push whose label is long."""
    fleet = StubFleet(tmp_path_factory.mktemp("narrow"))
    fleet.write(name=NAME, extra="weight_transfer: {transport: disk}")
    write_checkpoint(fleet.directory / "step")
    fleet.run("up")
    fleet.run("sync-weights", "step", "--keep", "--weight-version", LABEL)
    yield fleet
    fleet.run("down")


TABLES = {
    "status": (*SERVERS, "ready", LABEL),
    "ls": (NAME, LABEL),
    "top --once --interval 0.2": (*SERVERS, "ready", LABEL),
    "plan": SERVERS,
    "up --dry-run": (NAME,),
    "recover --dry-run": SERVERS,
    "pause": (*SERVERS, "ok"),
    "resume": (*SERVERS, "ok"),
    "jobs": ("push-1", "succeeded"),
    "jobs show push-1": (*SERVERS, LABEL),
    "sync-weights step --dry-run": (*SERVERS, LABEL),
    "weights": (*SERVERS, LABEL),
    "weights history": ("push-1", LABEL),
    "weights verify": (*SERVERS, LABEL),
    "weights kept": (LABEL,),
    "rollout": (),
    "events": ("push-1", LABEL),
}


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("command", TABLES)
def test_a_table_has_whole_names_states_and_versions(
    fleet: StubFleet, command: str, width: int
) -> None:
    fleet.environ = {"COLUMNS": str(width)}
    shown = fleet.run(*command.split()).stdout
    assert not re.search(r"\w…", shown)
    for text in TABLES[command]:
        assert text in re.split(r"[\s,:]+", shown), shown

"""Ranks of a trainer, servers, and the supervisor die at every step of a live push: by a file in
memory, and point to point."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.faults.live_deaths import RANK_DEATHS, SUPERVISOR_DEATHS, Deaths, errors
from tests.faults.live_ranks import ROWS, Job, Way, forking_ranks
from tests.faults.stub_fleet import ROOT, StubFleet
from tests.pids import gone
from tests.unit.push.checkpoints import filled, write_checkpoint

pytest.importorskip("torch")
REPEATED = int(os.environ.get("SKYCTL_TEST_DEATHS", "1"))
"""How often each death is tried: 20 for a report."""


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deaths]:
    directory = tmp_path_factory.mktemp("deaths")
    stubs = StubFleet(directory)
    stubs.write(extra="auth: none")  # tests tell a server where to die
    write_checkpoint(directory / "model", {"w": filled([ROWS, 4], 1)})
    env = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
    env |= {"SKYCTL_HOME": str(directory / "home"), "PYTHONPATH": str(ROOT)}
    stubs.run("up")
    try:
        with forking_ranks(directory / "fleet.yaml", env) as ranks:
            fleet = Deaths(stubs, ranks)
            fleet.goes_on()
            yield fleet
    finally:
        stubs.run("down")


@pytest.mark.parametrize("_", range(REPEATED))
@pytest.mark.parametrize(("way", "point", "rank"), RANK_DEATHS)
def test_a_rank_dies_and_the_others_name_it_and_the_fleet_is_whole(
    deaths: Deaths, way: Way, point: str, rank: int, _: int
) -> None:
    deaths.rank_dies(way, point, rank)


@pytest.mark.parametrize("_", range(REPEATED))
@pytest.mark.parametrize("step", ["map", "stage", "arrived", "load"])
def test_a_server_dies_point_to_point_and_every_rank_learns_of_it(
    deaths: Deaths, step: str, _: int
) -> None:
    deaths.goes_on("gloo")
    cut, before = deaths.next_version(), deaths.version
    doomed = deaths.fleet.replicas()["stubs-1"]
    url = f"{doomed['url']}/stub/faults"
    httpx.post(url, json={"dies_at": step}, trust_env=False).raise_for_status()
    ended = deaths.ranks.run(Job((cut,), way="gloo"))
    assert gone(doomed["pid"], within_s=1.0), "it has not died"
    assert len({row.error for row in ended}) == 1 and "stubs-1" in ended[0].error, ended
    assert not any(row.killed for row in ended), ended
    # in the freeze the other server has the new weights, which the dead one gets from it
    assert deaths.settled({cut} if step == "load" else {before})
    deaths.goes_on("gloo")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_after_a_while(deaths: Deaths, rank: int) -> None:
    good, cut = deaths.next_version(), deaths.next_version()
    job = Job((good, cut), rank=rank, point="rank.begun", stops=True, patience_s=2.0)
    for error in errors(deaths.ranks.run(job), rank):
        named = f"rank {rank} has not come to push {cut} within 2.0 s"
        assert error == f"RankFailed: {named}", error
    assert deaths.settled({good}) == good
    deaths.goes_on()


@pytest.mark.parametrize("_", range(REPEATED))
@pytest.mark.parametrize("point", SUPERVISOR_DEATHS)
def test_the_supervisor_dies_and_every_rank_learns_of_it(
    deaths: Deaths, point: str, _: int
) -> None:
    deaths.supervisor_dies(point)


def test_servers_of_any_machine_let_go_of_a_trainer_that_is_killed_between_pushes(
    deaths: Deaths,
) -> None:
    """They do not see its process: what they notice is the end of a connection."""
    good, cut = deaths.next_version(), deaths.next_version()
    job = Job((good, cut), ranks=1, rank=0, point="rank.begun", way="gloo")
    urls = [replica["url"] for replica in deaths.fleet.replicas().values()]
    before = [_state(url)["places_taken"] for url in urls]
    assert deaths.ranks.run(job)[0].killed
    assert [_state(url)["places_taken"] for url in urls] == [taken + 1 for taken in before]
    until = time.monotonic() + deaths.settle_s
    while trainers := [_state(url)["trainer"] for url in urls if _state(url)["trainer"]]:
        assert time.monotonic() < until, trainers
        time.sleep(0.1)
    assert deaths.settled({good}) == good
    deaths.goes_on("gloo")


def _state(url: str) -> Any:
    return httpx.get(f"{url}/stub/state", trust_env=False).raise_for_status().json()


def test_ranks_that_are_not_there_any_more_leave_the_fleet_to_others(deaths: Deaths) -> None:
    """A trainer that is killed as a whole keeps neither the fleet's lock nor its files."""
    job = Job((deaths.next_version(), deaths.next_version()), ranks=1, rank=0, point="rank.placed")
    assert deaths.ranks.run(job)[0].killed
    deaths.goes_on()
    before: Any = deaths.staged()
    assert len(before) == 1

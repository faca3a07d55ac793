"""Ranks of a trainer, servers, and the supervisor die at every step of a live push: by a file in
memory, and point to point."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from skyctl.core.registry import supervisor_running
from skyctl.kill_points import RANK
from skyctl.store.paths import FleetPaths
from skyctl.supervisor.client import listening
from tests.faults.live_ranks import ROWS, Client, Ended, Job, Way, forking_ranks
from tests.faults.stub_fleet import ROOT, StubFleet
from tests.pids import gone, kill
from tests.unit.push.checkpoints import filled, write_checkpoint

pytest.importorskip("torch")
REPEATED = int(os.environ.get("SKYCTL_TEST_DEATHS", "1"))
"""How often each death is tried: 20 for a report."""
SETTLE_S = 20.0
WAYS: tuple[Way, ...] = ("auto", "gloo", "apart")
_APART = ("rank.read", "rank.sending", "rank.answered")
DEATHS = [
    (way, point, rank)
    for way in WAYS
    for point in RANK
    for rank in (0, 1)
    if (point, rank) != ("rank.started", 1) and (way, point) != ("auto", "rank.sending")
    if way != "apart" or point in _APART
]
SUPERVISOR = (
    *("push.begun", "push.prepared", "push.pause.call", "push.update.call"),
    *("push.update.done", "push.verify.done", "push.published", "push.recorded"),
)


@dataclass
class Deaths:
    """A fleet of stubs under a supervisor, and jobs that push into it."""

    stubs: StubFleet
    ranks: Client
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    held: str = ""
    """The version that the fleet has now."""

    def version(self) -> str:
        return f"step-{next(self.numbers)}"

    def settled(self, allowed: set[str]) -> str:
        """The one version of these that all servers come to, healthy."""
        until = time.monotonic() + SETTLE_S
        while True:
            status = self.stubs.json("status")["data"]
            rows = self.stubs.json("weights")["data"]["servers"]
            versions = {row["version"] for row in rows}
            whole = len(versions) == 1 and versions <= allowed
            if status["health"] == "healthy" and whole and not any(r["quarantine"] for r in rows):
                assert self.stubs.json("weights", "verify")["data"]["agree"] is True
                return str(versions.pop())
            assert time.monotonic() < until, (status, rows)
            time.sleep(0.1)

    def supervisor(self) -> int:
        """Its pid; 0 without one."""
        paths = FleetPaths(self.stubs.home or self.stubs.directory / "home", "stubs")
        return listening(paths) if supervisor_running(paths) else 0

    def revive_supervisor(self, *, kill_at: str) -> None:
        """End the supervisor, and have a command start one that dies at this point."""
        kill(self.supervisor())
        self.stubs.environ["SKYCTL_KILL_AT"] = kill_at
        self.stubs.run("status")
        del self.stubs.environ["SKYCTL_KILL_AT"]

    def goes_on(self, way: Way = "auto") -> None:
        """The next job pushes as if nothing had been, and leaves a single version in memory."""
        version = self.version()
        ended = self.ranks.run(Job((version,), way=way))
        assert [(row.pushed, row.error) for row in ended] == [((version,), "")] * 3, ended
        self.held = self.settled({version})
        until = time.monotonic() + SETTLE_S
        while len(entries := self.staged()) > 1:
            assert time.monotonic() < until, entries
            time.sleep(0.05)

    def staged(self) -> list[str]:
        """The weights from memory that are kept."""
        home = self.stubs.home or self.stubs.directory / "home"
        directory = home / "fleets" / "stubs" / "weights"
        return sorted(entry.name for entry in directory.iterdir() if entry.is_dir())


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


def errors(ended: list[Ended], victim: int) -> list[str]:
    assert all(not row.killed for row in ended if row.rank != victim), ended
    return [row.error for row in ended if row.rank != victim]


@pytest.mark.parametrize("_", range(REPEATED))
@pytest.mark.parametrize(("way", "point", "rank"), DEATHS)
def test_a_rank_dies_and_the_others_name_it_and_the_fleet_is_whole(
    deaths: Deaths, way: Way, point: str, rank: int, _: int
) -> None:
    good, cut = deaths.version(), deaths.version()
    job = Job((good, cut), rank=rank, point=point, way=way)
    ended = deaths.ranks.run(job)
    assert ended[rank].killed, ended
    over = point == "rank.answered"  # the others may have their answers already
    for error in errors(ended, rank):
        named = f"RankFailed: rank {rank} ({'at' if way == 'apart' else 'pid'} "
        assert error.startswith(named) or (over and not error), ended
    # once rank 0 has begun it, the supervisor carries it out
    allowed = {cut} if over else {good, cut} if point == "rank.started" else {good}
    deaths.held = deaths.settled(allowed)
    deaths.goes_on(way)


@pytest.mark.parametrize("_", range(REPEATED))
@pytest.mark.parametrize("step", ["map", "stage", "arrived", "load"])
def test_a_server_dies_point_to_point_and_every_rank_learns_of_it(
    deaths: Deaths, step: str, _: int
) -> None:
    deaths.goes_on("gloo")
    cut, before = deaths.version(), deaths.held
    doomed = deaths.stubs.replicas()["stubs-1"]
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
    good, cut = deaths.version(), deaths.version()
    job = Job((good, cut), rank=rank, point="rank.begun", stops=True, patience_s=2.0)
    for error in errors(deaths.ranks.run(job), rank):
        named = f"rank {rank} has not come to push {cut} within 2.0 s"
        assert error == f"RankFailed: {named}", error
    assert deaths.settled({good}) == good
    deaths.goes_on()


@pytest.mark.parametrize("_", range(REPEATED))
@pytest.mark.parametrize("point", SUPERVISOR)
def test_the_supervisor_dies_and_every_rank_learns_of_it(
    deaths: Deaths, point: str, _: int
) -> None:
    cut, before = deaths.version(), deaths.held
    deaths.revive_supervisor(kill_at=point)
    doomed = deaths.supervisor()
    ended = deaths.ranks.run(Job((cut,)))
    assert deaths.supervisor() != doomed, "it has not died"
    told = {row.error for row in ended}
    assert len(told) == 1, "every rank is told the same"
    assert not any(row.killed for row in ended), ended
    deaths.held = deaths.settled({before, cut})
    if not told.pop():
        assert deaths.held == cut
    deaths.goes_on()


def test_servers_of_any_machine_let_go_of_a_trainer_that_is_killed_between_pushes(
    deaths: Deaths,
) -> None:
    """They do not see its process: what they notice is the end of a connection."""
    good, cut = deaths.version(), deaths.version()
    job = Job((good, cut), ranks=1, rank=0, point="rank.begun", way="gloo")
    urls = [replica["url"] for replica in deaths.stubs.replicas().values()]
    with ThreadPoolExecutor(1) as pool:
        pushing, joined = pool.submit(deaths.ranks.run, job), set[str]()
        while not pushing.done():
            joined |= {url for url in urls if _state(url)["trainer"]}
    assert pushing.result()[0].killed and joined == set(urls)
    until = time.monotonic() + SETTLE_S
    while trainers := [_state(url)["trainer"] for url in urls if _state(url)["trainer"]]:
        assert time.monotonic() < until, trainers
        time.sleep(0.1)
    assert deaths.settled({good}) == good
    deaths.goes_on("gloo")


def _state(url: str) -> Any:
    return httpx.get(f"{url}/stub/state", trust_env=False).raise_for_status().json()


def test_ranks_that_are_not_there_any_more_leave_the_fleet_to_others(deaths: Deaths) -> None:
    """A trainer that is killed as a whole keeps neither the fleet's lock nor its files."""
    job = Job((deaths.version(), deaths.version()), ranks=1, rank=0, point="rank.placed")
    assert deaths.ranks.run(job)[0].killed
    deaths.goes_on()
    before: Any = deaths.staged()
    assert len(before) == 1

"""Deaths in a live push, and what must hold after each: of ranks at every step, of servers, of the
supervisor. For tests on stubs, and for `benchmarks.live_deaths` on real servers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from skyctl.core.registry import supervisor_running
from skyctl.kill_points import RANK
from skyctl.store.paths import FleetPaths
from skyctl.supervisor.client import listening
from tests.faults.live_ranks import Client, Ended, Job, Way
from tests.faults.stub_fleet import StubFleet
from tests.pids import kill

WAYS: tuple[Way, ...] = ("auto", "gloo", "apart")
_APART = ("rank.read", "rank.sending", "rank.answered")
RANK_DEATHS = [
    (way, point, rank)
    for way in WAYS
    for point in RANK
    for rank in (0, 1)
    if (point, rank) != ("rank.started", 1) and (way, point) != ("auto", "rank.sending")
    if way != "apart" or point in _APART
]
SUPERVISOR_DEATHS = (
    *("push.begun", "push.prepared", "push.pause.call", "push.update.call"),
    *("push.update.done", "push.verify.done", "push.published", "push.recorded"),
)


@dataclass
class Deaths:
    """A fleet under a supervisor, and jobs that push into it."""

    fleet: StubFleet
    """By its commands; its servers may be real."""
    ranks: Client
    settle_s: float = 20.0
    """How long servers may take until all are well."""
    models: tuple[str, ...] = ()
    """See `Job`."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    version: str = ""
    """What the fleet has now."""

    def next_version(self) -> str:
        return f"step-{next(self.numbers)}"

    def run(self, *versions: str, way: Way = "auto", ranks: int = 3) -> list[Ended]:
        """A job that nothing befalls by itself."""
        return self.ranks.run(Job(versions, ranks, way=way, models=self.models))

    def settled(self, allowed: set[str]) -> str:
        """The one version of these that all servers come to, healthy."""
        until = time.monotonic() + self.settle_s
        while True:
            status = self.fleet.json("status")["data"]
            rows = self.fleet.json("weights")["data"]["servers"]
            versions = {row["version"] for row in rows}
            whole = len(versions) == 1 and versions <= allowed
            if status["health"] == "healthy" and whole and not any(r["quarantine"] for r in rows):
                assert self.fleet.json("weights", "verify")["data"]["agree"] is True
                self.version = str(versions.pop())
                return self.version
            assert time.monotonic() < until, (status, rows)
            time.sleep(0.1)

    def goes_on(self, way: Way = "auto") -> None:
        """The next job pushes as if nothing had been, and leaves a single version in memory."""
        version = self.next_version()
        ended = self.run(version, way=way)
        assert [(row.pushed, row.error) for row in ended] == [((version,), "")] * 3, ended
        self.settled({version})
        until = time.monotonic() + self.settle_s
        while len(entries := self.staged()) > 1:
            assert time.monotonic() < until, entries
            time.sleep(0.05)

    def rank_dies(self, way: Way, point: str, rank: int) -> None:
        """The others name it, and the fleet has the version before or, if it came so far, this."""
        good, cut = self.next_version(), self.next_version()
        job = Job((good, cut), rank=rank, point=point, way=way, models=self.models)
        ended = self.ranks.run(job)
        assert ended[rank].killed, ended
        over = point == "rank.answered"  # the others may have their answers already
        for error in errors(ended, rank):
            named = f"RankFailed: rank {rank} ({'at' if way == 'apart' else 'pid'} "
            assert error.startswith(named) or (over and not error), ended
        # once rank 0 has begun it, the supervisor carries it out
        started = point == "rank.started"
        self.settled({cut} if over else {good, cut} if started else {good})
        self.goes_on(way)

    def supervisor_dies(self, point: str) -> None:
        """Every rank learns the same of it."""
        cut, before = self.next_version(), self.version
        self._revive_supervisor(kill_at=point)
        doomed = self.supervisor()
        ended = self.run(cut)
        assert self.supervisor() != doomed, "it has not died"
        answers = {row.error for row in ended}
        assert len(answers) == 1, "ranks are told different things"
        assert not any(row.killed for row in ended), ended
        now = self.settled({before, cut})
        assert answers.pop() or now == cut
        self.goes_on()

    def supervisor(self) -> int:
        """Its pid; 0 without one."""
        return listening(self._paths) if supervisor_running(self._paths) else 0

    def staged(self) -> list[str]:
        """The weights from memory that are kept."""
        directory = self._paths.directory / "weights"
        return sorted(entry.name for entry in directory.iterdir() if entry.is_dir())

    @property
    def _paths(self) -> FleetPaths:
        return FleetPaths(self.fleet.home or self.fleet.directory / "home", "stubs")

    def _revive_supervisor(self, *, kill_at: str) -> None:
        """End the supervisor, and have a command start one that dies at this point."""
        kill(self.supervisor())
        self.fleet.environ["SKYCTL_KILL_AT"] = kill_at
        self.fleet.run("status")
        del self.fleet.environ["SKYCTL_KILL_AT"]


def errors(ended: list[Ended], victim: int) -> list[str]:
    """What ended the other ranks."""
    assert all(not row.killed for row in ended if row.rank != victim), ended
    return [row.error for row in ended if row.rank != victim]

"""Every death of docs/how-to/ssh.md and ray.md, again and again, on a stub fleet over two machines.

    python -m benchmarks.machine_deaths --way ssh [--rounds 20] [--write]
    python -m benchmarks.machine_deaths --way ray [--only node head] [--minutes 20]

The machines are loopback addresses of this one: ssh is a script, the Ray cluster a real one. A seed
decides which of the two servers it hits, and when. From the death on, all servers are counted
several times a second: never more than one for a replica. The fleet is whole again once both are
ready at the fleet's weights and routed, each with one agent, keeper and connection; the same
process where the server outlives it, another where not. Then the router must list those two, and
nothing may answer at the address of one that was replaced. After the last `down` no process, record
or file of a server may be left, and nothing reserved.

Deaths that need a fleet or a cluster of their own come last. Seconds count from the death until the
fleet is whole; what is away on purpose meanwhile counts too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.eject import status_of
from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.core.registry import select
from skyctl.core.status import FleetStatus, ReplicaStatus
from skyctl.errors import SkyctlError
from tests.faults.ray_fleet import HEAD, RayCluster, RayFleet, running_cluster
from tests.faults.remote_fleet import ADDRESSES, RemoteFleet
from tests.faults.ssh_fleet import SshFleet
from tests.faults.stub_fleet import ROOT

RESULTS = Path(__file__).parent / "results"
WHOLE_S = 120.0
SHORT_GRACE_S = 10.0
BACK_AFTER_S = 7200.0
AWAY_S = 3.0  # more than a tether waits before it asks again
_POLL_S = 0.1
_COUNT_S = 0.2


@dataclass
class Death:
    """One way to die, and what it came to in each round."""

    name: str
    seconds: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        known = sorted(self.seconds)
        return {
            "rounds": len(known),
            "violations": self.violations,
            "median_s": round(statistics.median(known), 2) if known else None,
            "worst_s": round(known[-1], 2) if known else None,
            "seconds": [round(one, 2) for one in self.seconds],
        }


class Census:
    """Counts the servers that run, from its beginning to its end."""

    def __init__(self, fleet: RemoteFleet) -> None:
        self.most = 0
        self._fleet = fleet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __enter__(self) -> Census:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _count(self) -> None:
        while not self._over.wait(_COUNT_S):
            self.most = max(self.most, len(servers(self._fleet)))


def servers(fleet: RemoteFleet) -> set[int]:
    return {one.pid for address in (*ADDRESSES, HEAD) for one in fleet.servers(address)}


class Subject:
    """A fleet that is up, and what is true of it whenever it is whole."""

    def __init__(self, fleet: RemoteFleet, addresses: Iterable[str] = ADDRESSES) -> None:
        self.fleet = fleet
        self.addresses = tuple(addresses)
        self._ref = select([fleet.directory / "fleet.yaml"], None)

    def status(self) -> FleetStatus:
        return asyncio.run(status_of(self._ref))

    def rows(self) -> dict[str, ReplicaStatus]:
        return {row.name: row for row in self.status().replicas}

    def address(self, name: str) -> str:
        return (self.rows()[name].node or "").removeprefix(self.fleet.user)

    def lacks(self, before: dict[str, ReplicaStatus], replaced: set[str]) -> list[str]:
        """Why it is not whole yet; of the replicas `replaced` another process must serve."""
        try:
            now = self.rows()
        except SkyctlError as error:
            return [f"status: {error.message}"]
        found = [
            f"{name} is {row.state}, {'' if row.routed else 'not '}routed: {row.reason}"
            for name, row in now.items()
            if row.state != "ready" or not row.routed or row.reason
        ]
        for name, row in now.items():
            if (row.pid != before[name].pid) is not (name in replaced):
                found.append(f"{name} has pid {row.pid}, before {before[name].pid}")
            if row.reported_version != before[name].reported_version:
                found.append(f"{name} has weights {row.reported_version}")
        if servers(self.fleet) != {row.pid for row in now.values()}:
            found.append(f"servers {servers(self.fleet)}")
        kinds = {"agents": self.fleet.agents, "keepers": self.fleet.keepers}
        for kind, of in {**kinds, "connections": self.fleet.connections}.items():
            if (count := sum(len(of(address)) for address in self.addresses)) != len(now):
                found.append(f"{count} {kind}")
        return found

    def until_whole(self, before: dict[str, ReplicaStatus], replaced: set[str]) -> list[str]:
        """Wait until it is; what lacks when it does not become so."""
        deadline = time.monotonic() + WHOLE_S
        while lacking := self.lacks(before, replaced):
            if time.monotonic() > deadline:
                return [f"not whole after {WHOLE_S:g} s: {'; '.join(lacking)}"]
            time.sleep(_POLL_S)
        return []

    def wrong(self, before: dict[str, ReplicaStatus], replaced: set[str]) -> Iterator[str]:
        """What is not as it must be, although it is whole."""
        status = self.status()
        now = {row.name: row for row in status.replicas}
        urls = {row.url for row in now.values()}
        for name in replaced:
            pid, url = before[name].pid, before[name].url
            if lives(pid):
                yield f"{name}: {pid} runs on"
            if url not in urls and answers(url):
                yield f"{name}: {url} answers"
        for name in set(now) - replaced:
            if now[name].restarts != before[name].restarts:
                yield f"{name} was restarted: {now[name].restart_reason}"
        assert status.router is not None
        listed = httpx.get(f"{status.router.url}/list_workers", trust_env=False).json()["urls"]
        if set(listed) != urls:
            yield f"the router lists {listed}"
        if isinstance(self.fleet, RayFleet) and replaced:
            groups = self.fleet.cluster.groups()
            if len(groups) != len(now):
                yield f"reserved: {groups}"

    def supervisor(self) -> psutil.Process:
        pid = self.status().supervisor_pid
        assert pid is not None
        return psutil.Process(pid)

    def kill_here(self) -> None:
        """This machine is gone: nothing is left of what the fleet has here."""
        home = str(self.fleet.directory / "home")
        while here := [
            *(one for one in psutil.process_iter() if environ(one).get("SKYCTL_HOME") == home),
            *(one for address in self.addresses for one in self.fleet.connections(address)),
        ]:
            kill(here)
            time.sleep(_POLL_S)


def lives(pid: int | None) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # its keeper may be gone, too
    except psutil.Error:
        return False


def answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=2, trust_env=False)
    except httpx.HTTPError:
        return False
    return True


def environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.pid != os.getpid() else {}
    except psutil.Error:
        return {}


def kill(processes: Iterable[psutil.Process | None]) -> None:
    for process in processes:
        if process is not None and process.is_running():
            process.kill()


# --- deaths: each hits the server `name`, and says which replicas get another process ------------


def _one(found: Callable[[Subject, str], Iterable[psutil.Process | None]], *, ends: bool) -> Kill:
    def strike(subject: Subject, name: str) -> set[str]:
        victims = list(found(subject, name))
        assert victims
        kill(victims)
        return {name} if ends else set()

    return strike


def _lost_ssh(subject: Subject, name: str) -> set[str]:
    """ssh is lost, the server answers."""
    fleet, address = subject.fleet, subject.address(name)
    assert isinstance(fleet, SshFleet)
    fleet.cut(address)
    time.sleep(AWAY_S)
    row = subject.rows()[name]
    assert (row.state, row.routed) == ("ready", True), row
    fleet.mend(address)
    return set()


def _until_unreachable(subject: Subject, name: str) -> None:
    deadline = time.monotonic() + WHOLE_S
    while (row := subject.rows()[name]).state != "unreachable" or row.routed:
        assert time.monotonic() < deadline, row
        time.sleep(_POLL_S)
    time.sleep(AWAY_S)
    others = {other for other in subject.rows().values() if other.name != name}
    assert all(other.state == "ready" and other.routed for other in others), others


def _lost_machine(subject: Subject, name: str) -> set[str]:
    """A machine answers nothing, and comes back with its servers."""
    fleet, address = subject.fleet, subject.address(name)
    assert isinstance(fleet, SshFleet)
    (server,) = fleet.servers(address)
    fleet.cut(address)
    server.send_signal(signal.SIGSTOP)
    _until_unreachable(subject, name)
    server.send_signal(signal.SIGCONT)
    fleet.mend(address)
    return set()


def _lost_machine_and_server(subject: Subject, name: str) -> set[str]:
    """The same, and its server ends meanwhile."""
    fleet, address = subject.fleet, subject.address(name)
    assert isinstance(fleet, SshFleet)
    fleet.cut(address)
    kill(fleet.servers(address))
    _until_unreachable(subject, name)
    fleet.mend(address)
    return {name}


def _lost_actor(subject: Subject, name: str) -> set[str]:
    """Its agent ends a moment later: until then the fleet looks whole."""
    agents = subject.fleet.agents(subject.address(name))
    kill(one.parent() for one in agents)
    _, left = psutil.wait_procs(agents, WHOLE_S)
    assert agents and not left, left
    return set()


def _lost_node(subject: Subject, name: str) -> set[str]:
    fleet = subject.fleet
    assert isinstance(fleet, RayFleet)
    fleet.cluster.lose(subject.address(name))
    return {name}


def _node_is_back(subject: Subject, name: str) -> None:
    """Hours later: a server on each node, and nothing is left of what died there."""
    fleet = subject.fleet
    assert isinstance(fleet, RayFleet)
    (lost,) = set(ADDRESSES) - set(fleet.cluster.raylets)
    then = time.time() - BACK_AFTER_S
    for lease in (fleet.hosts / lost).glob(".local/state/skyctl/hosted/fleets/*/lease"):
        os.utime(lease, (then, then))
    fleet.cluster.add(lost)
    fleet.run("restart", name)
    assert subject.address(name) == lost


def _drivers(fleet: RemoteFleet) -> list[psutil.Process]:
    assert isinstance(fleet, RayFleet)
    return fleet.drivers()


Kill = Callable[[Subject, str], set[str]]
DEATHS: dict[str, Kill] = {
    "server": _one(lambda s, name: s.fleet.servers(s.address(name)), ends=True),
    "agent": _one(lambda s, name: s.fleet.agents(s.address(name)), ends=False),
    "actor": _lost_actor,
    "connection": _one(lambda s, name: s.fleet.connections(s.address(name)), ends=False),
    "driver": _one(lambda s, name: _drivers(s.fleet), ends=False),
    "keeper": _one(lambda s, name: s.fleet.keepers(s.address(name)), ends=False),
    "tether": _one(lambda s, name: [s.fleet.tether(name)], ends=True),
    "supervisor": _one(lambda s, name: [s.supervisor()], ends=False),
    "ssh": _lost_ssh,
    "machine": _lost_machine,
    "machine and server": _lost_machine_and_server,
    "node": _lost_node,
}
AFTER: dict[str, Callable[[Subject, str], None]] = {"node": _node_is_back}
HERE, CUT_OFF, GONE = "supervisor's machine", "node cut off", "head"
_BOTH = ("server", "agent", "connection", "keeper", "tether", "supervisor")
WAYS = {
    "ssh": (*_BOTH, "ssh", "machine", "machine and server", HERE),
    "ray": (*_BOTH, "driver", "actor", "node", HERE, CUT_OFF, GONE),
}


def round_of(subject: Subject, death: Death, dice: random.Random) -> None:
    """One death, and what it came to."""
    before = subject.rows()
    name = dice.choice(sorted(before))
    time.sleep(dice.random())
    with Census(subject.fleet) as census:
        began = time.monotonic()
        replaced = DEATHS[death.name](subject, name)
        wrong = subject.until_whole(before, replaced)
        death.seconds.append(time.monotonic() - began)
    wrong = wrong or list(subject.wrong(before, replaced))
    if census.most > len(before):
        wrong.append(f"{census.most} servers at once")
    note(death, f"{name}: ", wrong)
    if death.name in AFTER:
        AFTER[death.name](subject, name)


def note(death: Death, what: str, wrong: Iterable[str]) -> None:
    for one in wrong:
        death.violations.append(f"round {len(death.seconds)}, {what}{one}")
        sys.stderr.write(f"{death.name}, {death.violations[-1]}\n")


def down(subject: Subject) -> Iterator[str]:
    """The last `down`, and what it left."""
    fleet = subject.fleet
    fleet.run("down")
    time.sleep(1)  # a process that has just ended
    if left := [*fleet.everything(), *(c for a in subject.addresses for c in fleet.connections(a))]:
        yield f"left running: {left}"
    home = str(fleet.directory / "home")
    if left := [one for one in psutil.process_iter() if environ(one).get("SKYCTL_HOME") == home]:
        yield f"left running here: {left}"
    hosted = [(fleet.hosts / one / ".local/state/skyctl/hosted/fleets") for one in ADDRESSES]
    files = [*(file for place in hosted if place.exists() for file in place.iterdir())]
    if files := [*files, *(fleet.directory / "home/remote").glob("*")]:
        yield f"left behind: {files}"
    if isinstance(fleet, RayFleet) and (groups := fleet.cluster.groups()):
        yield f"left reserved: {groups}"


@contextmanager
def made(way: str, cluster: RayCluster | None, **options: Any) -> Iterator[RemoteFleet]:
    """A fleet that is laid out, with a state directory of its own."""
    with tempfile.TemporaryDirectory(prefix="deaths-") as directory:
        fleet = RayFleet(Path(directory), cluster) if cluster else SshFleet(Path(directory))
        assert (way == "ray") is isinstance(fleet, RayFleet)
        fleet.lay_out(**options)
        file = Path(directory) / "fleet.yaml"
        often = "{max_restarts: 100000, backoff_s: 0.05, backoff_max_s: 2}"
        text = file.read_text().replace("{backoff_s: 0.05, backoff_max_s: 2}", often)
        assert often in text
        file.write_text(text)
        home = f"{directory}/home"
        modules = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        os.environ.update({"PYTHONPATH": modules, **fleet.environ, "SKYCTL_HOME": home})
        try:
            yield fleet
        finally:
            fleet.end()


def usual(way: str, cluster: RayCluster | None, deaths: list[Death], until: Until) -> None:
    """Deaths that one fleet outlives, in turn."""
    with made(way, cluster) as fleet:
        fleet.run("up")
        checkpoint = make_tiny_checkpoint(fleet.directory / "tiny", seed=1)
        fleet.run("sync-weights", str(checkpoint))
        subject, dice = Subject(fleet), random.Random(0)
        while not until(deaths):
            for death in deaths:
                round_of(subject, death, dice)
        note(deaths[-1], "down: ", down(subject))


def here_dies(way: str, cluster: RayCluster | None, death: Death, until: Until) -> None:
    """Seconds until nothing of the fleet runs on any machine."""
    with made(way, cluster, grace_s=SHORT_GRACE_S) as fleet:
        subject = Subject(fleet)
        while not until([death]):
            fleet.run("up")  # the records of the round before are settled first
            urls = [row.url for row in subject.rows().values()]
            began = time.monotonic()
            subject.kill_here()
            while (left := fleet.everything()) and time.monotonic() < began + WHOLE_S:
                time.sleep(_POLL_S)
            death.seconds.append(time.monotonic() - began)
            note(death, "", [f"{one} runs on" for one in left])
            note(death, "", [f"{url} answers" for url in urls if answers(url)])
            hosted = [fleet.hosts / one / ".local/state/skyctl/hosted/fleets" for one in ADDRESSES]
            note(death, "", [f"{file} is left" for place in hosted for file in place.iterdir()])
        fleet.run("up")
        note(death, "down: ", down(subject))


def node_is_cut_off(cluster: RayCluster, death: Death, until: Until) -> None:
    """Ray loses a node whose server runs on: another takes its place, it ends by itself, and is
    not routed meanwhile. Seconds until it has ended and the fleet is whole."""
    with made("ray", cluster, grace_s=SHORT_GRACE_S) as fleet:
        fleet.run("up")
        subject = Subject(fleet)
        while not until([death]):
            fleet.run("restart", "stubs-1")
            before, lost = subject.rows(), subject.address("stubs-1")
            began = time.monotonic()
            cluster.raylets.pop(lost).kill()
            wrong = subject.until_whole(before, {"stubs-1"})
            death.seconds.append(time.monotonic() - began)
            note(death, "", wrong or subject.wrong(before, {"stubs-1"}))
            cluster.add(lost)
        note(death, "down: ", down(subject))


def head_dies(death: Death, until: Until) -> None:
    """The head of a cluster that has no other node: its server goes on, and is taken over by the
    cluster that is started in its place. Seconds until the fleet is whole."""
    cluster = RayCluster()
    try:
        cluster.begin(nodes=())
        with made("ray", cluster, replicas=1, head=True) as fleet:
            fleet.run("up")
            subject = Subject(fleet, [HEAD])
            while not until([death]):
                before = subject.rows()
                began = time.monotonic()
                kill(one for one in cluster.processes() if one.name() == "gcs_server")
                kill(fleet.connections(HEAD))
                time.sleep(AWAY_S)
                (row,) = subject.rows().values()
                serves = (row.state, row.pid, row.routed) == ("ready", before[row.name].pid, True)
                note(death, "", [] if serves and row.reason else [f"without its head: {row}"])
                kill([cluster.raylets.pop(HEAD)])
                cluster.begin(nodes=())
                wrong = subject.until_whole(before, set())
                death.seconds.append(time.monotonic() - began)
                note(death, "", wrong or subject.wrong(before, set()))
                before = subject.rows()
                fleet.run("restart", "stubs-0")  # reserved again
                note(death, "restarted: ", subject.wrong(before, {"stubs-0"}))
            note(death, "down: ", down(subject))
    finally:
        cluster.end()


Until = Callable[[list[Death]], bool]


def _result(way: str, deaths: dict[str, Death]) -> dict[str, Any]:
    return {
        "way": way,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "load": round(os.getloadavg()[2], 1),
        },
        "replicas": 2,
        "violations": sum(len(death.violations) for death in deaths.values()),
        "deaths": {name: death.to_json() for name, death in deaths.items()},
    }


def main() -> int:
    """Exit status 1 when something was violated."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine_deaths")
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", help="these deaths")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no round after that")
    parser.add_argument("--write", action="store_true", help="keep the result, round by round")
    parser.add_argument("--go-on", action="store_true", help="where that left off")
    options = parser.parse_args()
    names = [name for name in WAYS[options.way] if not options.only or name in options.only]
    out = RESULTS / f"machine-deaths-{options.way}.json"
    before = json.loads(out.read_text())["deaths"] if options.go_on and out.exists() else {}
    deaths = {
        name: Death(name, row.get("seconds", []), row.get("violations", []))
        for name, row in ((name, before.get(name, {})) for name in WAYS[options.way])
    }
    deadline = time.monotonic() + options.minutes * 60

    def until(some: list[Death]) -> bool:
        enough = all(len(death.seconds) >= options.rounds for death in some)
        if options.write:
            out.write_text(json.dumps(_result(options.way, deaths), indent=1) + "\n")
        return enough or time.monotonic() > deadline

    of_all = options.way == "ray" and set(names) != {GONE}
    with running_cluster() if of_all else nullcontext() as cluster:
        if among := [deaths[name] for name in names if name in DEATHS]:
            usual(options.way, cluster, among, until)
        if HERE in names:
            here_dies(options.way, cluster, deaths[HERE], until)
        if CUT_OFF in names and cluster is not None:
            node_is_cut_off(cluster, deaths[CUT_OFF], until)
    if GONE in names:
        head_dies(deaths[GONE], until)
    result = _result(options.way, deaths)
    print(f"{'death':<22}{'rounds':>8}{'violations':>12}{'median s':>10}{'worst s':>9}")
    for name, row in result["deaths"].items():
        spread = f"{row['median_s'] or '–':>10}{row['worst_s'] or '–':>9}"
        print(f"{name:<22}{row['rounds']:>8}{len(row['violations']):>12}{spread}")
    if options.write:
        out.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())

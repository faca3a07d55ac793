"""A real Ray cluster of three nodes on this machine, and a stub fleet on it.

The head is at an address of its own and carries no server; each node has a home of its own, by
which what runs there is found. All of it asks for a token.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from skyctl.launch.local.host import free_port
from skyctl.store.processes import SPAWN_VARIABLE
from tests.faults.remote_fleet import (
    ADDRESSES,
    GRACE_S,
    RemoteFleet,
    below,
    end_machine,
    environ_of,
    kill_all,
    words,
)
from tests.faults.stub_fleet import ROOT

HEAD = "127.0.0.4"
TOKEN = "t" * 32
_MARK = "SKYCTL_RAY_CLUSTER"  # in the environment of all that it starts
_START_S = 120.0
_TRIES = 3  # on a busy machine a node gives up by itself now and then
_PORTS = (
    *("node-manager-port", "object-manager-port", "runtime-env-agent-port"),
    *("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "metrics-export-port"),
)

_GROUPS = """
import json, sys, ray
from ray.util import placement_group_table
ray.init(sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)
groups = placement_group_table().values()
print(json.dumps([one["name"] for one in groups if one["state"] != "REMOVED"]))
"""


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def why_no_cluster() -> str:
    """Of tests that kill parts of a cluster: starting one takes most of a minute."""
    if not has_ray():
        return "ray is not installed"
    return "" if os.environ.get("SKYCTL_TEST_RAY") else "needs SKYCTL_TEST_RAY=1"


def modules_path() -> str:
    """PYTHONPATH of whatever needs Ray, wherever it is installed."""
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None
    return f"{ROOT}:{Path(found.origin).parents[1]}"


class RayCluster:
    """A head and nodes, each with two CPUs; nodes have two GPUs, which do not exist, unless the
    `environs` of the nodes name those that do.
    """

    def __init__(
        self,
        *,
        open_to_all: bool = False,
        gpus: int = 2,
        environs: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._mode = "disabled" if open_to_all else "token"
        self._gpus = gpus
        self._environs = environs or {}
        self.directory = Path(tempfile.mkdtemp(prefix="skyray", dir="/tmp"))  # sockets: short
        self.hosts = self.directory / "hosts"
        (self.directory / "token").write_text(TOKEN)
        self.port = free_port(HEAD)
        self.address = f"{HEAD}:{self.port}"
        self.raylets: dict[str, psutil.Process] = {}
        self.environ = {
            "PYTHONPATH": modules_path(),
            "RAY_AUTH_TOKEN_PATH": str(self.directory / "token"),
        }

    def begin(self, nodes: Sequence[str] = ADDRESSES) -> None:
        """Start the head and the nodes."""
        self._until_there(HEAD, self._node(HEAD))
        starting = {address: self._node(address) for address in nodes}
        for address, node in starting.items():
            self._until_there(address, node)

    def add(self, address: str) -> None:
        """A node, again."""
        self._until_there(address, self._node(address))

    def lose(self, address: str) -> None:
        """A machine is gone: its raylet, everything that runs there, and their shared memory."""
        kill_all([self.raylets.pop(address)])
        end_machine(self.hosts / address)

    def processes(self) -> list[psutil.Process]:
        """All that the cluster started, and what those did."""
        mark = str(self.directory)
        return [one for one in psutil.process_iter() if environ_of(one).get(_MARK) == mark]

    def groups(self) -> list[str]:
        """The names of what is reserved."""
        found = subprocess.run(
            [sys.executable, "-c", _GROUPS, self.address, HEAD],
            env={**os.environ, **self.environ, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == 0, found.stderr
        return [str(name) for name in json.loads(found.stdout.splitlines()[-1])]

    def end(self) -> None:
        """Kill what is left, and leave no file."""
        found: set[psutil.Process] = set()
        for raylet in self.raylets.values():
            found.update(below(raylet))  # workers rewrite what is told of them
        deadline = time.monotonic() + 30
        while left := {*self.processes(), *(one for one in found if one.is_running())}:
            kill_all(left)
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        shutil.rmtree(self.directory)

    def _node(self, address: str) -> subprocess.Popen[str]:
        if address == HEAD:
            only = ("--head", f"--port={self.port}", "--num-gpus=0", "--include-dashboard=false")
            return self._starting(HEAD, *only, f"--temp-dir={self.directory}/r")
        return self._starting(address, f"--address={self.address}", f"--num-gpus={self._gpus}")

    def _starting(self, address: str, *arguments: str) -> subprocess.Popen[str]:
        home = self.hosts / address
        home.mkdir(parents=True, exist_ok=True)
        ports = [f"--{name}={free_port(address)}" for name in _PORTS]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *ports]
        command += [f"--node-ip-address={address}", "--num-cpus=2", "--disable-usage-stats"]
        command += ["--object-store-memory=80000000"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SKYCTL_", "RAY_"))}
        environ |= {**self.environ, "HOME": str(home), _MARK: str(self.directory)}
        environ |= {"RAY_AUTH_MODE": self._mode, "RAY_memory_monitor_refresh_ms": "0"}
        environ |= {"RAY_enable_worker_prestart": "0"}
        # of 15, which servers inherit: beside whatever else runs here they would stand still
        environ |= {"RAY_worker_niceness": "0", **self._environs.get(address, {})}
        log = (self.directory / f"{address}.log").open("a")
        return subprocess.Popen(
            command, env=environ, text=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def _until_there(self, address: str, starting: subprocess.Popen[str]) -> None:
        for _ in range(_TRIES):
            if starting.wait(_START_S) == 0:
                (self.raylets[address],) = [
                    one
                    for one in self.processes()
                    if one.name() == "raylet" and f"--node_ip_address={address}" in words(one)
                ]
                return
            starting = self._node(address)
        raise AssertionError((self.directory / f"{address}.log").read_text())


@contextlib.contextmanager
def running_cluster(**options: Any) -> Iterator[RayCluster]:
    """A cluster with all its nodes; nothing of it is left afterwards."""
    cluster = RayCluster(**options)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()


class RayFleet(RemoteFleet):
    """A fleet over the two nodes of a cluster."""

    launcher = "ray"

    def __init__(self, directory: Path, cluster: RayCluster) -> None:
        super().__init__(directory, environ=dict(cluster.environ))
        self.cluster = cluster

    @property
    def hosts(self) -> Path:
        return self.cluster.hosts

    @property
    def section(self) -> dict[str, Any]:
        """Where the nodes are, for the fleet file."""
        return {"address": self.cluster.address}

    def lose(self, address: str) -> None:
        self.cluster.lose(address)

    def lay_out(
        self, replicas: int = 2, *, grace_s: float = GRACE_S, more: str = "", **ray: object
    ) -> None:
        """Write the fleet file; `ray` is laid over its section, `more` are lines of the rest."""
        section = {**self.section, "python": f"{self.directory}/python"}
        section_json = json.dumps({**section, "orphan_grace_s": grace_s, **ray})
        self.write_remote(replicas, f"launcher: ray\nray: {section_json}\n{more}")
        file = self.directory / "fleet.yaml"
        text = file.read_text().replace("startup_timeout_s: 20", "startup_timeout_s: 60")
        file.write_text(text)

    def connections(self, address: str) -> list[psutil.Process]:
        return [
            one
            for one in psutil.process_iter()
            if "skyctl.launch.ray.client" in words(one)
            and any(self.cluster.address in word for word in words(one))
            and (address in words(one) or self._chosen_for(one) == address)
        ]

    def drivers(self) -> list[psutil.Process]:
        """The process that all connections go through."""
        names = {word for one in self.connections(ADDRESSES[0]) for word in words(one)}
        return [
            one
            for one in psutil.process_iter()
            if "skyctl.launch.ray.driver" in words(one) and names.intersection(words(one)[-2:-1])
        ]

    def _chosen_for(self, connection: psutil.Process) -> str:
        """The node that a connection has gone on to, by the record of the tether that holds it."""
        with contextlib.suppress(psutil.Error, OSError):
            token = environ_of(connection.parent()).get(SPAWN_VARIABLE)
            record = json.loads((self.directory / f"home/remote/{token}.json").read_text())
            return str(record["node"]["target"])
        return ""

    def _is_ours(self, process: psutil.Process) -> bool:
        return "skyctl.launch.remote.agent" in words(process) or "--port" in words(process)

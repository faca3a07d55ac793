"""A fleet inside a Slurm allocation: a cluster of two nodes that are this machine, each with a home
of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.attached_fleet import free_port
from tests.faults.ssh_fleet import SshFleet
from tests.faults.stub_fleet import ROOT

NODES = ("n1", "n2")
_SBIN = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
_PROGRAMS = {name: shutil.which(name, path=_SBIN) for name in ("munged", "slurmctld", "slurmd")}
_START_S = 20.0
_CONFIG = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={directory}/munge.sock
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
PartitionName=main Nodes=ALL Default=YES OverSubscribe=YES
"""
_NODE = "NodeName={name} NodeHostname=localhost NodeAddr={address} Port={port} CPUs=2\n"


class SlurmFleet(SshFleet):
    """A fleet over the nodes of one job; both are reached at 127.0.0.1."""

    user = ""
    addresses = NODES

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._slurm = directory / "slurm"
        self.environ = {"SLURM_CONF": str(self._slurm / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def section(self) -> dict[str, Any]:
        """The nodes and what reaches them, for the fleet file."""
        srun = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={host}"]
        its_own = ["env", f"HOME={self.hosts}/{{host}}", f"PYTHONPATH={ROOT}"]
        return {"hosts": NODES, "command": [*srun, *its_own, "sh", "-c"]}

    def begin(self) -> None:
        """Start the cluster and a job that has all of it; without, the test is skipped."""
        munge = self._slurm / "munge"
        for directory in (self._slurm / "state", munge, *(self.hosts / name for name in NODES)):
            directory.mkdir(parents=True)
        (munge / "key").write_bytes(os.urandom(64))
        (munge / "key").chmod(0o400)
        files = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self._start("munged", "-F", "--force", f"--socket={self._slurm}/munge.sock", *options)
        settings = {"port": free_port(), "user": getpass.getuser(), "directory": self._slurm}
        config = _CONFIG.format(**settings)
        for index, name in enumerate(NODES):
            config += _NODE.format(name=name, address=f"127.0.0.{index + 2}", port=free_port())
        (self._slurm / "slurm.conf").write_text(config)
        self._start("slurmctld", "-D")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name)
        deadline = time.monotonic() + _START_S
        while "SLURM_JOB_ID" not in self.environ:
            said = self._do("salloc", "--no-shell", "--immediate=5", "--nodes=2")
            if "Granted" in said:
                self.environ["SLURM_JOB_ID"] = said.split()[-1]
            if any(one.poll() is not None for one in self._daemons) or time.monotonic() > deadline:
                pytest.skip(f"Slurm does not start: {said} {self._said()}")

    def end_cluster(self) -> None:
        if job := self.environ.get("SLURM_JOB_ID"):
            self._do("scancel", job)
            deadline = time.monotonic() + _START_S
            while self._do("squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(_START_S)

    def _start(self, name: str, *arguments: str) -> None:
        program = _PROGRAMS[name]
        assert program is not None
        with (self._slurm / f"{name}.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen([program, *arguments], env=self._inherited(), stderr=log)
            )

    def _do(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._inherited(), capture_output=True, text=True, timeout=_START_S
        )
        return done.stdout + done.stderr

    def _inherited(self) -> dict[str, str]:
        return {**os.environ, **self.environ}

    def _said(self) -> str:
        return " ".join(log.read_text()[-300:] for log in self._slurm.glob("*.log"))


@contextmanager
def running_slurm(directory: Path) -> Iterator[SlurmFleet]:
    """A fleet that is not laid out yet; nothing of Slurm is left afterwards."""
    if not all(_PROGRAMS.values()):
        pytest.skip("there is no Slurm on this machine")
    fleet = SlurmFleet(directory)
    try:
        fleet.begin()
        yield fleet
    finally:
        fleet.end_cluster()

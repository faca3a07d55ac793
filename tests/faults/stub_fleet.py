"""The real `skyctl` on a fleet file whose `python` starts stubs instead of vLLM and its router."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.forked import NETWORK
from tests.forking import command

ROOT = Path(__file__).parents[2]
ROUTER = Path(sys.executable).parent / "vllm-router"
FAKE_ROUTER = ROOT / "tests" / "unit" / "supervisor" / "fake_router.py"
# Stands in for an interpreter that has vLLM; `-P -c` is the check for that, answered with nothing.
INTERPRETER = f"""#!/bin/sh
export PYTHONPATH={ROOT}:$PYTHONPATH
case "$2" in
*.headless) shift 2; exec {sys.executable} -m tests.stub.follower "$@" ;;
vllm_router*) shift 2; exec {sys.executable} {FAKE_ROUTER} "$@" ;;
vllm*|*.serve) shift 2; exec {sys.executable} -m tests.stub.server "$@" ;;
esac
case "$3" in skyctl*) exec {sys.executable} "$@" ;; esac
"""


def stands_for(words: Sequence[str]) -> list[str]:
    """What `INTERPRETER` makes of these arguments, for what is forked (tests/forked.py); nothing
    where it starts nothing."""
    _, second, third, *_ = [*words, "", "", ""]
    if second.endswith(".headless"):
        return [sys.executable, "-m", "tests.stub.follower", *words[2:]]
    if second.startswith("vllm_router"):
        return [sys.executable, str(FAKE_ROUTER), *words[2:]]
    if second.startswith("vllm") or second.endswith(".serve"):
        return [sys.executable, "-m", "tests.stub.server", *words[2:]]
    return [sys.executable, *words] if third.startswith("skyctl") else []


_FLEET = """
name: {name}
model: ./model
python: ./python
device: cpu
replicas: {replicas}
health: {{interval_s: 0.2, timeout_s: 2, startup_timeout_s: 20}}
restart: {{backoff_s: 0.05}}
drain_timeout_s: 1
stop_timeout_s: 5
env: {{STUB_FAULTS: '{faults}'}}
{extra}
"""


@dataclass
class StubFleet:
    """A fleet file in `directory`; commands run there with a state directory of their own."""

    directory: Path
    home: Path | None = None
    environ: dict[str, str] = field(default_factory=dict)  # more for its commands
    network: int | None = None  # the process in whose network namespace its commands run
    bound_s: float = 60.0  # of each of its commands

    def write(
        self, replicas: int = 2, faults: str = "{}", extra: str = "", name: str = "stubs"
    ) -> None:
        """Write the fleet file; `faults` are those of every stub, `extra` more YAML lines."""
        (self.directory / "model").mkdir(exist_ok=True)
        (self.directory / "model" / "config.json").write_text("{}")
        interpreter = self.directory / "python"
        interpreter.write_text(INTERPRETER)
        interpreter.chmod(0o755)
        text = _FLEET.format(name=name, replicas=replicas, faults=faults, extra=extra)
        (self.directory / "fleet.yaml").write_text(text)

    def start(
        self, *arguments: str, path: Path | None = None, stdin: int | IO[str] = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """One command; modules in `path` come before others."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
        home = self.home or self.directory / "home"
        modules = ":".join(str(each) for each in (path, ROOT, environ.get("PYTHONPATH")) if each)
        if self.network is not None:
            environ[NETWORK] = str(self.network)
        # what is imported is decided already where commands are forked
        return (subprocess.Popen[str] if path else command)(
            [sys.executable, "-m", "skyctl", *arguments],
            cwd=self.directory,
            env={**environ, "SKYCTL_HOME": str(home), "PYTHONPATH": modules, **self.environ},
            text=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(
        self,
        *arguments: str,
        expect: int | None = 0,
        stdin: int | IO[str] = subprocess.DEVNULL,
    ) -> subprocess.CompletedProcess[str]:
        """One command to its end, within `bound_s`."""
        process = self.start(*arguments, stdin=stdin)
        stdout, stderr = process.communicate(timeout=self.bound_s)
        assert expect in (None, process.returncode), (
            f"exit {process.returncode}\n{stdout}\n{stderr}"
        )
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def json(self, *arguments: str, expect: int = 0) -> dict[str, Any]:
        """The envelope of one command."""
        envelope: dict[str, Any] = json.loads(self.run(*arguments, "--json", expect=expect).stdout)
        return envelope

    def replicas(self) -> dict[str, dict[str, Any]]:
        rows = self.json("status")["data"]["replicas"]
        return {row["name"]: row for row in rows}


def until_said(process: subprocess.Popen[str], words: str) -> None:
    """Read a command's progress until it says `words`."""
    assert process.stderr is not None
    while line := process.stderr.readline():
        if words in line:
            return
    raise AssertionError(f"it ended without saying {words!r}")


def versions(fleet: StubFleet) -> set[str]:
    rows = fleet.replicas().values()
    assert {(row["state"], row["routed"]) for row in rows} == {("ready", True)}
    return {row["weight_version"] for row in rows}


def busy(fleet: StubFleet) -> subprocess.Popen[str]:
    """A request that would go on for minutes, once it runs."""
    asking = fleet.start("generate", "hello", "--server", "stubs-0", "--max-tokens", "100000")
    while not any(row["running"] for row in fleet.replicas().values()):
        assert asking.poll() is None, asking.communicate()
    return asking


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def routed_fleet(directory: Path, extra: str, replicas: int) -> StubFleet:
    """A fleet of stubs whose router is the real one."""
    fleet = StubFleet(directory)
    fleet.write(replicas=replicas, extra=extra)
    stands_in = f"vllm_router*) shift 2; exec {sys.executable} {FAKE_ROUTER}"
    assert stands_in in INTERPRETER
    interpreter = INTERPRETER.replace(stands_in, f"vllm_router*) exec {sys.executable}")
    (directory / "python").write_text(interpreter)
    return fleet

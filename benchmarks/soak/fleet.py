"""The fleet under test, real or of stubs, its state disk, and the commands that are typed at it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from skyctl.core.registry import supervisor_running
from skyctl.errors import SkyctlError
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.client import listening

_ROOT = Path(__file__).parents[2]
_SETTINGS = """
restart: {{backoff_s: 0.2, backoff_max_s: 2, max_restarts: 1000}}
drain_timeout_s: 2
weight_transfer: {{transport: shm, update_timeout_s: 30}}
router: {{request_timeout_s: {bound_s:g}}}
"""
_REPLICAS = ("- {name: whole}", "- {name: copies, data_parallel_size: 2}")
_UP_S = 1200.0
"""Eleven processes import vLLM on a busy machine."""
_DISK = "48m"


@dataclass(frozen=True)
class Done:
    """A command that ended: its exit code (None: cut off), envelope and duration in seconds."""

    code: int | None
    envelope: dict[str, Any]
    took_s: float
    said: str = ""

    @property
    def data(self) -> dict[str, Any]:
        return self.envelope.get("data") or {}

    @property
    def bug(self) -> bool:
        """It ended in an error that is none of skyctl's own."""
        return "Traceback" in self.said or "a bug in skyctl" in self.said


class SoakFleet:
    """Two servers and a router in `directory`, with a state directory of their own; one of two real
    servers has two data-parallel ranks.

    `transports` are those a push can take; `base` is the version that a server has before the first
    push. `has_disk`: the state is on a disk of its own, which can be filled.
    """

    def __init__(self, directory: Path, *, stub: bool, bound_s: float) -> None:
        self.directory, self.stub, self.bound_s = directory, stub, bound_s
        self.home = directory / "home"
        self.name = "stubs" if stub else "soak"
        self.paths = FleetPaths(self.home, self.name)
        self.transports = ("shm",) if stub else ("shm", "shm", "gloo", "disk")
        self.base = "base" if stub else "a"
        self.urls: dict[str, str] = {}
        self.router_url = ""
        self.model = ""
        self.api_key = ""
        self.has_disk = False
        self._filler = self.home / "filler"

    @property
    def env(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
        modules = f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"
        return {**inherited, "SKYCTL_HOME": str(self.home), "PYTHONPATH": modules}

    async def prepare(self) -> None:
        """Write the fleet's files and its disk. Raises SkyctlError where that fails."""
        self.home.mkdir(mode=0o700)
        self.has_disk = _mounted(self.home)
        if self.stub:
            self._write_stubs()
        else:
            done = await self.command("init", "--tiny", ".", "--name", self.name, timeout_s=120)
            _expect(done, "init")

    async def up(self, *, model: str = "a", servers: int = 2) -> None:
        """Start servers on a checkpoint. Raises SkyctlError when they do not come up."""
        settings = _SETTINGS.format(bound_s=self.bound_s)
        if not self.stub:
            groups = "\n".join(_REPLICAS[:servers])
            settings += f"model: {self.checkpoint(model)}\nreplicas:\n{groups}\n"
            settings += f"health: {{startup_timeout_s: {_UP_S:g}}}\n"
        file = self.directory / "fleet.yaml"
        file.write_text(_without_keys(file.read_text(), settings) + settings)
        _expect(await self.command("up", timeout_s=_UP_S), "up")
        urls = _expect(await self.command("urls"), "urls")
        shown = _expect(await self.command("urls", "--show-key"), "urls --show-key")
        status = _expect(await self.command("status"), "status")
        self.router_url, self.model = urls["router"], urls["model"]
        self.api_key = shown.get("api_key") or ""
        self.urls = {row["name"]: row["url"] for row in status["replicas"]}

    def ranks(self, server: str) -> tuple[int | None, ...]:
        """Data-parallel ranks of a server that can be asked for; None where it has but one."""
        return (0, 1) if server.startswith("copies") else (None,)

    def save(self, version: str) -> str:
        """Write a checkpoint over the last one, into its files, as RL loops do; the directory."""
        latest = self.directory / "latest"
        latest.mkdir(exist_ok=True)
        for file in Path(self.checkpoint(version)).iterdir():
            shutil.copyfile(file, latest / file.name)
        return str(latest)

    def fill_disk(self) -> None:
        """Leave not one page of the state disk."""
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)

    def free_disk(self) -> None:
        self._filler.unlink(missing_ok=True)

    def checkpoint(self, version: str) -> str:
        return str(self.directory / "checkpoints" / version)

    def _write_stubs(self) -> None:
        from tests.faults.stub_fleet import StubFleet
        from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

        StubFleet(self.directory).write()
        write_checkpoint(self.directory / "model", tiny_tensors(1))
        for version, seed in (("a", 50), ("b", 90)):
            write_checkpoint(self.directory / "checkpoints" / version, tiny_tensors(seed))

    def spawn(self, *arguments: str) -> Any:
        """Start a command; to be awaited, gives its process."""
        return asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "skyctl", *arguments, "--json"),
            cwd=self.directory,
            env=self.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def command(self, *arguments: str, timeout_s: float = 120.0) -> Done:
        """One command to its end, or killed after `timeout_s` seconds."""
        return await self.finish(await self.spawn(*arguments), timeout_s)

    async def finish(self, process: asyncio.subprocess.Process, timeout_s: float) -> Done:
        """Wait for a command that was spawned. What it said names no directory of the machine."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return Done(None, {}, time.monotonic() - began, f"no end within {timeout_s:g} s")
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        try:
            envelope = json.loads(stdout)
        except ValueError:
            envelope = {}
        error = envelope.get("error")
        said = str(error or stderr.decode(errors="replace")).replace(str(self.directory), "DIR")
        took_s = time.monotonic() - began
        return Done(process.returncode, envelope, took_s, said if error else said[-300:])

    # --- who runs ------------------------------------------------------------------------------

    def pid_of(self, name: str) -> int | None:
        """Pid of a server or `router`, as recorded; None where none lives."""
        with FleetState(self.paths.database) as state:
            rows = {row.name: row.identity for row in state.processes()}
        identity = rows.get(name)
        return identity.pid if identity is not None and identity.alive() else None

    def engine_core_of(self, name: str) -> int | None:
        """The process below a vLLM server that computes; None for a stub."""
        pid = self.pid_of(name)
        with suppress(psutil.Error):
            for child in psutil.Process(pid).children() if pid else ():
                if "EngineCore" in " ".join(child.cmdline()):
                    return child.pid
        return None

    def supervisor(self) -> int | None:
        with suppress(OSError):
            return listening(self.paths) if supervisor_running(self.paths) else None
        return None

    def sender(self, supervisor: int) -> int | None:
        """The sender process of the push under way."""
        with suppress(psutil.Error):
            for child in psutil.Process(supervisor).children():
                if any("skyctl.transfer.sender" in word for word in child.cmdline()):
                    return child.pid
        return None

    def last_job(self) -> Any:
        """The latest job of the journal, None before the first."""
        with FleetState(self.paths.database) as state:
            jobs = state.journal.jobs(1)
        return jobs[0] if jobs else None

    def journal(self) -> list[Any]:
        """Every job with its events, oldest first."""
        with FleetState(self.paths.database) as state:
            jobs = reversed(state.journal.jobs(100_000))
            return [(job, state.journal.events(job.id)) for job in jobs]

    def processes(self) -> list[psutil.Process]:
        """Live processes of ours that carry this fleet's state directory."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                mine = process.uids().real == os.getuid() and process.pid != os.getpid()
                if mine and process.environ().get("SKYCTL_HOME") == str(self.home):
                    found.append(process)
        return found

    def copy_state(self, to: Path) -> None:
        """The state directory as it stands, with its logs and without weights, into `to`."""

        def unwanted(directory: str, names: list[str]) -> list[str]:
            paths = [Path(directory, name) for name in names]
            return [
                p.name
                for p in paths
                if p.suffix == ".safetensors" or not (p.is_dir() or p.is_file())
            ]

        shutil.copytree(self.home, to, ignore=unwanted, dirs_exist_ok=True)

    async def close(self) -> list[str]:
        """Take everything down; what still lived some seconds later, and was killed."""
        self.free_disk()
        try:
            await self.command("down", "--drain-timeout", "0", timeout_s=120)
        finally:
            deadline = time.monotonic() + 10
            left = self.processes()
            while left and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
                left = self.processes()
            said = []
            for process in left:
                with suppress(psutil.Error):
                    said.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
                    process.kill()
            if self.has_disk:
                _unmount(self.home)
        return said


def _mounted(directory: Path) -> bool:
    """Whether a small disk of its own is mounted there: not without the right to do so."""
    options = ["-t", "tmpfs", "-o", f"size={_DISK},mode=700", "tmpfs", str(directory)]
    try:
        return subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _unmount(directory: Path) -> None:
    subprocess.run(["umount", "-l", str(directory)], check=False)


def _expect(done: Done, what: str) -> dict[str, Any]:
    if done.code != 0:
        raise SkyctlError(f"`skyctl {what}` ended with {done.code}: {done.said}")
    return done.data


def _without_keys(text: str, settings: str) -> str:
    """A fleet file without the top-level keys that `settings` sets."""
    keys = tuple(line.partition(":")[0] + ":" for line in _keys(settings))
    lines, dropping = [], False
    for line in text.splitlines():
        if line and line[0] not in " -":
            dropping = line.startswith(keys)
        if not dropping:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _keys(settings: str) -> Iterator[str]:
    return (line for line in settings.splitlines() if line[:1].isalpha())

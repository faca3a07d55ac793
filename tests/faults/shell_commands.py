"""Real commands as a shell starts them, which signals stop, on servers of this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.store.stopped import is_stopped
from tests.faults.stub_fleet import ROOT
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.running import running
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

BOUND_S = 60.0
_FILE = """
name: far
servers: [{urls}]
control_timeout_s: 60
weight_transfer: {{transport: shm, update_timeout_s: 60}}
"""


@dataclass
class Attached:
    """Two stubs of this process, and real commands, as a shell starts them."""

    directory: Path
    stubs: list[StubServer]

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
        environ |= {"SKYCTL_HOME": str(self.directory / "home"), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-m", "skyctl", *arguments],
            cwd=self.directory,
            env=environ,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # as a job of a shell: SIGTSTP stops it
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    async def skyctl(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """One command to its end: exit code and envelope."""
        with self.started(*arguments, "--json") as process:
            stdout, _ = await asyncio.to_thread(process.communicate, timeout=BOUND_S)
            return process.returncode, json.loads(stdout)

    def hang(self, route: str) -> None:
        self.stubs[1].asgi.faults = {route: Fault("hang")}

    def mend(self) -> None:
        self.stubs[1].asgi.faults = {}

    @property
    def frozen(self) -> list[bool]:
        return [stub.engine.paused for stub in self.stubs]


@asynccontextmanager
async def attached(directory: Path) -> AsyncIterator[Attached]:
    write_checkpoint(directory / "v1", tiny_tensors())
    stubs = [StubServer(), StubServer()]
    async with running(stubs) as targets:
        urls = ", ".join(target.url for target in targets)
        (directory / "fleet.yaml").write_text(_FILE.format(urls=urls))
        yield Attached(directory, stubs)


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_until_stopped(process.pid, True)


def wait_until_stopped(pid: int, stopped: bool) -> None:
    """Signals arrive a moment after they were sent."""
    bound = time.monotonic() + BOUND_S
    while is_stopped(pid) is not stopped:
        assert time.monotonic() < bound
        time.sleep(0.001)

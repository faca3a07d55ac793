"""Cycles on an attached fleet: the command that pushes is killed, or its sender."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from tests.faults.killing import checks
from tests.faults.killing.commands import Commands
from tests.faults.killing.cycle import Came, Dice
from tests.faults.killing.trainer import Trainer, stub_checkpoints
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.stub.state import StubEngine
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

NAME = "far"
BOUND_S = 20.0
LEAVING_S = 5.0
_FILE = """
name: {name}
servers: [{urls}]
control_timeout_s: 5
weight_transfer: {{transport: shm, update_timeout_s: 10}}
"""


class AttachedFleet:
    """Stub servers in this process, and commands against them."""

    def __init__(
        self, directory: Path, stubs: list[StubServer], urls: list[str], overwrites: bool
    ) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.paths = FleetPaths(self.home, NAME)
        self.stubs = stubs
        self._urls = urls
        self.trainer = Trainer(stub_checkpoints(directory), overwrites=overwrites)
        self.committed: dict[str, str] = {}  # label by digest
        self._digests: dict[str, str] = {}  # by checkpoint
        (directory / "fleet.yaml").write_text(_FILE.format(name=NAME, urls=", ".join(urls)))
        self._commands = Commands(directory)

    async def prepare(self) -> None:
        """Push every checkpoint once, undisturbed: these are the committed weights."""
        for _ in self.trainer.names:
            code, _, errors = await self.skyctl("sync-weights", self.trainer.next())
            assert code == 0, errors
            [digest] = {stub.engine.digest for stub in self.stubs}
            self._digests[self.trainer.at] = digest
            self.committed[digest] = str(self.stubs[0].engine.weight_version)
        for stub in self.stubs:
            stub.engine.served.clear()

    async def skyctl(
        self, *arguments: str, kill_at: str = "", guardian: bool = False
    ) -> tuple[int, dict[str, Any], str]:
        return await asyncio.to_thread(
            self._commands.run, *arguments, kill_at=kill_at, guardian=guardian
        )

    async def cycle(self, dice: Dice) -> Came:
        """Push the other checkpoint, die on the way, recover, look at the invariants."""
        before, path = {stub.engine.digest for stub in self.stubs}, self.trainer.next()
        pushed, again = self.trainer.at, dice.again and self.trainer.overwrites
        size = str(dice.chunk_bytes)
        requests = [asyncio.create_task(self._request(url)) for url in self._urls]
        self.stubs[0].engine.fail_updates({dice.fails_at})  # 0: none
        code, _, errors = await self.skyctl(
            "sync-weights",
            path,
            "--chunk-size",
            size,
            "--transport",
            dice.transport,
            kill_at=dice.at,
            guardian=dice.guardian,
        )
        died_at = time.time()
        killed = code == -9 or (dice.point.startswith("sender.") and code != 0)
        came = Came(dice.point, dice.seed, killed, guardian=dice.guardian)
        if code not in (-9, 0) and not dice.point.startswith("sender."):
            came.violations.append(f"I6: the command ended with {code}: {errors[-200:]}")
        if code == 0:
            came.violations += self._told_truth()
        if again:
            path = self.trainer.next()
        if not (dice.guardian and code == -9 and await self._healed_by_guardian(came, again)):
            came.violations += await self._recover(again)
        self._measure(came, died_at)
        if again:
            allowed = before | {self._digests[pushed]}
            came.violations += checks.served_only(self._states(), allowed)
            came.violations += await self._push_again(path)
        came.violations += await self._look(requests)
        return came

    async def _push_again(self, path: str) -> list[str]:
        """What the trainer does next, whatever recovery could do."""
        code, envelope, errors = await self.skyctl("sync-weights", path)
        if code != 0:
            return [f"I6: the next push ended with {code}: {envelope.get('error') or errors}"]
        return self._told_truth()

    async def _recover(self, again: bool) -> list[str]:
        code, envelope, errors = await self.skyctl("recover", "--yes")
        if code == 0 and all(row["ok"] for row in envelope["data"]["recovered"]):
            return []
        _, status, _ = await self.skyctl("status")
        if again and code != 0 and status["data"]["health"] != "healthy":
            return []  # its files are gone, and that was said
        return [f"I6: recover ended with {code}: {errors[-300:]} {envelope.get('error')}"]

    async def _healed_by_guardian(self, came: Came, again: bool) -> bool:
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            with FleetState(self.paths.database) as state:
                free = not state.locks.holders("turn")
                jobs = state.journal.jobs(1)
                open_jobs = [job for job in jobs if not job.ended]
                healed = free and not open_jobs and (again or not in_doubt(state))
            if healed and not checks.of_home(self.home):
                return True
            await asyncio.sleep(0.05)
        came.violations.append("I6: the guardian did not recover")
        return False

    def _told_truth(self) -> list[str]:
        """A command that said it went well: every server is at that checkpoint's weights."""
        if {stub.engine.digest for stub in self.stubs} == {self._digests[self.trainer.at]}:
            return []
        return ["I6: exit code 0, and servers at other weights"]

    def _measure(self, came: Came, died_at: float) -> None:
        with FleetState(self.paths.database) as state:
            jobs: list[Job] = state.journal.jobs(2)
        measure(came, jobs, died_at)

    def _states(self) -> list[dict[str, Any]]:
        return [
            {
                "served": stub.engine.served,
                "paused": stub.engine.paused,
                "update_open": stub.engine.update_open,
                "half_loaded": stub.engine.half_loaded,
                "digest": stub.engine.digest,
                "weight_version": stub.engine.weight_version,
            }
            for stub in self.stubs
        ]

    async def _look(self, requests: list[asyncio.Task[int]]) -> list[str]:
        states = self._states()
        found = checks.served_only(states, self.committed)
        found += checks.at_one_version(states, self.committed)
        found += checks.state_is_whole(self.paths.database, str(states[0]["weight_version"]))
        found += await asyncio.to_thread(checks.nothing_left_soon, self.home, LEAVING_S)
        done, late = await asyncio.wait(requests, timeout=5.0)
        for task in late:
            task.cancel()
        if late or any(task.result() != 200 for task in done):
            found.append("I2: a request was not answered within 5 s of the recovery")
        for stub in self.stubs:
            stub.engine.served.clear()
            stub.engine.log.clear()
            stub.engine.update_infos.clear()
            stub.bodies.clear()
        return found

    async def _request(self, url: str) -> int:
        body = {"model": "stub", "prompt": "hello", "max_tokens": 8}
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
            return (await client.post(f"{url}/v1/completions", json=body)).status_code


def measure(came: Came, jobs: list[Job], died_at: float) -> None:
    """Read from the latest two jobs, newest first, when the death was seen and made good."""
    for job in jobs:
        if job.finished_at is None or job.finished_at < died_at - 1.0:
            continue
        if job.state == "interrupted":
            came.detected_s = max(0.0, job.finished_at - died_at)
        elif job.created_at > died_at - 0.05:
            came.pushed_s = job.finished_at - job.created_at
            came.healed_s = job.finished_at - died_at


@asynccontextmanager
async def attached_fleet(
    directory: Path, *, overwrites: bool = False, count: int = 2
) -> AsyncIterator[AttachedFleet]:
    """A prepared fleet of `count` stubs; commands and stubs end with the block.

    `overwrites`: all checkpoints are pushed from one directory (see Trainer).
    """
    model = write_checkpoint(directory / "model", tiny_tensors(1))
    stubs = [StubServer(StubEngine(model=str(model)), token_delay_s=0.005) for _ in range(count)]
    async with running(stubs) as targets:
        urls = [target.url for target in targets]
        fleet = AttachedFleet(directory, stubs, urls, overwrites)
        await fleet.prepare()
        yield fleet

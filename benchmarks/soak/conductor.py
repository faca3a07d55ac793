"""Pushes, pauses, sleeps, kills and full disks in a seeded order, and what to type after each."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.fleet import Done, SoakFleet

SETTLE_S = 180.0
PUSH_S = 150.0
_POLL_S = 0.003
_TRANSIENT = ("starting", "restarting", "stopping", "admitting")
_STAGES = ("stage", "pause", "init", "update", "finish", "verify", "resume")
# One deck: 12 pushes (4 of them killed) and 7 kills; servers are the dear ones, 40 s each.
_DECK = {
    "push": 6,
    "kill the command of a push": 2,
    "kill the sender": 1,
    "kill the supervisor of a push": 1,
    "kill the supervisor": 1,
    "kill the router": 2,
    "pause": 1,
    "sleep": 1,
    "fill the disk": 1,
    "fill the disk during a push": 1,
}
_DEAR = ("kill a server", "kill an engine core")
DEAR_EVERY_S = 100.0
"""A server is killed no more often than this, and only while all are ready."""


@dataclass
class Happened:
    """What the conductor did. `events` has one entry per step, in order.

    `recovered_s`: by kind of kill, the seconds from the kill until the fleet was healthy again.
    """

    pushes: int = 0
    pushes_by_state: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    recovered_s: dict[str, list[float]] = field(default_factory=dict)
    unsettled: list[str] = field(default_factory=list)
    failed_commands: list[str] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)


class Conductor:
    """Does one thing after another until told to stop."""

    def __init__(
        self, fleet: SoakFleet, log: Path, *, seed: int, at: str, dear_every_s: float
    ) -> None:
        self.happened = Happened()
        self._fleet, self._dice, self._at = fleet, random.Random(seed), at
        self._log = log.open("w")
        self._dear_every_s = dear_every_s
        self._dear_at = time.monotonic() - dear_every_s / 2
        self._returning: dict[str, tuple[float, str]] = {}
        self._actions: dict[str, Callable[[], Awaitable[None]]] = {
            "push": self._push,
            "kill the command of a push": self._kill_command,
            "kill the sender": self._kill_sender,
            "kill the supervisor of a push": self._kill_pushing_supervisor,
            "kill the supervisor": self._kill_idle_supervisor,
            "kill the router": self._kill_router,
            "pause": self._pause,
            "sleep": self._sleep,
            "fill the disk": self._full_disk,
            "fill the disk during a push": self._disk_fills_in_push,
        }

    def close(self) -> None:
        self._log.close()

    async def run(self, enough: Callable[[Happened], bool]) -> None:
        """Deal decks until `enough`."""
        while not enough(self.happened):
            deck = [name for name, count in _DECK.items() for _ in range(count)]
            self._dice.shuffle(deck)
            for name in deck:
                if enough(self.happened):
                    break
                await self._server_kill_if_due()
                await self._actions[name]()
                await asyncio.sleep(self._dice.random() * 0.5)

    async def end(self) -> None:
        """Wait for what is still coming back."""
        await self._settle("the end", all_ready=True)

    # --- pushes --------------------------------------------------------------------------------

    def _next_push(self) -> tuple[str, ...]:
        self._at = "a" if self._at == "b" else "b"
        self.happened.pushes += 1
        transport = self._dice.choice(self._fleet.transports)
        chunk = self._dice.choice(("64KiB", "256KiB", "1MiB"))
        label = f"{self._at}-{self.happened.pushes}"
        options = ("--transport", transport, "--chunk-size", chunk, "--weight-version", label)
        return ("sync-weights", self._fleet.save(self._at), *options)

    async def _push(self) -> None:
        done = await self._fleet.command(*self._next_push(), timeout_s=PUSH_S)
        self._note("push", done)
        await self._after_push(done)

    async def _after_push(self, done: Done | None = None) -> None:
        job = await self._job_ended()
        self.happened.pushes_by_state[job.state if job else "none"] += 1
        if done is None or done.code != 0:
            await self._settle("a push")

    async def _job_ended(self) -> Any:
        """The latest job once it is over, or as it stands when its deadline has passed."""
        deadline = time.monotonic() + PUSH_S
        while (job := self._fleet.last_job()) and not job.ended:
            if time.monotonic() > deadline or self._fleet.supervisor() is None:
                break
            await asyncio.sleep(0.1)
        return job

    async def _reached(self, before: str | None, wanted: str, process: Any) -> bool:
        """Whether the push that was just asked for came to stage `wanted` or beyond it."""
        deadline = time.monotonic() + PUSH_S
        beyond = _STAGES[_STAGES.index(wanted) :]
        while time.monotonic() < deadline and process.returncode is None:
            job = self._fleet.last_job()
            if job is not None and job.id != before:
                if job.ended:
                    return False
                if job.stage in beyond:
                    return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _during_push(
        self, kind: str, victim: Callable[[], int | None], stages: tuple[str, ...]
    ) -> Done:
        """Ask for a push, kill `victim` when it is at some stage, and wait for the command."""
        last = self._fleet.last_job()
        process = await self._fleet.spawn(*self._next_push())
        reading = asyncio.create_task(self._fleet.finish(process, PUSH_S))
        wanted = self._dice.choice(stages)
        reached = await self._reached(last.id if last else None, wanted, process)
        pid = (process.pid if kind == "command" else victim()) if reached else None
        killed = self._kill(pid, kind, f"in {wanted}")
        done = await reading
        if killed is not None:
            await self._recovered(kind, killed)
        return done

    async def _kill_command(self) -> None:
        await self._during_push("command", lambda: None, _STAGES[:5])
        await self._after_push()

    async def _kill_sender(self) -> None:
        supervisor = self._fleet.supervisor()

        def sender() -> int | None:
            return self._fleet.sender(supervisor) if supervisor else None

        await self._during_push("sender", sender, _STAGES[:4])
        await self._after_push()

    async def _kill_pushing_supervisor(self) -> None:
        supervisor = self._fleet.supervisor()
        await self._during_push("supervisor in a push", lambda: supervisor, _STAGES)
        await self._after_push()

    # --- other kills ---------------------------------------------------------------------------

    async def _kill_idle_supervisor(self) -> None:
        killed = self._kill(self._fleet.supervisor(), "supervisor", "idle")
        if killed is not None:
            await self._recovered("supervisor", killed)

    async def _kill_router(self) -> None:
        pid = self._fleet.pid_of("router")
        killed = self._kill(pid, "router", "")
        if killed is None:
            return
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            if self._fleet.pid_of("router") not in (None, pid):
                break
            await asyncio.sleep(0.1)
        await self._recovered("router", killed)

    async def _server_kill_if_due(self) -> None:
        if time.monotonic() - self._dear_at < self._dear_every_s:
            return
        status = await self._fleet.command("status")
        self._see_comebacks(status)
        rows = status.data.get("replicas", [])
        if not rows or any(row["state"] != "ready" for row in rows):
            return
        name = self._dice.choice([row["name"] for row in rows])
        core = self._fleet.engine_core_of(name)
        kind, pid = ("server", self._fleet.pid_of(name))
        if core is not None and self._dice.random() < 0.5:
            kind, pid = "engine core", core
        killed = self._kill(pid, kind, name)
        if killed is not None:
            self._dear_at = time.monotonic()
            self._returning[name] = (killed, kind)

    def _see_comebacks(self, status: Done) -> None:
        for row in status.data.get("replicas", []):
            name = row["name"]
            if name in self._returning and row["state"] == "ready":
                died_at, kind = self._returning[name]
                came_at = time.time() - (row["state_s"] or 0.0)
                if came_at < died_at:
                    continue  # nobody has noticed yet that it died
                del self._returning[name]
                self.happened.recovered_s.setdefault(kind, []).append(came_at - died_at)

    def _kill(self, pid: int | None, kind: str, where: str) -> float | None:
        """SIGKILL; when, or None where there was nobody to kill."""
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.happened.kills[kind] += 1
                self._write({"did": f"kill {kind}", "where": where, "pid": pid})
                return time.time()
        self.happened.missed[kind] += 1
        return None

    # --- freezes -------------------------------------------------------------------------------

    async def _pause(self) -> None:
        await self._frozen("pause", ("pause", "--mode", "keep"), "resume")

    async def _sleep(self) -> None:
        await self._frozen("sleep", ("sleep", "--level", "1"), "wake")

    async def _frozen(self, name: str, freeze: tuple[str, ...], thaw: str) -> None:
        done = await self._fleet.command(*freeze)
        self._note(name, done)
        await asyncio.sleep(self._dice.random())
        undone = await self._fleet.command(thaw)
        self._note(thaw, undone)
        self.happened.others[name] += 1
        if undone.code != 0:
            await self._settle(thaw)

    # --- the state disk ------------------------------------------------------------------------

    async def _full_disk(self) -> None:
        """Freeze and thaw with a full disk, maybe under a supervisor that starts on it."""
        if not self._fleet.has_disk:
            return
        self._fill("idle")
        try:
            if self._dice.random() < 0.3:
                self._kill(self._fleet.supervisor(), "supervisor", "on a full disk")
            push = self._next_push()
            refused = await self._fleet.command(*push, timeout_s=PUSH_S)
            self._note("push on a full disk", refused)
            await self._pause()
        finally:
            self._fleet.free_disk()
        await self._settle("a full disk")

    async def _disk_fills_in_push(self) -> None:
        if not self._fleet.has_disk:
            return
        last = self._fleet.last_job()
        process = await self._fleet.spawn(*self._next_push())
        reading = asyncio.create_task(self._fleet.finish(process, PUSH_S))
        try:
            wanted = self._dice.choice(_STAGES)
            if await self._reached(last.id if last else None, wanted, process):
                self._fill(f"in {wanted}")
            self._note("push that the disk fills up under", await reading)
            await asyncio.sleep(self._dice.random())
        finally:
            self._fleet.free_disk()
        await self._after_push()

    def _fill(self, where: str) -> None:
        self._fleet.fill_disk()
        self.happened.others["full disk"] += 1
        self._write({"did": "fill the disk", "where": where})

    # --- after a fault -------------------------------------------------------------------------

    async def _recovered(self, kind: str, killed_at: float) -> None:
        if await self._settle(kind):
            self.happened.recovered_s.setdefault(kind, []).append(time.time() - killed_at)

    async def _settle(self, after: str, *, all_ready: bool = False) -> bool:
        """Type what a user types until every server serves, or is on its way up again."""
        deadline = time.monotonic() + SETTLE_S
        wrong: list[str] = ["nobody answered"]
        while time.monotonic() < deadline:
            status = await self._fleet.command("status")
            self._see_comebacks(status)
            wrong = _wrong(status, all_ready)
            if not wrong:
                return True
            await self._put_right(status)
            await asyncio.sleep(0.5)
        self.happened.unsettled.append(f"after {after}: {'; '.join(wrong)}")
        return False

    async def _put_right(self, status: Done) -> None:
        rows = status.data.get("replicas", [])
        operation = status.data.get("operation") or {}
        if status.data.get("job") or (operation and not operation.get("ended_at")):
            return
        for row in rows:
            if row["state"] in ("failed", "dead", "stopped"):
                self._note("restart", await self._fleet.command("restart", row["name"]))
        if any(row["state"] == "quarantined" for row in rows) or _mixed(rows):
            done = await self._fleet.command("recover", "--yes", timeout_s=300)
            self._note("recover", done)
            if done.code in (1, 3):  # the files it needs were written over: the loop goes on
                pushed = await self._fleet.command(*self._next_push(), timeout_s=PUSH_S)
                self._note("push after a recovery in vain", pushed)
                if (
                    "asleep" in pushed.said
                ):  # as its hint says; no other wake reaches a quarantined one
                    woken = await self._fleet.command("wake", "--tags", "weights")
                    self._note("wake weights for a push", woken)
        elif any(row["state"] in ("paused", "asleep") for row in rows):
            asleep = any(row["state"] == "asleep" for row in rows)
            verb = "wake" if asleep else "resume"
            self._note(verb, await self._fleet.command(verb))

    def _note(self, what: str, done: Done) -> None:
        entry = {"did": what, "code": done.code, "took_s": round(done.took_s, 3)}
        if done.code != 0:
            entry["said"] = done.said[:300]
            self.happened.failed_commands.append(f"{what}: {done.code}: {done.said[:200]}")
            if done.bug:
                self.happened.bugs.append(f"{what}: {done.said[-300:]}")
        self._write(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        self._log.write(json.dumps({"at": time.time(), **entry}) + "\n")
        self._log.flush()


def _wrong(status: Done, all_ready: bool) -> list[str]:
    if status.code != 0 or not status.data:
        return [f"status ended with {status.code}: {status.said[:200]}"]
    accepted = ("ready",) if all_ready else ("ready", *_TRANSIENT)
    rows = status.data["replicas"]
    wrong = [f"{row['name']} is {row['state']}" for row in rows if row["state"] not in accepted]
    router = status.data.get("router") or {}
    if router.get("state") != "ready":
        wrong.append(f"the router is {router.get('state')}")
    if status.data.get("job"):
        wrong.append(f"{status.data['job']} is under way")
    if _mixed(rows):
        wrong.append("several versions")
    return wrong


def _mixed(rows: list[dict[str, Any]]) -> bool:
    return len({row["weight_version"] for row in rows if row["state"] == "ready"}) > 1

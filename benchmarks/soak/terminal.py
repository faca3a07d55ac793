"""A second terminal: somebody who types verbs at random, and knows nothing of the first."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

from benchmarks.soak.fleet import SoakFleet

_PAUSE_S = 4.0
_VERB_S = 150.0
_VERBS = {
    "status": 4,
    "pause": 3,
    "resume": 4,
    "sleep": 1,
    "wake": 3,
    "recover": 2,
    "sync-weights": 2,
}


class SecondTerminal:
    """Types one verb after the other, each as a process of its own, until stopped.

    `typed` counts them by exit code; `bugs` are those that ended in no error of skyctl's own. It
    pushes directories that nobody writes over, under labels that no other push has.
    """

    def __init__(self, fleet: SoakFleet, log: Path, *, seed: int) -> None:
        self.typed: dict[str, Counter[str]] = {}
        self.bugs: list[str] = []
        self._fleet, self._dice = fleet, random.Random(f"terminal/{seed}")
        self._log = log.open("w")
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pushes = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._type())

    async def stop(self) -> None:
        """What was typed last comes to its end first."""
        self._stop.set()
        if self._task is not None:
            await self._task
            self._log.close()
            self._task = None

    async def _type(self) -> None:
        verbs = [verb for verb, count in _VERBS.items() for _ in range(count)]
        while not self._stop.is_set():
            verb = self._dice.choice(verbs)
            done = await self._fleet.command(*self._words(verb), timeout_s=_VERB_S)
            code = "none" if done.code is None else str(done.code)
            self.typed.setdefault(verb, Counter())[code] += 1
            entry = {"at": time.time(), "typed": verb, "code": done.code, "took_s": done.took_s}
            self._log.write(json.dumps({**entry, "said": done.said[:300]}) + "\n")
            self._log.flush()
            if done.bug or done.code is None:
                self.bugs.append(f"{verb}: {done.code}: {done.said[-300:]}")
            try:
                async with asyncio.timeout(self._dice.random() * _PAUSE_S):
                    await self._stop.wait()
            except TimeoutError:
                pass

    def _words(self, verb: str) -> tuple[str, ...]:
        if verb == "pause":
            return ("pause", "--mode", self._dice.choice(("keep", "abort", "wait")))
        if verb == "recover":
            return ("recover", "--yes", "--timeout", "120")  # a server takes minutes to start
        if verb == "sync-weights":
            self._pushes += 1
            version = self._dice.choice("ab")
            label = f"{version}-second-{self._pushes}"
            return (verb, self._fleet.checkpoint(version), "--weight-version", label)
        return (verb,)

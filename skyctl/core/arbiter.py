"""Who may act on a fleet now: the one rule for verbs, pushes and recovery.

               verb   sleep   push   recover
    verb       yes    no      no     no        pause, resume
    sleep      no     no      no     no        sleep, wake
    push       no     no      no     no
    recover    no     no      no     no        its own pushes are part of it

Pauses and resumes share the fleet; the one that ends last asks the servers what to record. Whatever
else acts has it to itself, so that nobody thaws what a push has paused, and the record of a sleep
is in the order in which servers slept. Changes of processes (up, restart, scale) happen in the
supervisor alone, which does one at a time, none beside a push or a recovery, and lets verbs pass.
The admission of a restarted server is outside the rule: nobody else acts on a server that is not up
yet. `down` ends whatever goes on.

The rule is the same for attached and supervised fleets: one kernel lock in the fleet's directory
(`store/locks.py`), taken by the process that acts. Two machines that attach the same servers do not
share it.

vLLM has no fencing token: a server carries out whatever reaches it. So after a holder that died
with the lock, of a verb too, the next one waits for `LATE_S` before it acts.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from enum import Enum
from pathlib import Path

from skyctl.errors import ConflictError, SkyctlError
from skyctl.store.locks import ASKED, Holder, Lock, Locks

LOCK = "turn"
PATIENCE_S = 2.0
LATE_S = 1.0
"""How long a request of a process that died may still be on its way to a server."""
_POLL_S = 0.02

caller: ContextVar[str] = ContextVar("caller", default="")
"""The command that asked for what is being done, where another process carries it out."""


async def _listens() -> bool:
    return False


hung_up: ContextVar[Callable[[], Awaitable[bool]]] = ContextVar("hung_up", default=_listens)
"""Whether that command has gone meanwhile."""


class Act(Enum):
    """What somebody wants to do."""

    VERB = "verb"
    SLEEP = "sleep"
    PUSH = "push"
    RECOVER = "recover"

    @property
    def shared(self) -> bool:
        """Whether others may do the same at the same time."""
        return self is Act.VERB

    @classmethod
    def of_verb(cls, verb: str) -> Act:
        """What pause, resume, sleep and wake are."""
        return cls.SLEEP if verb in ("sleep", "wake") else cls.VERB


class Turn:
    """The right to act, until it is released."""

    def __init__(self, lock: Lock | None) -> None:
        self._lock = lock

    def rename(self, what: str) -> None:
        """Say more about what is being done."""
        if self._lock is not None:
            self._lock.rename(_asked(what))

    async def after_late_requests(self) -> None:
        """Wait until nothing that a holder sent before it died can reach a server any more."""
        if self._lock is not None and self._lock.after_death:
            await asyncio.sleep(LATE_S)
            self._lock.settle()

    def release(self) -> None:
        """Let others act. A second call does nothing."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Arbiter:
    """The rule, for one process that acts on one fleet."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks

    def take(self, act: Act, what: str) -> Turn:
        """The turn, now.

        Raises:
            ConflictError: somebody else acts; the message says who, and the hint what to type.
        """
        try:
            return Turn(self._locks.take(LOCK, _asked(what), shared=act.shared))
        except ConflictError:
            raise
        except SkyctlError:
            # The lock's file is made before the first push. Where it cannot be made no push is
            # under way, and what thaws must not need a disk.
            if act not in (Act.VERB, Act.SLEEP):
                raise
            return Turn(None)

    async def turn(self, act: Act, what: str, *, wait_s: float | None = None) -> Turn:
        """The turn, once whoever excludes it has ended. Only a recovery waits for a push: verbs and
        other pushes are told of it.

        Raises:
            ConflictError: a push or a recovery goes on, or somebody still acts after `wait_s`.
        """
        deadline = time.monotonic() + (PATIENCE_S if wait_s is None else wait_s)
        while True:
            try:
                turn = self.take(act, what)
                break
            except ConflictError:
                refused = act is not Act.RECOVER and self._locks.taken(LOCK)
                if refused or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_POLL_S)
        try:
            await turn.after_late_requests()
        except BaseException:
            turn.release()
            raise
        return turn

    def holders(self) -> list[Holder]:
        """Everybody who acts on the fleet now."""
        return self._locks.holders(LOCK)

    def holds(self, what: str) -> bool:
        """Whether what goes on is this job, which has the fleet to itself."""
        if any(lock.holder.subject == what for lock in self._locks.own if lock.name == LOCK):
            return True
        # who else has it costs a look at all locks of the machine, for some 10 ms
        return self._locks.taken(LOCK) and any(one.subject == what for one in self.holders())


def own_command() -> str:
    """This process's command and pid, as others should name it."""
    words = [Path(sys.argv[0]).name or "python", *sys.argv[1:]]
    return f"`{shlex.join(words)[:120]}` (pid {os.getpid()})"


def _asked(what: str) -> str:
    asked = caller.get()
    return f"{what}{ASKED}{asked}" if asked else what

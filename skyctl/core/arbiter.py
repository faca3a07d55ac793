"""Who may act on a fleet now: the one rule for verbs, pushes and recovery.

               verb   sleep   push   recover
    verb       yes    no      no     no        pause, resume
    sleep      no     no      no     no        sleep, wake
    push       no     no      no     no
    recover    no     no      no     no        its own pushes are part of it

Pauses and resumes share the fleet; the one that ends last asks the servers what to record. All
other acts have it to themselves, so that no verb thaws what a push has paused, and the record of a
sleep matches the order in which servers slept. Changes of processes (up, restart, scale) happen
only in the supervisor, which does one at a time, none beside a push or a recovery, and lets verbs
pass. The admission of a restarted server is outside the rule: no other act concerns a server that
is not up yet, and one whose weights it takes is not put to sleep meanwhile. `down` ends whatever is
going on.

The rule is the same for attached and supervised fleets: one kernel lock in the fleet's directory
(`store/locks.py`), taken by the process that acts. Fleets that list the same servers share the
servers' locks (`store/server_locks.py`), which are taken with it, by the same table. Two machines
that attach the same servers share neither.

vLLM has no fencing token: a server carries out whatever reaches it. After a holder died with the
lock (a verb's, too), the next one therefore waits for `LATE_S` before it acts. So does a supervisor
before it takes servers over, if the one before died so, or while it admitted them, without a turn.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeVar

from skyctl.errors import ConflictError, StateUnwritable
from skyctl.store.locks import ASKED, Holder, Lock, Locks
from skyctl.store.server_locks import ServerClaim, ServerLocks, Unrepaired

T = TypeVar("T")

LOCK = "turn"
PATIENCE_S = 2.0
LATE_S = 1.0
"""How long a request of a process that died may still be on its way to a server."""
_POLL_S = 0.02

caller: ContextVar[str] = ContextVar("caller", default="")
"""The command on whose behalf this process acts, if it is another process."""


async def _listens() -> bool:
    return False


hung_up: ContextVar[Callable[[], Awaitable[bool]]] = ContextVar("hung_up", default=_listens)
"""Whether that command has gone meanwhile."""


class Act(Enum):
    """A kind of act on a fleet."""

    VERB = "verb"
    SLEEP = "sleep"
    PUSH = "push"
    RECOVER = "recover"

    @classmethod
    def of_verb(cls, verb: str) -> Act:
        """The act of pause, resume, sleep and wake."""
        return cls.SLEEP if verb in ("sleep", "wake") else cls.VERB


class Turn:
    """The right to act, until released."""

    def __init__(self, lock: Lock | None) -> None:
        self._lock = lock
        self._claim: ServerClaim | None = None

    def rename(self, activity: str) -> None:
        """Describe the act more precisely."""
        for lock in self._locks():
            lock.rename(_with_caller(activity))

    def add(self, claim: ServerClaim) -> None:
        """The locks of the servers that are acted on, which are released with the turn."""
        self._claim = claim

    @property
    def keeps_others_out(self) -> bool:
        """Whether no other fleet can begin to act on the servers before it is released."""
        return self._claim is None or self._claim.complete

    @property
    def unrepaired(self) -> Mapping[str, str]:
        """Why servers are to be left as they are, by name: another fleet has to repair them."""
        return {} if self._claim is None else self._claim.unrepaired

    async def after_late_requests(self) -> None:
        """Wait until no request of a holder that died can reach a server any more."""
        after_death = [lock for lock in self._locks() if lock.after_death]
        if any(lock.may_be_late for lock in after_death):
            await asyncio.sleep(LATE_S)
        for lock in after_death:
            lock.forget_dead()

    def release(self) -> None:
        """Let others act. A second call does nothing."""
        if self._claim is not None:
            self._claim.release()
        if self._lock is not None:
            self._lock.release()

    def _locks(self) -> list[Lock]:
        servers = self._claim.locks.values() if self._claim is not None else ()
        return [lock for lock in (self._lock, *servers) if lock is not None]

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Arbiter:
    """The rule, for one process that acts on one fleet. Without `servers`, the locks of servers,
    nothing is claimed.
    """

    def __init__(self, locks: Locks, servers: ServerLocks | None = None) -> None:
        self._locks = locks
        self._servers = servers

    def take(self, act: Act, activity: str) -> Turn:
        """Take the turn, now.

        Raises:
            ConflictError: another act is under way; the message names it, the hint what to type.
            SkyctlError: the lock cannot be had, for another reason than a failing disk.
        """
        try:
            return Turn(self._locks.take(LOCK, _with_caller(activity), shared=act is Act.VERB))
        except StateUnwritable:
            # The lock's file is made before the first push. If it cannot be made, no push is under
            # way, and thawing must not need a disk.
            if act not in (Act.VERB, Act.SLEEP):
                raise
            return Turn(None)

    async def turn(
        self,
        act: Act,
        activity: str,
        *,
        servers: Mapping[str, str] | None = None,
        wait_s: float | None = None,
    ) -> Turn:
        """Take the turn, once every act that excludes it has ended. Only a recovery waits for a
        push: verbs and other pushes are refused. It also ends commands of skyctl that are stopped
        and go on holding the turn after `PATIENCE_S`. `servers` are claimed as well, as by `claim`.

        Raises:
            ConflictError: a push or a recovery is under way, or another act is after `wait_s`.
        """

        take, busy = partial(self.take, act, activity), partial(self._locks.taken, LOCK)
        turn = await self._until_free(act, take, busy, wait_s, self._end_stopped)
        try:
            await self.claim(turn, act, activity, servers or {}, wait_s=wait_s)
        except BaseException:
            turn.release()
            raise
        return turn

    async def claim(
        self,
        turn: Turn,
        act: Act,
        activity: str,
        servers: Mapping[str, str],
        *,
        wait_s: float | None = None,
        leaves_unrepaired: bool = False,
    ) -> None:
        """Lock the servers that a turn acts on, URLs by name, against other fleets. The turn
        releases them. Requests of an earlier holder that died have arrived by then.
        `leaves_unrepaired`: the act skips what `Turn.unrepaired` names.

        Raises:
            ConflictError: another fleet acts on one of them, or its push left one of them.
        """
        if self._servers is not None and servers:
            take = partial(
                self._servers.take_all,
                servers,
                _with_caller(activity),
                shared=act is Act.VERB,
                pushes=act in (Act.PUSH, Act.RECOVER),
                leaves_unrepaired=leaves_unrepaired,
            )
            busy = partial(self._servers.taken_by_push, servers)
            refuse_stopped = partial(self._servers.refuse_stopped, servers)
            turn.add(await self._until_free(act, take, busy, wait_s, refuse_stopped))
        await turn.after_late_requests()

    async def _until_free(
        self,
        act: Act,
        take: Callable[[], T],
        busy: Callable[[], bool],
        wait_s: float | None,
        meet_stopped: Callable[[], None],
    ) -> T:
        """Take a turn, or what it needs as well, as soon as it is free. `busy`: those who have it
        exclude everybody. `meet_stopped` ends those that are stopped, or refuses to wait for them.
        """
        began = time.monotonic()
        deadline = began + (PATIENCE_S if wait_s is None else wait_s)
        while True:
            try:
                return take()
            except Unrepaired:
                raise
            except ConflictError:
                refused = act is not Act.RECOVER and busy()
                if refused or time.monotonic() >= deadline:
                    raise
                if act is Act.RECOVER and time.monotonic() >= began + PATIENCE_S:
                    meet_stopped()
            await asyncio.sleep(_POLL_S)

    def holders(self) -> list[Holder]:
        """All who act on the fleet now."""
        return self._locks.holders(LOCK)

    def pushing(self) -> bool:
        """Whether a push has the turn."""
        return self._locks.taken(LOCK) and any(
            holder.subject.startswith("push-") for holder in self.holders()
        )

    def died(self) -> bool:
        """Whether the last holder died with the turn: its requests may still be on their way."""
        before = self._locks.recorded(LOCK)
        return before is not None and not (before.ended or self._locks.lives(LOCK))

    def stopped(self) -> list[Holder]:
        """Those whose process is stopped: they keep others out and do nothing."""
        return [holder for holder in self.holders() if holder.stopped]

    def _end_stopped(self) -> None:
        """End commands that keep the turn and are stopped.

        Raises:
            ConflictError: a program that uses skyctl is stopped: only its user may end it.
        """
        for holder in self.stopped():
            if not holder.end_stopped():
                raise self._locks.conflict(LOCK)

    def holds(self, job: str) -> bool:
        """Whether this job holds the turn, in a process that is not stopped: nothing is gained by
        waiting for another.
        """
        if any(lock.holder.subject == job for lock in self._locks.own if lock.name == LOCK):
            return True
        # naming another process's job means reading all locks of the machine, for some 10 ms
        return self._locks.taken(LOCK) and any(
            holder.subject == job and not holder.stopped for holder in self.holders()
        )


def own_command() -> str:
    """This process's command and pid, as shown to others."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":  # python -m PACKAGE
        program = program.parent
    words = [program.name or "python", *sys.argv[1:]]
    # an argument may be bytes that are not UTF-8: this goes into headers and databases
    typed = shlex.join(words)[:120].encode(errors="replace").decode()
    return f"`{typed}` (pid {os.getpid()})"


def _with_caller(activity: str) -> str:
    command = caller.get()
    return f"{activity}{ASKED}{command}" if command else activity

"""Locks of servers, below the state root: fleets that list the same server exclude each other.

A lock is named by the server's normalized URL (`server_names.py`). Whatever may touch a server's
weights or its pause takes the fleet's turn first and then these, in the order of their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import NamedTuple
from urllib.parse import quote

from skyctl.errors import ConflictError, StateUnwritable
from skyctl.store.locks import Lock, Locks, stopped_hint
from skyctl.store.paths import FleetPaths, private_directory
from skyctl.store.server_names import normalized

_LONGEST_NAME = 200


class Unrepaired(ConflictError):
    """Another fleet's push left this server, and that fleet has yet to repair it: do not wait."""


class Unfinished(NamedTuple):
    """What a fleet has to repair in a server that others list as well."""

    fleet: str
    """Its name."""
    reason: str
    """What its push left."""
    command: str
    """What to type."""


class ServerLocks(Locks):
    """The locks of servers, as one fleet takes them. `doubts` names the servers that this fleet
    has to repair: the file of their locks says so until it has.
    """

    directory_stands_in = False

    def __init__(
        self, paths: FleetPaths, doubts: Callable[[], Collection[str]] | None = None
    ) -> None:
        super().__init__(paths.root / "servers")
        self.fleet = paths.name
        self._root = paths.root
        self._doubts = doubts
        self._urls: dict[str, str] = {}

    def take_all(
        self,
        servers: Mapping[str, str],
        activity: str,
        *,
        shared: bool,
        pushes: bool = False,
        leaves_unrepaired: bool = False,
        kind: str = "",
    ) -> ServerClaim:
        """Lock these servers, URLs by name, now. `pushes`: it may write to their weights.
        `leaves_unrepaired`: it leaves those that another fleet has to repair as they are, and the
        claim names them. Locks of another `kind` are apart.

        Raises:
            ConflictError: another fleet has one of them, or has to repair it first (Unrepaired);
                with `leaves_unrepaired`, all of them.
            StateUnwritable: a push has no room for its lock.
        """
        if not servers:
            return ServerClaim({}, tuple)
        doubts = self._doubts() if self._doubts is not None and not pushes else ()
        names = {self._name(url, kind): name for name, url in servers.items()}
        with ExitStack() as undo:
            claim = ServerClaim({}, self._doubts or tuple)
            undo.callback(claim.release)
            for lock_name, name in sorted(names.items()):
                repairs = self._doubts is not None and (pushes or name in doubts)
                try:
                    if not claim.locks:
                        private_directory(self._directory)
                    lock = self.take(lock_name, activity, shared=shared, repairs=repairs)
                except StateUnwritable:
                    if pushes:
                        raise
                    claim.complete = False
                    continue  # a push makes the file: without it none is under way
                claim.locks[name] = lock
                if refusal := self._unrepaired_by_another(lock):
                    claim.locks.pop(name).release()  # and its file goes on to say so
                    claim.unrepaired[name] = f"{refusal.message}; {refusal.hint}"
                    if not leaves_unrepaired or len(claim.unrepaired) == len(names):
                        raise refusal
            undo.pop_all()
        return claim

    def taken_by_push(self, servers: Mapping[str, str]) -> bool:
        """Whether another process holds the lock of one of these exclusively."""
        return any(self.taken(self._name(url)) for url in servers.values())

    def refuse_stopped(self, servers: Mapping[str, str]) -> None:
        """Raise ConflictError if a command that holds the lock of one of these is stopped: only the
        recovery of its own fleet may end it.
        """
        for url in servers.values():
            name = self._name(url)
            if any(holder.stopped for holder in self.holders(name)):
                raise self.conflict(name)

    def conflict(self, name: str) -> ConflictError:
        holders = self.holders(name)
        if not holders:
            return super().conflict(name)
        holder = next((holder for holder in holders if holder.stopped), holders[0])
        of_fleet = f"fleet {holder.fleet} has it: " if holder.fleet else ""
        job, wait = holder.wait_hint(holder.fleet)
        return ConflictError(
            f"{self._urls[name]} is busy: {of_fleet}{holder}",
            hint=stopped_hint(holder.pid, holder.fleet) if holder.stopped else wait,
            details={
                **({"job": job} if job else {}),
                "fleet": holder.fleet,
                "holder": holder.activity,
                "pid": holder.pid,
                "since": holder.since,
            },
        )

    def unrepaired(self, url: str, *, locked: bool = False) -> Unfinished | None:
        """What another fleet has to repair in this server before this one may touch it. `locked`:
        its lock is this process's, so no push into it is under way, whatever is on record.
        """
        before = self.recorded(self._name(url))
        if before is None or not before.repairs or before.fleet == self.fleet:
            return None
        return self._left_by(before.fleet, normalized(url), locked)

    def _unrepaired_by_another(self, lock: Lock) -> Unrepaired | None:
        url = self._urls[lock.name]
        if (work := self.unrepaired(url, locked=True)) is None:
            return None
        return Unrepaired(
            f"{url}: {work.reason}; that was fleet {work.fleet}, which has not repaired it",
            hint=f"first: {work.command}",
        )

    def _left_by(self, fleet: str, url: str, locked: bool) -> Unfinished | None:
        """What another fleet, by its record, has to repair in the server at this URL."""
        from skyctl.store.in_doubt import in_doubt_or_orphaned
        from skyctl.store.state import FleetState

        paths = FleetPaths(self._root, fleet)
        if not paths.database.exists():
            return None
        with FleetState(paths.database) as state:
            for name, record in in_doubt_or_orphaned(state, living=locked).items():
                row = state.server(name)
                if normalized(row.url) == url and not record.whole:
                    # a recovery repairs what its fleet lists
                    then = "" if row.located else f", once its file lists {url} again"
                    return Unfinished(fleet, record.reason, f"skyctl recover --fleet {fleet}{then}")
        return None

    def _name(self, url: str, kind: str = "") -> str:
        url = normalized(url)
        name = quote(url, safe="")
        if len(name) > _LONGEST_NAME:
            name = hashlib.sha256(url.encode()).hexdigest()
        self._urls[f"{name}{kind}"] = url
        return f"{name}{kind}"


class ServerClaim:
    """Locks of servers that were taken, by the servers' names."""

    def __init__(self, locks: dict[str, Lock], doubts: Callable[[], Collection[str]]) -> None:
        self.locks = locks
        self.complete = True  # False: there was no room for a lock, and a push may begin meanwhile
        self.unrepaired: dict[str, str] = {}  # why another fleet is first
        self._doubts = doubts

    def release(self) -> None:
        """Release all of them. A second call does nothing."""
        if self.locks:
            doubts = self._doubts()
            for name, lock in self.locks.items():
                lock.release(repairs=name in doubts)
            self.locks = {}

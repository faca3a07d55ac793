"""The six invariants of the failure matrix, looked at after a kill and its recovery."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from skyctl.store.in_doubt import in_doubt
from skyctl.store.state import FleetState


def served_only(stubs: Sequence[Mapping[str, Any]], committed: Collection[str]) -> list[str]:
    """I1: at every resume a server held weights that somebody committed, all of them."""
    return [
        f"I1: served {what[:40]}"
        for stub in stubs
        for what in stub["served"]
        if what not in committed
    ]


def at_one_version(stubs: Sequence[Mapping[str, Any]], committed: Mapping[str, str]) -> list[str]:
    """I1 and I6 at the end: all thawed, closed, with the same committed weights and their label.

    `committed` has the label by digest.
    """
    found = []
    for number, stub in enumerate(stubs):
        if stub["paused"] or stub["update_open"] or stub["half_loaded"]:
            found.append(f"I6: server {number} is left paused, open or half loaded")
        if stub["digest"] not in committed:
            found.append(f"I1: server {number} holds {stub['digest'][:40]}")
        elif stub["weight_version"] != committed[stub["digest"]]:
            label, right = stub["weight_version"], committed[stub["digest"]]
            found.append(f"I1: server {number} is labelled {label}, and holds {right}")
    if len({(stub["digest"], stub["weight_version"]) for stub in stubs}) > 1:
        found.append("I1: servers hold different weights")
    return found


def state_is_whole(database: Path, version: str | None) -> list[str]:
    """I5 and I6: the state parses, nothing in it is open, and it tells the servers' version."""
    found = []
    with FleetState(database) as state:
        running = [job.id for job in state.journal.jobs() if not job.ended]
        if running:
            found.append(f"I6: {', '.join(running)} is still running in the journal")
        for name in ("turn", "up"):
            if held := state.locks.holders(name):
                found.append(f"I6: the {name} lock is held: {held[0]}")
        if in_doubt(state):
            found.append(f"I6: still in doubt: {', '.join(in_doubt(state))}")
        for row in state.servers():
            if row.quarantine:
                found.append(f"I6: {row.name} is quarantined: {row.quarantine}")
        if version is not None and state.weights().version != version:
            found.append(f"I6: the state says {state.weights().version}, servers {version}")
    if list(database.parent.glob("*.corrupt-*")):
        found.append("I5: the state file was corrupt")
    return found


def nothing_left(home: Path, expected: Collection[int] = ()) -> list[str]:
    """I4: no process of this state directory is left but those expected."""
    left = [process for process in of_home(home) if process.pid not in expected]
    return [f"I4: left behind: {' '.join(_words(process))[:80]}" for process in left]


def nothing_left_soon(
    home: Path, bound_s: float, expected: Callable[[], Collection[int]] = tuple
) -> list[str]:
    """The same, when it still holds after `bound_s`: a sender that was just started hears of the
    end as it has loaded, a guardian that had nothing to do may take its time to go."""
    deadline = time.monotonic() + bound_s
    while (left := nothing_left(home, expected())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def of_home(home: Path) -> list[psutil.Process]:
    """Processes with this state directory in their environment as they were started."""
    found = []
    for process in psutil.process_iter():
        try:
            if (process.pid, process.create_time()) in _others:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if _environ(process).get("SKYCTL_HOME") == str(home):
                found.append(process)
            elif time.time() - process.create_time() > 1.0:  # past its exec
                _others.add((process.pid, process.create_time()))
        except psutil.Error:
            continue
    return found


def _environ(process: psutil.Process) -> dict[str, str]:
    """Amid its exec a process has none: a guardian that becomes `skyctl recover` would be missed.
    Threads of the kernel never have one, and no program."""
    deadline = time.monotonic() + 1.0
    while not (found := process.environ()) and process.exe() and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


_others: set[tuple[int, float]] = set()
"""Processes known to be none of ours: looking at the environment of each is slow."""


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return ["?"]

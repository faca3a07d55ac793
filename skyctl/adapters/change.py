"""Load adapters into all servers of a fleet, or into none.

    read, check, copy ─► intend ─► load NAME@4 ─► name ─► commit
    └─ nothing is sent ─┘ └ durable   │ unseen      │ seen by users from here
                                      └──── fails ──┴─► every server back at what is committed,
                                                        else quarantined; withdraw

A version is loaded beside those that serve, so a server that cannot take it is found before any
user sees it. Giving it the name is one assignment in each server: running requests finish with the
version they began with. What a dead process left is undone by the next process that takes the lock.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from skyctl import engines
from skyctl.adapters.applies import adapter_problem
from skyctl.adapters.peft import Adapter, check_fits, copy_adapter, read_adapter, read_parts
from skyctl.checkpoints.staging import held, staged, sweep
from skyctl.engines.base import Refusal, Server
from skyctl.errors import (
    ConflictError,
    NotFoundError,
    PreflightError,
    ServerError,
    SkyctlError,
    UsageError,
)
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, OutcomeStatus, failure, fan_out, require_all
from skyctl.http.target import ServerTarget
from skyctl.kill_points import reached
from skyctl.store import adapters as store
from skyctl.store.adapters import AdapterVersion
from skyctl.store.state import FleetState
from skyctl.units import count_of

RETIRE_AFTER_S = 10.0
"""How long the files of a version stay at least once nobody can request it: a request that was
accepted just before may not be in the server's list yet.
"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_POLL_S = 0.02
_ADVICE: dict[str, str] = {
    Refusal.CANNOT_NAME: "install skyctl in the interpreter that runs this server, and restart it",
    Refusal.NO_ADAPTERS: "write a section `lora:` into the fleet file (what attached servers need: "
    "docs/how-to/adapters.md)",
}


@dataclass(frozen=True, kw_only=True)
class LoadAdapter:
    """Serve a PEFT directory under a name. `new`: the name must be free (True), already served
    (False), or either (None). `any_base`: accept any base model it says it was trained on.
    """

    name: str
    directory: str
    new: bool | None = True
    any_base: bool = False
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class UnloadAdapter:
    """Stop serving this name."""

    name: str
    timeout_s: float | None = None


@dataclass(frozen=True)
class AdapterChange:
    """The result of a change. `adapter` is what is served now, None after an unload; `before` the
    previous version. `elapsed_ms` is from the first request sent to the last answer.
    """

    name: str
    adapter: AdapterVersion | None
    before: int | None
    outcomes: tuple[Outcome[None], ...]
    elapsed_ms: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdapterFleet:
    """A fleet, as a change of its adapters needs to know it.

    `targets` returns the servers that can take part, and why others cannot now (they load what is
    committed before they are routed to). `model` is what they run, a directory or hub id; `bases`
    all its names, the first as displayed. `reserved` are model names of other things. The limits
    are None if they are up to the servers.
    """

    name: str
    state: FleetState
    client: ControlClient
    targets: Callable[[], tuple[Sequence[ServerTarget], Mapping[str, str]]]
    directory: Path
    timeout_s: float
    in_memory: bool = True
    model: str | None = None
    bases: Sequence[str] = ()
    reserved: Sequence[str] = ()
    max_rank: int | None = None
    max_adapters: int | None = None
    quarantined: Callable[[str], None] = lambda server: None

    def server(self, target: ServerTarget, timeout_s: float | None = None) -> Server:
        """Its control routes."""
        return engines.server(self.client, target, timeout_s=timeout_s or self.timeout_s)


async def change_all(fleet: AdapterFleet, asked: LoadAdapter | UnloadAdapter) -> AdapterChange:
    """`load` or `unload`, as asked."""
    return await (load(fleet, asked) if isinstance(asked, LoadAdapter) else unload(fleet, asked))


async def load(fleet: AdapterFleet, asked: LoadAdapter) -> AdapterChange:
    """Read, check and copy an adapter, and serve it on every server.

    Raises:
        NotFoundError, PreflightError, UsageError, ConflictError: refused; nothing was sent.
        PartialFailure, ServerError, DeadlineExceeded: it was undone; `details["outcomes"]`.
        StateUnwritable: it could not be put on record first; nothing was sent.
    """
    adapter, notes = await _checked(fleet, asked)
    async with _own_copy(fleet, adapter) as copy, changing(fleet, asked.name):
        before = _room_for(fleet, asked)
        new = _version(fleet, asked.name, adapter, copy)
        targets, skipped = _taking_part(fleet)
        await _refuse_unapplied(fleet, adapter, targets, asked.timeout_s)
        store.intend_version(fleet.state, new, [target.name for target in targets])

        async def load_version(target: ServerTarget) -> None:
            await fleet.server(target, asked.timeout_s).load_adapter(new.served_as, new.path)

        async def name(target: ServerTarget) -> None:
            await fleet.server(target, asked.timeout_s).name_adapter(new.name, new.served_as)

        steps = [Step("adapters.load.call", load_version), Step("adapters.name.call", name)]
        outcomes, elapsed_ms = await _carry_out(fleet, new.name, targets, steps, asked.timeout_s)
    what = (
        f"{new.served_as} served by {count_of(len(outcomes), 'server')} (digest {new.digest[:12]})"
    )
    fleet.state.add_event("adapters", what)
    return AdapterChange(
        new.name,
        store.served(fleet.state)[new.name],
        None if before is None else before.version,
        (*outcomes, *skipped),
        elapsed_ms,
        tuple(notes),
    )


async def unload(fleet: AdapterFleet, asked: UnloadAdapter) -> AdapterChange:
    """Stop serving a name; running requests end. Raises as `load`."""
    async with changing(fleet, asked.name):
        known = store.served(fleet.state)
        if asked.name not in known:
            raise _unknown(fleet, asked.name, known)
        targets, skipped = _taking_part(fleet)
        store.intend_unload(fleet.state, asked.name, [target.name for target in targets])

        async def forget(target: ServerTarget) -> None:
            await fleet.server(target, asked.timeout_s).unload_adapter(asked.name)

        steps = [Step("adapters.unload.call", forget)]
        outcomes, elapsed_ms = await _carry_out(fleet, asked.name, targets, steps, asked.timeout_s)
    fleet.state.add_event("adapters", f"{asked.name} unloaded")
    before = known[asked.name].version
    return AdapterChange(asked.name, None, before, (*outcomes, *skipped), elapsed_ms)


async def enter(fleet: AdapterFleet, asked: LoadAdapter) -> AdapterVersion:
    """Record an adapter as served: servers load it as they start. Raises as `load`."""
    adapter, _ = await _checked(fleet, asked)
    async with _own_copy(fleet, adapter) as copy, changing(fleet, asked.name):
        _room_for(fleet, asked)
        new = _version(fleet, asked.name, adapter, copy)
        with fleet.state.durable():
            store.intend_version(fleet.state, new, ())
            store.commit(fleet.state, new.name, ())
    return new


async def restore(fleet: AdapterFleet, lost: AdapterVersion) -> None:
    """Copy a version again whose files are gone: they were in memory, and the machine has rebooted.

    Raises:
        SkyctlError: its source is gone as well, or has changed.
    """
    adapter = await asyncio.to_thread(read_adapter, lost.source)
    if adapter.digest != lost.digest:
        raise PreflightError(f"{lost.source} is not what {lost.served_as} was made from any more")
    async with _own_copy(fleet, adapter) as copy, changing(fleet, lost.name):
        store.record_path(fleet.state, lost, str(copy))


@asynccontextmanager
async def changing(fleet: AdapterFleet, name: str = "") -> AsyncIterator[None]:
    """Hold the adapters lock, in a fleet without interrupted changes.

    Raises:
        ConflictError: another process held it for all of the fleet's `timeout_s` seconds.
    """
    what = f"a change of adapter {name}" if name else "a look at adapters"
    deadline = time.monotonic() + fleet.timeout_s
    while True:
        try:
            lock = fleet.state.locks.take(store.LOCK, what)
            break
        except ConflictError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_POLL_S)
    try:
        for left in store.unfinished(fleet.state):
            fleet.state.add_event("adapters", f"a change of {left} broke off: undone")
            await _undo(fleet, left, fleet.targets()[0])
        yield
    finally:
        lock.release()


async def catch_up(
    state: FleetState, client: ControlClient, targets: Sequence[ServerTarget], timeout_s: float
) -> list[Outcome[None]]:
    """Bring servers to what is committed, and record it for those that got there. One outcome each.

    The adapters lock must be held, or no change be possible.
    """
    wanted = store.served(state)
    ours = store.names(state)

    async def one(target: ServerTarget) -> None:
        await settle(engines.server(client, target, timeout_s=timeout_s), wanted, ours)

    outcomes = await fan_out(targets, one, timeout_s=timeout_s * (1 + len(wanted)))
    for outcome in outcomes:
        if outcome.ok:
            store.record_server(state, outcome.server, wanted)
    return outcomes


async def settle(
    server: Server, wanted: Mapping[str, AdapterVersion], ours: frozenset[str]
) -> None:
    """Make one server serve exactly this, whatever it serves now; adapters that are not `ours`
    stay.

    Raises:
        ServerError: it does not, or it is unknown whether it does.
    """
    if not wanted and not ours:
        return
    held_now = {one.name: one.path for one in await server.adapters() if not one.in_flight}
    for name, path in held_now.items():
        current = wanted.get(name) or wanted.get(name.rpartition("@")[0])
        known = name in ours or name.rpartition("@")[0] in ours
        stale = current is None or path != current.path
        if known and stale and name not in wanted:  # a name moves to its version without a gap
            await server.unload_adapter(name)
    for name, one in wanted.items():
        if held_now.get(name) == one.path:
            continue
        if held_now.get(one.served_as) != one.path:
            adapter = await asyncio.to_thread(read_parts, one.path)
            if problem := await adapter_problem(server, *adapter):
                raise ServerError(f"{server.target.name}: {one.served_as}: {problem}")
            await server.load_adapter(one.served_as, one.path)
        await server.name_adapter(name, one.served_as)


async def retire(fleet: AdapterFleet) -> None:
    """Remove the files of versions that no request uses any more, as far as servers can tell."""
    old = store.superseded(fleet.state, time.time() - RETIRE_AFTER_S)
    if old:
        targets, _ = fleet.targets()
        asked = (fleet.server(target).adapters() for target in targets)
        try:
            used = {one.path for found in await asyncio.gather(*asked) for one in found}
        except ServerError:
            return
        with fleet.state.transaction():
            for one in old:
                if one.path not in used:
                    store.forget_version(fleet.state, one)
    if fleet.directory.exists():
        await asyncio.to_thread(sweep, fleet.directory, store.kept_paths(fleet.state))


class Step(NamedTuple):
    """What is done on every server at once; kill point `point` is reached before it."""

    point: str
    call: Callable[[ServerTarget], Awaitable[None]]

    async def take(self, target: ServerTarget) -> None:
        """Call one server. Where skyctl can explain its error, it does so in place of the server's
        words.
        """
        try:
            await self.call(target)
        except ServerError as error:
            if error.refusal in _ADVICE:
                raise ServerError(error.refusal) from error
            raise


async def _carry_out(
    fleet: AdapterFleet,
    name: str,
    targets: Sequence[ServerTarget],
    steps: Sequence[Step],
    timeout_s: float | None,
) -> tuple[list[Outcome[None]], float]:
    """Take each step on every server at once; undo all if one cannot. Returns an outcome of each,
    and the milliseconds until the change was on record.
    """
    began = time.perf_counter()
    total_ms = dict.fromkeys((target.name for target in targets), 0.0)
    try:
        for step in steps:
            reached(step.point)
            outcomes = await fan_out(targets, step.take, timeout_s=timeout_s or fleet.timeout_s)
            for outcome in outcomes:
                total_ms[outcome.server] += outcome.elapsed_ms
            if not all(outcome.ok for outcome in outcomes):
                raise await _undone(fleet, name, targets, outcomes)
    except asyncio.CancelledError:
        await _undo(fleet, name, targets)
        raise
    reached("adapters.commit")
    store.commit(fleet.state, name, [target.name for target in targets])
    reached("adapters.committed")
    elapsed_ms = (time.perf_counter() - began) * 1000
    return [replace(one, elapsed_ms=total_ms[one.server]) for one in outcomes], elapsed_ms


async def _undone(
    fleet: AdapterFleet,
    name: str,
    targets: Sequence[ServerTarget],
    outcomes: Sequence[Outcome[None]],
) -> SkyctlError:
    """Undo a change; returns the error that says what became of each server."""
    culprit = next(outcome for outcome in outcomes if not outcome.ok)
    undone = {one.server: one for one in await _undo(fleet, name, targets)}
    told = []
    for outcome in outcomes:
        end = undone[outcome.server]
        if outcome.ok and end.ok:
            why = f"undone because {culprit.server} could not"
            outcome = replace(outcome, status=OutcomeStatus.ROLLED_BACK, detail=why)
        elif not end.ok:
            said = f"{outcome.detail}; " if outcome.detail else ""
            detail = f"{said}quarantined: not undone: {end.detail}"
            outcome = replace(outcome, status=OutcomeStatus.FAILED, detail=detail)
        told.append(outcome)
    error = failure(told, f"adapters {name}")
    assert error is not None  # one of them failed
    if all(one.ok for one in undone.values()):
        nothing = f"nothing changed on any server; why: skyctl logs {culprit.server}"
        error.hint = _ADVICE.get(culprit.detail, nothing)
    return error


async def _undo(
    fleet: AdapterFleet, name: str, targets: Sequence[ServerTarget]
) -> list[Outcome[None]]:
    """Bring servers back to what is committed; one that fails is quarantined."""
    reached("adapters.undo")
    outcomes = await catch_up(fleet.state, fleet.client, targets, fleet.timeout_s)
    for outcome in outcomes:
        if not outcome.ok:
            why = f"its adapters are not the fleet's: {outcome.detail}; type: skyctl recover"
            fleet.state.update_server(outcome.server, quarantine=why)
            fleet.quarantined(outcome.server)
    store.withdraw(fleet.state, name)
    return outcomes


@asynccontextmanager
async def _own_copy(fleet: AdapterFleet, adapter: Adapter) -> AsyncIterator[Path]:
    """The fleet's own copy of an adapter, which stays while the block runs and as long as the
    fleet's state names it. A copy already in place is used as it is.
    """
    if fleet.directory in adapter.path.parents:
        with held(str(adapter.path)):
            yield adapter.path
        return
    with staged(fleet.directory, needed_bytes=adapter.bytes, in_memory=fleet.in_memory) as copy:
        await asyncio.to_thread(copy_adapter, adapter, copy)
        yield copy


async def _checked(fleet: AdapterFleet, asked: LoadAdapter) -> tuple[Adapter, list[str]]:
    """The adapter, read and compared with what the servers run, and notes."""
    if not _NAME.fullmatch(asked.name) or "//" in asked.name:
        raise UsageError(
            f"{asked.name!r} cannot be the name of an adapter",
            hint="take letters, digits and . _ - : / (the version is added after an @)",
        )
    if asked.name in fleet.reserved:
        raise UsageError(
            f"{asked.name!r} is the name of the model itself", hint="take another name"
        )
    adapter = await asyncio.to_thread(read_adapter, asked.directory)
    notes = await asyncio.to_thread(
        check_fits,
        adapter,
        model=fleet.model,
        bases=fleet.bases,
        max_rank=fleet.max_rank,
        any_base=asked.any_base,
    )
    return adapter, notes


async def _refuse_unapplied(
    fleet: AdapterFleet,
    adapter: Adapter,
    targets: Sequence[ServerTarget],
    timeout_s: float | None,
) -> None:
    """Raise PreflightError, naming modules, if a server would leave a part of the adapter out."""

    async def ask(target: ServerTarget) -> str:
        return await adapter_problem(fleet.server(target), adapter.config, adapter.tensors)

    outcomes = await fan_out(targets, ask, timeout_s=timeout_s or fleet.timeout_s)
    require_all(outcomes, "adapters")
    for outcome in outcomes:
        if outcome.value:
            raise PreflightError(
                f"{adapter.path} does not fit {outcome.server}: {outcome.value}",
                hint="let the servers take LoRA for these modules (`lora-target-modules` under "
                "`args`), or train the adapter on those that they do",
            )


def _version(fleet: AdapterFleet, name: str, adapter: Adapter, copy: Path) -> AdapterVersion:
    return AdapterVersion(
        name,
        store.next_version(fleet.state, name),
        str(copy),
        adapter.digest,
        str(adapter.path),
        adapter.rank,
        adapter.bytes,
        time.time(),
    )


def _room_for(fleet: AdapterFleet, asked: LoadAdapter) -> AdapterVersion | None:
    """What this name serves now. Raises if that contradicts the request."""
    known = store.served(fleet.state)
    before = known.get(asked.name)
    if before is not None and asked.new is True:
        raise ConflictError(
            f"fleet {fleet.name} serves {asked.name} already, version {before.version}",
            hint=f"bring it to a new version: skyctl adapters sync {asked.name} DIR",
        )
    if before is None and asked.new is False:
        raise _unknown(fleet, asked.name, known)
    if before is None and fleet.max_adapters is not None and len(known) >= fleet.max_adapters:
        raise ConflictError(
            f"fleet {fleet.name} serves {len(known)} adapters, which is all it takes",
            hint="unload one: skyctl adapters unload NAME; or raise `lora.max_adapters` in the "
            "fleet file, then: skyctl up; attached servers: restart them where they were started",
        )
    return before


def _unknown(fleet: AdapterFleet, name: str, known: Mapping[str, Any]) -> NotFoundError:
    first = f"load it first: skyctl adapters load {name} DIR"
    return NotFoundError(
        f"fleet {fleet.name} serves no adapter {name!r}",
        hint=f"it serves: {', '.join(known)}" if known else first,
    )


def _taking_part(fleet: AdapterFleet) -> tuple[Sequence[ServerTarget], list[Outcome[None]]]:
    """The servers that take part in a change, and outcomes of the others."""
    targets, absent = fleet.targets()
    if not targets:
        why = "; ".join(f"{server}: {reason}" for server, reason in absent.items())
        raise ConflictError(
            f"no server of fleet {fleet.name} can take an adapter now ({why})",
            hint="what state each server is in: skyctl status",
        )
    skipped = [
        Outcome[None](server, OutcomeStatus.SKIPPED, 0.0, why) for server, why in absent.items()
    ]
    return targets, skipped

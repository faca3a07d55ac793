"""Load adapters into all servers of a fleet, or into none.

    read, check, copy ─► intend ─► [give] ─► load NAME@4 ─► name ─► commit
    └ nothing is loaded ┘ └ durable   │         │ unseen      │ seen by users from here
                                      └─────────┴──── fails ──┴─► every server back at what is
                                                   committed, else quarantined; withdraw, release

A version is loaded beside those that serve, so a server that cannot take it is found before any
user sees it. Giving it the name is one assignment in each server: running requests finish with the
version they began with. What a dead process left is undone by the next process that takes the lock.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from skyctl.adapters.applies import adapter_problem
from skyctl.adapters.committed import undo
from skyctl.adapters.fleet import AdapterChange, AdapterFleet
from skyctl.adapters.given import give, keep, release
from skyctl.adapters.peft import Adapter, check_fits, copy_adapter, read_adapter
from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.checkpoints.staging import in_use, staged
from skyctl.engines.base import Refusal
from skyctl.errors import (
    ConflictError,
    NotFoundError,
    PreflightError,
    ServerError,
    SkyctlError,
    UsageError,
)
from skyctl.http.fanout import Outcome, OutcomeStatus, failure, fan_out, require_all
from skyctl.http.target import ServerTarget
from skyctl.kill_points import reached
from skyctl.store import adapters as store
from skyctl.store.adapters import AdapterVersion
from skyctl.units import count_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_POLL_S = 0.02
_ADVICE: dict[str, str] = {
    Refusal.CANNOT_NAME: "install skyctl in the interpreter that runs this server, and restart it",
    Refusal.NO_ADAPTERS: "write a section `lora:` into the fleet file (what attached servers need: "
    "docs/how-to/adapters.md)",
}


async def change_all(fleet: AdapterFleet, request: LoadAdapter | UnloadAdapter) -> AdapterChange:
    """Carry out `request` by `load` or `unload`."""
    return await (
        load(fleet, request) if isinstance(request, LoadAdapter) else unload(fleet, request)
    )


async def load(fleet: AdapterFleet, request: LoadAdapter) -> AdapterChange:
    """Read, check and copy an adapter, and serve it on every server.

    Raises:
        NotFoundError, PreflightError, UsageError, ConflictError: refused; nothing was sent.
        PartialFailure, ServerError, DeadlineExceeded: it was undone; `details["outcomes"]`.
        StateUnwritable: it could not be put on record first; nothing was sent.
    """
    adapter, notes = await _checked(fleet, request)
    async with _own_copy(fleet, adapter) as copy, changing(fleet, request.name):
        before = _room_for(fleet, request)
        new = _version(fleet, request.name, adapter, copy)
        targets, skipped = _taking_part(fleet)
        await _refuse_unapplied(fleet, adapter, targets, request.timeout_s)
        store.intend_version(fleet.state, new, [target.name for target in targets])
        if request.sent is not None:
            reached("adapters.give.call")
            try:
                await give(fleet, adapter, request.sent, copy, targets, request.timeout_s)
            except SkyctlError as error:  # the caller goes by what it is, whatever undoing does
                ends = await undo(fleet, new.name, targets)
                if not all(end.ok for end in ends):
                    error.details["undone"] = [end.to_json() for end in ends]
                raise
            except asyncio.CancelledError:
                require_all(await undo(fleet, new.name, targets), f"adapters {new.name}")
                raise

        async def load_version(target: ServerTarget) -> None:
            await fleet.server(target, request.timeout_s).load_adapter(new.served_as, new.path)

        async def name(target: ServerTarget) -> None:
            await fleet.server(target, request.timeout_s).name_adapter(new.name, new.served_as)

        named = partial(store.intend_name, fleet.state, new.name)
        steps = [
            Step("adapters.load.call", load_version),
            Step("adapters.name.call", name, named),
        ]
        outcomes, elapsed_ms = await _carry_out(fleet, new.name, targets, steps, request.timeout_s)
        if request.sent is not None and not request.sent.export:
            await release(fleet, targets, [new.path])
    message = (
        f"{new.served_as} served by {count_of(len(outcomes), 'server')} (digest {new.digest[:12]})"
    )
    fleet.state.add_event("adapters", message)
    return AdapterChange(
        new.name,
        store.served(fleet.state)[new.name],
        None if before is None else before.version,
        (*outcomes, *skipped),
        elapsed_ms,
        tuple(notes),
    )


async def unload(fleet: AdapterFleet, request: UnloadAdapter) -> AdapterChange:
    """Stop serving a name; running requests end. Raises as `load`."""
    async with changing(fleet, request.name):
        served = store.served(fleet.state)
        if request.name not in served:
            raise _unknown(fleet, request.name, served)
        targets, skipped = _taking_part(fleet)
        store.intend_unload(fleet.state, request.name, [target.name for target in targets])

        async def forget(target: ServerTarget) -> None:
            await fleet.server(target, request.timeout_s).unload_adapter(request.name)

        steps = [Step("adapters.unload.call", forget)]
        outcomes, elapsed_ms = await _carry_out(
            fleet, request.name, targets, steps, request.timeout_s
        )
    fleet.state.add_event("adapters", f"{request.name} unloaded")
    before = served[request.name].version
    return AdapterChange(request.name, None, before, (*outcomes, *skipped), elapsed_ms)


async def enter(fleet: AdapterFleet, request: LoadAdapter) -> AdapterVersion:
    """Record an adapter as served: servers load it as they start. Raises as `load`."""
    adapter, _ = await _checked(fleet, request)
    async with _own_copy(fleet, adapter) as copy, changing(fleet, request.name):
        _room_for(fleet, request)
        new = _version(fleet, request.name, adapter, copy)
        with fleet.state.durable():
            store.intend_version(fleet.state, new, ())
            store.commit(fleet.state, new.name, ())
    return new


async def restore(fleet: AdapterFleet, lost: AdapterVersion) -> None:
    """Copy a version again whose files a reboot has removed from memory.

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
    """Hold the adapters lock, and those of its servers, in a fleet without interrupted changes.

    Raises:
        ConflictError: another process, or another fleet that lists one of the servers, held it for
            all of the fleet's `timeout_s` seconds.
    """
    purpose = f"a change of adapter {name}" if name else "a look at adapters"
    deadline = time.monotonic() + fleet.timeout_s
    while True:
        try:
            release = _locked(fleet, purpose)
            break
        except ConflictError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_POLL_S)
    try:
        unfinished = store.unfinished(fleet.state)
        if unfinished:
            await keep(fleet)  # a server may have to catch up with what only others hold
        for adapter_name in unfinished:
            fleet.state.add_event("adapters", f"a change of {adapter_name} broke off: undone")
            await undo(fleet, adapter_name, fleet.targets()[0])
        yield
    finally:
        release()


def _locked(fleet: AdapterFleet, purpose: str) -> Callable[[], None]:
    """Take the locks of a change; returns what releases them. Raises ConflictError."""
    with ExitStack() as locks:
        locks.callback(fleet.state.locks.take(store.LOCK, purpose).release)
        if fleet.locks is not None:
            urls = {target.name: target.url for target in fleet.targets()[0]}
            claim = fleet.locks.take_all(urls, purpose, shared=False, kind=f".{store.LOCK}")
            locks.callback(claim.release)
        return locks.pop_all().close


class Step(NamedTuple):
    """What is done on every server at once; kill point `point` is reached before it, and it is put
    on record by `record`.
    """

    point: str
    call: Callable[[ServerTarget], Awaitable[None]]
    record: Callable[[], None] = lambda: None

    async def take(self, target: ServerTarget) -> None:
        """Call one server. An error that skyctl can explain gets skyctl's words."""
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
    """Take each step on every server at once; undo all if one server fails.

    Returns an outcome per server, and the milliseconds until the change was on record.
    """
    began = time.perf_counter()
    total_ms = dict.fromkeys((target.name for target in targets), 0.0)
    try:
        for step in steps:
            reached(step.point)
            step.record()
            outcomes = await fan_out(targets, step.take, timeout_s=timeout_s or fleet.timeout_s)
            for outcome in outcomes:
                total_ms[outcome.server] += outcome.elapsed_ms
            if not all(outcome.ok for outcome in outcomes):
                raise await _undone(fleet, name, targets, outcomes)
    except asyncio.CancelledError:
        require_all(await undo(fleet, name, targets), f"adapters {name}")
        raise
    reached("adapters.commit")
    store.commit(fleet.state, name, [target.name for target in targets])
    reached("adapters.committed")
    elapsed_ms = (time.perf_counter() - began) * 1000
    timed = [replace(outcome, elapsed_ms=total_ms[outcome.server]) for outcome in outcomes]
    return timed, elapsed_ms


async def _undone(
    fleet: AdapterFleet,
    name: str,
    targets: Sequence[ServerTarget],
    outcomes: Sequence[Outcome[None]],
) -> SkyctlError:
    """Undo a change; returns the error with an outcome per server."""
    culprit = next(outcome for outcome in outcomes if not outcome.ok)
    undone = {outcome.server: outcome for outcome in await undo(fleet, name, targets)}
    reported = []
    for outcome in outcomes:
        end = undone[outcome.server]
        if outcome.ok and end.ok:
            reason = f"undone because {culprit.server} could not"
            outcome = replace(outcome, status=OutcomeStatus.ROLLED_BACK, detail=reason)
        elif not end.ok:
            earlier = f"{outcome.detail}; " if outcome.detail else ""
            detail = f"{earlier}quarantined: not undone: {end.detail}"
            outcome = replace(outcome, status=OutcomeStatus.FAILED, detail=detail)
        reported.append(outcome)
    error = failure(reported, f"adapters {name}")
    assert error is not None  # one of them failed
    if all(end.ok for end in undone.values()):
        nothing = f"nothing changed on any server; for the reason: skyctl logs {culprit.server}"
        error.hint = _ADVICE.get(culprit.detail, nothing)
    return error


@asynccontextmanager
async def _own_copy(fleet: AdapterFleet, adapter: Adapter) -> AsyncIterator[Path]:
    """The fleet's own copy of an adapter, which stays while the block runs and as long as the
    fleet's state names it. A copy already in place is used as it is.
    """
    if fleet.directory in adapter.path.parents:
        with in_use(str(adapter.path)):
            yield adapter.path
        return
    with staged(fleet.directory, needed_bytes=adapter.bytes, in_memory=fleet.in_memory) as copy:
        await asyncio.to_thread(copy_adapter, adapter, copy)
        yield copy


async def _checked(fleet: AdapterFleet, request: LoadAdapter) -> tuple[Adapter, list[str]]:
    """The adapter, read and compared with what the servers run, and notes."""
    if not _NAME.fullmatch(request.name) or "//" in request.name:
        raise UsageError(
            f"{request.name!r} cannot be the name of an adapter",
            hint="take letters, digits and . _ - : / (the version is added after an @)",
        )
    if request.name in fleet.reserved:
        raise UsageError(
            f"{request.name!r} is the name of the model itself", hint="take another name"
        )
    adapter = await asyncio.to_thread(read_adapter, request.directory, request.sent)
    notes = await asyncio.to_thread(
        check_fits,
        adapter,
        model=fleet.model,
        bases=fleet.bases,
        max_rank=fleet.max_rank,
        any_base=request.any_base,
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


def _room_for(fleet: AdapterFleet, request: LoadAdapter) -> AdapterVersion | None:
    """What this name serves now. Raises if that contradicts the request."""
    served = store.served(fleet.state)
    before = served.get(request.name)
    if before is not None and request.new is True:
        raise ConflictError(
            f"fleet {fleet.name} serves {request.name} already, version {before.version}",
            hint=f"bring it to a new version: skyctl adapters sync {request.name} DIR",
        )
    if before is None and request.new is False:
        raise _unknown(fleet, request.name, served)
    if before is None and fleet.max_adapters is not None and len(served) >= fleet.max_adapters:
        raise ConflictError(
            f"fleet {fleet.name} serves {len(served)} adapters, which is all it takes",
            hint="unload one: skyctl adapters unload NAME; or raise `lora.max_adapters` in the "
            "fleet file, then: skyctl up; attached servers: restart them where they were started",
        )
    return before


def _unknown(fleet: AdapterFleet, name: str, served: Mapping[str, Any]) -> NotFoundError:
    first = f"load it first: skyctl adapters load {name} DIR"
    return NotFoundError(
        f"fleet {fleet.name} serves no adapter {name!r}",
        hint=f"it serves: {', '.join(served)}" if served else first,
    )


def _taking_part(fleet: AdapterFleet) -> tuple[Sequence[ServerTarget], list[Outcome[None]]]:
    """The servers that take part in a change, and outcomes of the others."""
    targets, absent = fleet.targets()
    if not targets:
        reasons = "; ".join(f"{server}: {reason}" for server, reason in absent.items())
        raise ConflictError(
            f"no server of fleet {fleet.name} can take an adapter now ({reasons})",
            hint="what state each server is in: skyctl status",
        )
    skipped = [
        Outcome[None](server, OutcomeStatus.SKIPPED, 0.0, reason)
        for server, reason in absent.items()
    ]
    return targets, skipped

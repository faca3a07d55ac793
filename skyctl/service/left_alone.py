"""A fleet whose supervisor is gone: does anything run on, and what is the matter with it."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.core.diagnosis import Action, Finding, Observed, judge, observe
from skyctl.core.plan import local_url
from skyctl.core.registry import FleetRef, supervisor_running
from skyctl.store.identity import boot_id
from skyctl.store.in_doubt import InDoubt, in_doubt, left_behind
from skyctl.store.paths import FleetPaths
from skyctl.store.rebuild import unrecorded_processes
from skyctl.store.state import FleetState, ProcessRow


def left_alone(paths: FleetPaths) -> bool:
    """Whether processes of this fleet run on without a supervisor, and nobody is ending them."""
    if not paths.database.exists() or supervisor_running(paths):
        return False
    with FleetState(paths.database) as state:
        if state.get("going_down"):
            return False
        rows = state.processes()
        if any(row.alive() for row in rows):
            return True
        # those of a run that its supervisor could not put on record
        return bool(rows and unrecorded_processes(state, paths.directory))


async def find(ref: FleetRef) -> tuple[Finding, ...]:
    """What is the matter with each server of a fleet without a supervisor. Changes nothing."""
    if not ref.paths.database.exists():
        return ()
    with FleetState(ref.paths.database) as state:
        rows = [row for row in state.processes() if row.role == "server"]
        if state.get("going_down"):
            said = "`skyctl down` was cut short"
            return tuple(Finding(row.name, "half-down", said, "down") for row in rows)
        seen = {one.server: one for one in await _ask(ref, [r for r in rows if r.alive()])}
        doubts = {**in_doubt(state), **_of_orphans(state)}
        unrecorded = not seen and bool(unrecorded_processes(state, ref.paths.directory))
        findings = []
        for row in rows:
            if row.name not in seen:
                findings.append(_judge_dead(row, others_live=bool(seen) or unrecorded))
                continue
            doubted, meant = doubts.get(row.name), state.server(row.name)
            found = judge(seen[row.name], meant, doubted, state.weights(), ours=True)
            if found.found == "healthy":
                said = "it serves, and nobody watches it"
                found = Finding(row.name, "unsupervised", said, "adopt")
            findings.append(found)
        return tuple(findings)


async def _ask(ref: FleetRef, rows: Sequence[ProcessRow]) -> list[Observed]:
    from skyctl.http.client import ControlClient
    from skyctl.http.target import ServerTarget
    from skyctl.service.keys import api_key, control_token

    key = control_token(ref) or api_key(ref)
    engine = ref.config.engine
    targets = [ServerTarget(row.name, local_url(row.host, row.port), key, engine) for row in rows]
    async with ControlClient() as client:
        return await observe(client, targets)


def _of_orphans(state: FleetState) -> dict[str, InDoubt]:
    """What jobs left whose process is dead, before anybody has closed them."""
    found: dict[str, InDoubt] = {}
    for job in state.journal.orphans():
        found |= left_behind(job, state.journal.events(job.id))
    return found


def _judge_dead(row: ProcessRow, *, others_live: bool) -> Finding:
    if row.identity is not None and row.identity.boot_id != boot_id():
        return Finding(row.name, "stale", "the machine was restarted since it ran")
    orphans = [one for one in row.descendants if one.alive()]
    if orphans:
        pids = ", ".join(str(one.pid) for one in orphans)
        said = f"its server is gone and left processes behind (pid {pids})"
        return Finding(row.name, "orphaned", said, "end")
    action: Action = "restart" if others_live else "nothing"
    return Finding(row.name, "failed", "it died while nobody watched", action)

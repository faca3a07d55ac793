"""Recovery of servers that skyctl did not start: from outside, without restarting anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from skyctl import engines
from skyctl.adapters.committed import behind, catch_up, withdraw
from skyctl.adapters.fleet import AdapterFleet
from skyctl.adapters.given import keep
from skyctl.core.arbiter import Act, Arbiter, Turn
from skyctl.core.diagnosis import judge
from skyctl.core.findings import Action, Condition, Finding
from skyctl.core.observation import observe
from skyctl.core.recovery import Recovered
from skyctl.core.recovery import recover as carry_out
from skyctl.core.registry import FleetRef
from skyctl.core.repeated import interrupted_request, published
from skyctl.errors import SkyctlError, WeightsGone, error_named
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.push.servers import ENGINE_TIMEOUT_S
from skyctl.service import attached_push
from skyctl.service.attached_servers import AttachedServers
from skyctl.states import UNLABELLED
from skyctl.store import adapters as store
from skyctl.store.in_doubt import close_orphans
from skyctl.store.journal import Job
from skyctl.store.server_locks import ServerLocks
from skyctl.store.server_names import normalized
from skyctl.store.state import FleetState

_TURN_WAIT_S = 120.0
_ROUTER_TIMEOUT_S = 5.0
_GONE = "not among the servers that were found"


def unrepaired_by_others(servers: AttachedServers, locks: ServerLocks) -> dict[str, str]:
    """The located servers that another fleet has to repair, by name: what its push left, and what
    to type. Each fleet leaves those alone: two that wait for each other would repair nothing.
    """
    marks = {target.name: locks.unrepaired(target.url) for target in servers.targets}
    return {
        name: f"{work.reason}; type: {work.command}"
        for name, work in marks.items()
        if work is not None
    }


async def find(
    servers: AttachedServers,
    client: ControlClient,
    state: FleetState,
    locks: ServerLocks,
    others: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """What is wrong with each located server, observed now; `others`: those that other fleets have
    to repair, if that was looked up before.
    """
    seen = await observe(client, servers.targets)
    servers.read_names()  # another command may have recorded others meanwhile, and their doubts
    seen = [
        replace(observed, server=target.name)
        for observed, target in zip(seen, servers.targets, strict=True)
    ]
    others = unrepaired_by_others(servers, locks) if others is None else others
    suspects = await servers.suspects(seen)
    rows, doubts, weights = servers.rows(), servers.in_doubt(), state.weights()
    judged = []
    for target, observed in zip(servers.targets, seen, strict=True):
        suspect = suspects.get(target.url)
        record = suspect.record if suspect else doubts.get(target.name)
        finding = judge(observed, rows[target.name], record, weights, ours=False)
        if target.name in others:
            finding = Finding(target.name, Condition.HALF_UPDATED, others[target.name])
        judged.append(finding)
    judged = await _with_adapters(judged, servers, client, state)
    # reported once: what a push left in a server that is gone matters when it comes back
    present = {target.name for target in servers.targets}
    gone = [
        Finding(
            name,
            Condition.UNREACHABLE,
            f"{_GONE} ({rows[name].url}); {record.reason}",
            Action.QUARANTINE,
        )
        for name, record in doubts.items()
        if not (name in present or record.by_verb)
        and not (rows[name].quarantine or "").startswith(_GONE)
    ]
    return (*judged, *gone)


async def _with_adapters(
    findings: Sequence[Finding], servers: AttachedServers, client: ControlClient, state: FleetState
) -> list[Finding]:
    """The findings, where nothing else is wrong with those that do not serve the adapters."""
    well = {
        finding.server
        for finding in findings
        if finding.condition is Condition.HEALTHY and not servers.rows()[finding.server].sleep_level
    }
    targets = [target for target in servers.targets if target.name in well]
    lacking = await behind(state, client, targets, ENGINE_TIMEOUT_S)
    detail = "it does not serve the fleet's adapters"
    return [
        Finding(finding.server, Condition.OTHER_SETTINGS, detail, Action.LOAD)
        if finding.server in lacking
        else finding
        for finding in findings
    ]


async def recover(
    ref: FleetRef,
    servers: AttachedServers,
    client: ControlClient,
    state: FleetState,
    *,
    arbiter: Arbiter,
    locks: ServerLocks,
    wait_s: float | None = None,
) -> tuple[Recovered, ...]:
    """Find what is wrong and repair it; one report per server. What another fleet has to repair is
    left alone.

    Waits for a push, or another recovery, at most `wait_s` seconds, and only then locates servers.

    Raises:
        ConflictError: another recovery, or a push, has not ended by then.
    """
    wait_s = _TURN_WAIT_S if wait_s is None else wait_s
    close_orphans(state)  # before any wait: followers of a job learn that its process is dead
    act, activity = Act.RECOVER, "skyctl recover"
    with await arbiter.turn(act, activity, wait_s=wait_s) as turn:
        close_orphans(state, in_turn=True)
        await servers.locate()
        await servers.adopt(alone=True)
        others = unrepaired_by_others(servers, locks)
        own = {target.name: target for target in servers.targets if target.name not in others}
        urls = {name: target.url for name, target in own.items()}
        await arbiter.claim(turn, act, activity, urls, wait_s=wait_s)
        actions = _Actions(ref, own, client, state)
        # a server that its fleet repairs meanwhile is not locked here
        findings = await find(servers, client, state, locks, others)
        recovered = await carry_out(findings, actions)
        failed = others | await _bring_to_adapters(ref, [*own.values()], client, state)
        return tuple(
            replace(repair, ok=False, detail=failed[repair.server])
            if repair.server in failed
            else repair
            for repair in recovered
        )


async def _bring_to_adapters(
    ref: FleetRef, targets: Sequence[ServerTarget], client: ControlClient, state: FleetState
) -> dict[str, str]:
    """Repair, on servers that serve, what a killed change of adapters left, or a server missed.
    All are asked: the record does not show that a server was restarted. What only servers hold is
    written first, for those that do not. Returns why servers are quarantined, by name.
    """
    unfinished = store.unfinished(state)
    absent = {row.name for row in state.servers() if row.quarantine or row.sleep_level}
    serving = [target for target in targets if target.name not in absent]
    fleet = AdapterFleet(
        name=ref.name,
        state=state,
        client=client,
        targets=lambda: (serving, {}),
        directory=ref.paths.adapters,
        timeout_s=ref.config.control_timeout_s,
    )
    await keep(fleet)
    failed = {
        outcome.server: f"its adapters are not the fleet's: {outcome.detail}"
        for outcome in await catch_up(state, client, serving, fleet.timeout_s)
        if not outcome.ok
    }
    state.update_servers({name: {"quarantine": reason} for name, reason in failed.items()})
    for name in unfinished:
        await withdraw(fleet, name, serving)
    return failed


@dataclass
class _Actions:
    """What can be done from outside (see recovery.Actions)."""

    ref: FleetRef
    targets: Mapping[str, ServerTarget]
    client: ControlClient
    state: FleetState

    def __post_init__(self) -> None:
        self.control_timeout_s = self.ref.config.control_timeout_s

    async def push(self, request: PushRequest, servers: Collection[str]) -> Job:
        chosen = [target for target in self.targets.values() if target.name in servers]
        return await self._push(chosen, request)

    async def bring(self, name: str) -> None:
        target = self.targets[name]
        job = await self._push([target], await self._fleets(target))
        if job.error is not None:
            raise error_named(job.error["kind"], job.error["message"], hint=job.error["hint"])

    async def replace(self, name: str, reason: str) -> str:
        self.state.update_server(name, quarantine=reason or "recovery could not put it right")
        if name not in self.targets:
            return f"{reason}; when it is back: skyctl recover"
        target = self.targets[name]
        router = self.ref.config.router
        if isinstance(router, str):
            with suppress(SkyctlError):  # it may be gone as well: `status` reports it
                routed = engines.router(
                    self.client, target.engine, router, timeout_s=_ROUTER_TIMEOUT_S
                )
                for url in await routed.workers():
                    spelled = engines.routing(target.engine).worker(url)
                    if normalized(spelled) == normalized(target.url):
                        await routed.remove_worker(url)
        return f"{reason}; quarantined: restart it where it was started, then: skyctl recover"

    def waits(self, name: str, reason: str) -> None:
        self.state.update_server(name, quarantine=reason)

    async def _fleets(self, target: ServerTarget) -> PushRequest:
        """The fleet's weights; before a first push, the checkpoint the server was started with."""
        weights = self.state.weights()
        if weights.version is not None:
            return published(weights)
        await self._refuse_mixture(target)
        model = (await engines.server(self.client, target).started_with()).model
        if not model:
            raise SkyctlError(f"{target.name} does not say which model it was started with")
        interrupted = interrupted_request(self.state)
        transport = interrupted.transport if interrupted is not None else "auto"
        return PushRequest(checkpoint=model, weight_version="default", transport=transport)

    async def _refuse_mixture(self, target: ServerTarget) -> None:
        """Raise WeightsGone if a server beside this one holds what another fleet pushed: this one
        would answer from other weights.
        """
        for other in self.targets.values():
            if other.name == target.name or self.state.server(other.name).quarantine:
                continue
            version = await engines.server(self.client, other).weight_version()
            if version not in (None, UNLABELLED):
                raise WeightsGone(
                    f"{other.name} holds {version}, which this fleet did not push: "
                    "nothing says what its servers are to hold"
                )

    async def _push(self, targets: Sequence[ServerTarget], request: PushRequest) -> Job:
        # the turn is the recovery's
        job, task = attached_push.begin(
            self.ref, targets, request, self.client, self.state, Turn(None)
        )
        await task
        return self.state.journal.job(job.id)

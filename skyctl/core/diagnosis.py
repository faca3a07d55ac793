"""The judge of what is wrong with a fleet, for `status`, `doctor` and `recover`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from skyctl.core.findings import Action, Condition, Finding, Severity
from skyctl.core.status import (
    FleetStatus,
    FrontStatus,
    Health,
    OperationKind,
    ReplicaStatus,
    RouterStatus,
    RunningCanary,
)
from skyctl.states import UNLABELLED, ReplicaState, is_empty, label_matches
from skyctl.store.fleet_weights import CanaryStage
from skyctl.units import percent

if TYPE_CHECKING:
    from skyctl.core.observation import Observed
    from skyctl.store.fleet_weights import FleetWeights
    from skyctl.store.in_doubt import InDoubt
    from skyctl.store.locks import Holder
    from skyctl.store.state import ServerRow

_CONDITIONS = {
    ReplicaState.QUARANTINED: Condition.QUARANTINED,
    ReplicaState.UNREACHABLE: Condition.UNREACHABLE,
    ReplicaState.UNSUPERVISED: Condition.UNSUPERVISED,
    ReplicaState.DEAD: Condition.FAILED,
    ReplicaState.FAILED: Condition.FAILED,
    ReplicaState.STOPPED: Condition.NOT_RUNNING,
}
"""What is the matter with a process in this state; in any other, it is busy."""


def assess(
    replicas: Sequence[ReplicaStatus],
    router: RouterStatus | None,
    tinker: FrontStatus | None = None,
    *,
    pushing: bool = False,
    operation: OperationKind | None = None,
    canary: RunningCanary | None = None,
) -> tuple[Health, tuple[Finding, ...]]:
    """The verdict over a fleet, and the reasons if it is not healthy.

    `operation`: one of this kind is under way. `pushing`: a push is, and two versions are
    fine meanwhile; without one, a server that is updating is still being admitted.
    """
    reasons = [*_processes(replicas, router, tinker, operation)]
    versions = {r.weight_version for r in replicas if r.state.as_intended and not _tries(r, canary)}
    if len(versions) > 1 and not pushing:
        listed = ", ".join(sorted(str(v or "base") for v in versions))
        mixed = f"weights are mixed, servers hold: {listed}"
        reasons.append(Finding("", Condition.MIXED, mixed, hint="skyctl recover"))
    # one that does not answer may still have a process of ours
    if not any(
        r.state.lives or (r.state is ReplicaState.UNREACHABLE and r.pid is not None)
        for r in replicas
    ):
        return Health.DOWN, tuple(reasons)
    processes: list[ReplicaStatus | FrontStatus] = [*replicas]
    processes += [front for front in (router, tinker) if front is not None]
    answering = [r for r in replicas if r.state is ReplicaState.READY and r.routed is not False]
    # a fleet of prefill and decode servers needs both
    answers = {r.role for r in answering} == {r.role for r in replicas}
    answers = answers and (router is None or router.state is ReplicaState.READY)
    if any(reason.fault for reason in reasons):
        return Health.DEGRADED if answers else Health.UNAVAILABLE, tuple(reasons)
    if answers:
        complete = all(process.state is ReplicaState.READY for process in processes)
        health = Health.HEALTHY if complete else Health.PARTIAL
    else:
        health = _without_answers({process.state for process in processes}, pushing, operation)
        if health is Health.UNAVAILABLE:
            unrouted = "the router sends requests to no server"
            reasons.append(Finding("", Condition.NOT_ROUTED, unrouted, hint="skyctl doctor"))
    return health, (*reasons, *_requests(health, replicas), *_canary(canary))


def _tries(replica: ReplicaStatus, canary: RunningCanary | None) -> bool:
    """Whether it serves the canary, as it is to."""
    if canary is None or canary.stage is not CanaryStage.SERVING:
        return False
    return replica.name in canary.servers and replica.weight_version == canary.version


def _canary(canary: RunningCanary | None) -> Iterator[Finding]:
    if canary is not None:
        names, share = ", ".join(canary.servers), percent(canary.share)
        version = canary.version or "a new version"
        detail = f"canary {version} is {canary.stage} on {names}, for {share} of the requests"
        yield _requested("", detail, "skyctl canary status")


def _without_answers(
    states: set[ReplicaState], pushing: bool, operation: OperationKind | None
) -> Health:
    """The health of a sound fleet that answers no user."""
    if operation is OperationKind.DOWN:
        return Health.STOPPING
    if pushing and ReplicaState.UPDATING in states:
        return Health.UPDATING
    if any(state.busy or state is ReplicaState.STOPPED for state in states):
        return Health.STARTING
    if ReplicaState.PAUSED in states:
        return Health.PAUSED
    return Health.ASLEEP if ReplicaState.ASLEEP in states else Health.UNAVAILABLE


def _requests(health: Health, replicas: Sequence[ReplicaStatus]) -> Iterator[Finding]:
    """What was requested and keeps users from servers, and what ends it ("": it ends by itself)."""
    for state, effect, end in (
        (ReplicaState.PAUSED, "requests wait", "skyctl resume"),
        (ReplicaState.ASLEEP, "requests are refused", "skyctl wake"),
        (ReplicaState.UPDATING, "requests wait or are refused", ""),
    ):
        names = [replica.name for replica in replicas if replica.state is state]
        if health is Health(state) and len(names) == len(replicas):
            yield _requested("", f"the fleet is {state}: {effect}", end)
        elif names:
            message = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {state}"
            if health is Health(state):  # the others answer nobody
                message += f": {effect}"
            yield _requested("", message, end and f"{end} {' '.join(names)}")


def _requested(name: str, detail: str, hint: str = "") -> Finding:
    return Finding(name, Condition.REQUESTED, detail, hint=hint, severity=Severity.OK)


def _processes(
    replicas: Sequence[ReplicaStatus],
    router: RouterStatus | None,
    tinker: FrontStatus | None,
    operation: OperationKind | None,
) -> Iterator[Finding]:
    """What keeps each server and front from being ready."""
    for replica in replicas:
        if not replica.state.as_intended:
            death = replica.restart_reason if replica.state is ReplicaState.STARTING else ""
            hint = _hint(replica)
            yield _not_ready(replica.name, replica, replica.reason or death, hint, operation)
        elif replica.state is not ReplicaState.UPDATING and (
            foreign := foreign_version(replica.weight_version, replica.reported_version)
        ):
            pushed = "a program other than skyctl, or another fleet, pushed to it"
            restarted = replica.reported_version == UNLABELLED
            detail = f"{foreign}: {'it was started again' if restarted else pushed}"
            hint = "compare: skyctl weights verify; or put it right: skyctl recover"
            yield Finding(replica.name, Condition.OTHER_LABEL, detail, hint=hint)
    for name, front in (("router", router), ("tinker", tinker)):
        if front is not None and front.state is not ReplicaState.READY:
            unreachable = front.state is ReplicaState.UNREACHABLE
            hint = "skyctl doctor" if unreachable else f"skyctl logs {name}"
            hint = "" if front.state.in_transition else hint
            yield _not_ready(name, front, front.reason, hint, operation)
    if tinker is not None and tinker.state is ReplicaState.READY and tinker.reason:
        detail = f"reports: {tinker.reason}"
        yield Finding("tinker", Condition.FAILED, detail, hint="skyctl logs tinker")


def _not_ready(
    name: str,
    process: ReplicaStatus | FrontStatus,
    reason: str,
    hint: str,
    operation: OperationKind | None,
) -> Finding:
    """About a process that does not serve; it is as requested unless it died."""
    state = process.state
    detail = f"is {state}" + (f": {reason}" if reason else "")
    begins = state in (ReplicaState.STARTING, ReplicaState.STOPPING) and not process.restart_reason
    if begins or (state is ReplicaState.STOPPED and operation):  # a restart stops it first
        return _requested(name, detail)
    return Finding(name, _CONDITIONS.get(state, Condition.BUSY), detail, hint=hint)


def _hint(replica: ReplicaStatus) -> str:
    """What to type about a server that does not serve; "" if that ends by itself."""
    if replica.state.given_up:
        return f"skyctl logs {replica.name}; then: skyctl restart {replica.name}"
    if replica.state is ReplicaState.STOPPED:
        return "skyctl up"
    return "skyctl recover" if replica.state.recoverable else ""


def unsupervised(
    running: Sequence[str], *, going_down: bool, stale: bool, problem: str
) -> tuple[Finding, ...]:
    """Why a fleet without its supervisor is not healthy. `running`: processes that live on;
    `stale`: the record is of an earlier boot; `problem`: why no supervisor could take over.
    """
    if running and going_down:
        detail = f"`skyctl down` was cut short; {', '.join(running)} still run"
        return (Finding("", Condition.HALF_DOWN, detail, hint="finish it: skyctl down"),)
    if running:
        detail = problem or f"the supervisor is gone; {', '.join(running)} run on unsupervised"
        hint = "take them over: skyctl recover; or stop them: skyctl down"
        return (Finding("", Condition.UNSUPERVISED, detail, hint=hint),)
    if stale:
        detail = "the machine was restarted since this fleet ran: its state is stale"
        return (Finding("", Condition.STALE, detail, hint="start it again: skyctl up"),)
    return ()


def from_intent(replicas: Sequence[ReplicaStatus], rows: Iterable[ServerRow]) -> list[Finding]:
    """Servers that something other than skyctl paused, resumed or put to sleep."""
    intended = {row.name: row.intended for row in rows}
    findings = []
    for replica in replicas:
        name, state = replica.name, replica.state
        intent = intended.get(name, "running")
        if state is ReplicaState.READY and intent == "paused":
            findings.append(drift(name, "is meant to be paused and runs", "skyctl pause"))
        elif state is ReplicaState.PAUSED and intent == "running":
            findings.append(drift(name, "is meant to run and is paused", "skyctl resume"))
        elif intent == "asleep" and state in (ReplicaState.READY, ReplicaState.PAUSED):
            findings.append(drift(name, "is meant to sleep and is awake", "skyctl sleep"))
        elif intent != "asleep" and state is ReplicaState.ASLEEP:
            findings.append(drift(name, "is meant to be awake and sleeps", "skyctl wake"))
        elif not state.as_intended:
            condition = _CONDITIONS.get(state, Condition.BUSY)
            detail = f"is meant to run and is {state}"
            findings.append(drift(name, detail, _hint(replica), condition))
    return findings


def from_weights(status: FleetStatus) -> list[Finding]:
    """Servers at a weight version other than the fleet's."""
    version, again = status.weight_version, "push again: skyctl sync-weights CKPT"
    return [
        drift(
            replica.name,
            f"has weights {replica.weight_version or 'base'}, the fleet {version}",
            again,
            Condition.WRONG_VERSION,
        )
        for replica in status.replicas
        if version is not None
        and not _tries(replica, status.canary)
        and replica.state.as_intended
        and replica.weight_version != version
    ]


def from_routing(status: FleetStatus, workers: Collection[str] | None = None) -> list[Finding]:
    """Ready servers missing from the router, and servers it must not send requests to. `workers`:
    the URLs that it lists, as it was asked now.
    """
    findings = []
    attached = status.supervised is None
    for replica in status.replicas:
        listed = replica.routed if workers is None else replica.url in workers
        if listed is False and replica.state is ReplicaState.READY:
            hint = "wait a moment, then: skyctl logs router"
            hint = f"add {replica.url} to the router" if attached else hint
            detail, condition = "is ready, and the router does not list it", Condition.NOT_ROUTED
        elif listed and replica.state.fails_requests:
            hint = f"requests sent there fail: skyctl restart {replica.name}"
            hint = f"take {replica.url} out of the router" if attached else hint
            detail, condition = f"is {replica.state}, and the router lists it", Condition.MISROUTED
        else:
            continue
        findings.append(Finding(replica.name, condition, detail, hint=hint))
    return findings


def drift(
    name: str, detail: str, hint: str, condition: Condition = Condition.OTHER_INTENT
) -> Finding:
    """A difference from the fleet file or the intended state."""
    return Finding(name, condition, detail, hint=hint, severity=Severity.WARNING)


def stopped(holder: Holder) -> Finding:
    """A command that is stopped: recovery ends it. A program that uses skyctl is its user's."""
    action = Action.END if holder.is_command else Action.NOTHING
    return Finding("holder", Condition.STOPPED, str(holder), action, holder.hint(""))


def foreign_version(recorded: str | None, reported: str | None) -> str:
    """The version a server reports, if it is not the one this fleet gave it; else ""."""
    if label_matches(reported, recorded):
        return ""
    return f"says that it holds {reported}, and this fleet gave it {recorded or 'nothing'}"


def judge_dead(name: str, *, stale: bool, orphans: Sequence[int], others_live: bool) -> Finding:
    """About a server that died without a supervisor; `orphans`: its processes that live on."""
    if stale:
        return Finding(name, Condition.STALE, "the machine was restarted since it ran")
    if orphans:
        pids = ", ".join(map(str, orphans))
        detail = f"its server is gone and left processes behind (pid {pids})"
        return Finding(name, Condition.ORPHANED, detail, Action.END)
    action = Action.RESTART if others_live else Action.NOTHING
    return Finding(name, Condition.FAILED, "it died without a supervisor", action)


def judge(
    seen: Observed,
    row: ServerRow,
    record: InDoubt | None,
    weights: FleetWeights,
    *,
    ours: bool,
) -> Finding:
    """Diagnose one server. `ours`: its process can be restarted."""
    name = seen.server
    replace = Action.RESTART if ours else Action.QUARANTINE
    problem = seen.problem.removeprefix(f"{name}: ")
    if seen.state is not None and seen.state.given_up:
        return Finding(name, Condition.FAILED, problem, Action.RESTART)
    if seen.state is not None and seen.state.busy:
        return Finding(name, Condition.BUSY, seen.state)
    if not seen.engine:
        if seen.http:
            detail = f"its front end answers and its engine does not ({problem})"
            return Finding(name, Condition.STUCK, detail, replace)
        return Finding(name, Condition.UNREACHABLE, problem, replace)
    if record is not None and record.half_updated:
        return Finding(name, Condition.HALF_UPDATED, record.reason, Action.PUSH)
    back = Action.RESTART if ours and weights.version is None else Action.PUSH
    asleep = seen.sleep_level or seen.paused
    if not (ours or asleep) and is_empty(row.sleep_level, seen.version, row.weight_version):
        detail = "a level-2 sleep discarded its weights, and another program woke it"
        return Finding(name, Condition.HALF_UPDATED, detail, back)
    compared = not row.quarantine and (row.weight_version or weights.version) is not None
    if seen.version_problem and (record is not None or compared):
        reason = seen.version_problem.removeprefix(f"{name}: ")
        return Finding(
            name, Condition.STUCK, f"its weight version cannot be read ({reason})", replace
        )
    if record is not None:
        restarted = _restarted(seen, row, record, ours=ours)
        return _judge_frozen(name, row, record, weights, back, restarted)
    if row.quarantine:
        return Finding(
            name, Condition.QUARANTINED, row.quarantine, Action.RESTART if ours else Action.PUSH
        )
    foreign = foreign_version(row.weight_version, seen.version)
    if foreign and row.weight_version is not None:
        return Finding(name, Condition.WRONG_VERSION, foreign, back)
    # a server that skyctl did not start, and that no push reached, reports what it holds
    holds = row.weight_version or (None if ours else seen.version)
    if behind := _behind(holds, row, weights, ours=ours):
        return Finding(name, Condition.WRONG_VERSION, behind, back)
    if foreign and ours:  # perhaps a trainer that pushes by itself: not ours to repair
        return healthy(name, foreign)
    if seen.sleep_level and not row.sleep_level:
        detail = f"asleep at level {seen.sleep_level}, which is not on record"
        return healthy(name, detail, "type: skyctl wake")
    if seen.paused and row.intended == "running":
        return healthy(name, "paused, and not by this fleet", "type: skyctl resume")
    return healthy(name, row.intended if row.intended != "running" else "")


def healthy(name: str, detail: str = "", hint: str = "") -> Finding:
    """About a server that recovery has nothing to do for."""
    return Finding(name, Condition.HEALTHY, detail, hint=hint, severity=Severity.OK)


def _judge_frozen(
    name: str, row: ServerRow, record: InDoubt, weights: FleetWeights, back: Action, restarted: str
) -> Finding:
    """A server that a push froze, whose weights are whole; `back` brings it to the fleet's."""
    version = record.version or row.weight_version
    # the fleet moved on without it; a server that a push has touched belongs to the fleet
    if wrong := _behind(version, row, weights, ours=True) or restarted:
        return Finding(name, Condition.WRONG_VERSION, wrong, back)
    if record.woken:
        return Finding(name, Condition.WOKEN, record.reason, Action.SLEEP)
    return Finding(name, Condition.FROZEN, record.reason, Action.RESUME)


def _restarted(seen: Observed, row: ServerRow, record: InDoubt, *, ours: bool) -> str:
    """How its label shows that it was started again since a push left it, not by skyctl; or "". A
    label that the push owes it is not on it yet.
    """
    if ours or record.version or row.weight_version is None:
        return ""
    return foreign_version(row.weight_version, seen.version)


def _behind(version: str | None, row: ServerRow, weights: FleetWeights, *, ours: bool) -> str:
    """How a server's version differs from the fleet's, or "". Before a first push, a server that is
    not ours may have been started with anything.
    """
    if (version is None, weights.version is None, not ours).count(True) > 1:
        return ""
    if version == weights.version:
        digests = row.checkpoint_digest, weights.checkpoint_digest
        other = all(digests) and digests[0] != digests[1] and row.weight_version == version
        return f"holds other files than the fleet under the label {version}" if other else ""
    return f"holds {version or 'the base weights'}, the fleet {weights.version or 'its base'}"

"""Checks a running fleet against its intended state. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyctl import engines
from skyctl.core import findings
from skyctl.core.diagnosis import from_routing
from skyctl.core.findings import Condition, Severity
from skyctl.core.status import FleetStatus, Health
from skyctl.doctor.check_line import CheckLine, Result, error, ok, run_checks, warning
from skyctl.push.verify import comparable
from skyctl.states import ReplicaState
from skyctl.store.journal import PushRecord
from skyctl.store.server_names import normalized
from skyctl.store.state import ServerRow
from skyctl.units import count_of, format_seconds

LONG_PAUSE_S = 600.0
_SUPERVISION = (Condition.UNSUPERVISED, Condition.HALF_DOWN)
_VERSIONS = (Condition.MIXED, Condition.OTHER_LABEL)
_ROUTING = (Condition.NOT_ROUTED, Condition.MISROUTED)


@dataclass(frozen=True)
class RunningFacts:
    """One fleet now. An unknown value is None, or missing from its mapping."""

    status: FleetStatus
    """What `skyctl status` shows."""
    drift: Sequence[findings.Finding] = ()
    """Where the fleet differs from its file."""
    rows: Sequence[ServerRow] = ()
    """What is on record of each server."""
    pushes: Sequence[PushRecord] = ()
    """Every push, newest first."""
    vllm: Mapping[str, str] = field(default_factory=dict)
    """The engine's version, by server."""
    workers: Sequence[str] | None = None
    """The URLs that the router lists."""
    verification: Mapping[str, Any] | None = None
    """A comparison of the servers' weights, made for this examination."""
    asks_token: Mapping[str, bool] = field(default_factory=dict)
    """Whether a server's control routes refuse requests without a token."""
    engine: str = engines.DEFAULT
    """The engine of all servers."""


def check_running(facts: RunningFacts) -> list[CheckLine]:
    """All checks of this section; one line for a fleet that is down."""
    if facts.status.health == Health.DOWN and not facts.status.replicas:
        message = f"fleet {facts.status.name} is not running"
        return [CheckLine("running", "supervisor", Severity.OK, message)]
    return run_checks("running", CHECKS, facts)


def supervisor(facts: RunningFacts) -> Iterator[Result]:
    """Is there a supervisor for what runs?"""
    status = facts.status
    if status.supervised:
        yield ok(f"fleet {status.name}: supervisor runs, pid {status.supervisor_pid}")
    yield from _reasons(facts, _SUPERVISION)


def replicas(facts: RunningFacts) -> Iterator[Result]:
    """Is every replica, and the router, as it should be?"""
    status = facts.status
    yield from _reasons(facts, set(Condition) - {*_SUPERVISION, *_VERSIONS})
    if not status.reasons:
        states = ", ".join(sorted({replica.state for replica in status.replicas}))
        yield ok(f"{count_of(len(status.replicas), 'replica')}: {states}")


def _reasons(facts: RunningFacts, conditions: Collection[Condition]) -> Iterator[Result]:
    """The reasons of `skyctl status` that are about these."""
    for reason in facts.status.reasons:
        if reason.condition in conditions:
            if reason.hint:
                yield reason.severity, reason.message, reason.hint
            else:  # it ends by itself
                yield warning(reason.message, "wait: skyctl wait --for ready")


def restarts(facts: RunningFacts) -> Iterator[Result]:
    """Which replicas were started again?"""
    for replica in facts.status.replicas:
        if replica.restarts:
            yield warning(
                f"{replica.name} was started again {count_of(replica.restarts, 'time')}"
                + (f", last: {replica.restart_reason}" if replica.restart_reason else ""),
                f"see why: skyctl logs {replica.name}",
            )


def paused_too_long(facts: RunningFacts) -> Iterator[Result]:
    """Is a server paused for so long that its resume was probably forgotten?"""
    for replica in facts.status.replicas:
        if replica.state is ReplicaState.PAUSED and (replica.state_s or 0.0) > LONG_PAUSE_S:
            yield warning(
                f"{replica.name} has been paused for {format_seconds(replica.state_s or 0.0)}; "
                "its requests wait",
                f"skyctl resume {replica.name}",
            )


def drifted(facts: RunningFacts) -> Iterator[Result]:
    """Does the fleet match its file and its intended state?"""
    shown = {(reason.server, reason.condition) for reason in facts.status.reasons}
    for drift in facts.drift:
        if (drift.server, drift.condition) not in shown and drift.condition not in _ROUTING:
            yield warning(drift.message, drift.hint)


def vllm_versions(facts: RunningFacts) -> Iterator[Result]:
    """Do all servers run the same version? A push refuses to mix them."""
    versions, title = sorted(set(facts.vllm.values())), engines.ENGINES[facts.engine].title
    if len(versions) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in sorted(facts.vllm.items()))
        attached = facts.status.supervised is None
        fix = (
            "restart them with one version, where they were started"
            if attached
            else "skyctl restart"
        )
        yield error(f"servers run different versions of {title}: {listed}", fix)
    elif versions:
        yield ok(f"every server runs {title} {versions[0]}")


def weight_versions(facts: RunningFacts) -> Iterator[Result]:
    """Are all servers at one weight version, and do they report it?"""
    yield from _reasons(facts, _VERSIONS)


def weight_digests(facts: RunningFacts) -> Iterator[Result]:
    """Do servers of one version hold the same weights?"""
    if facts.verification is not None:
        yield from _verified(facts.verification)
        return
    versions = sorted({row.weight_version for row in facts.rows if row.weight_version})
    for version in versions:
        rows = [row for row in facts.rows if row.weight_version == version]
        for group in comparable(rows, lambda row: row.weights_digest or ""):
            digests: dict[str, list[str]] = {}
            for row in group:
                digests.setdefault(row.weights_digest or "", []).append(row.name)
            if len(digests) > 1:
                listed = "; ".join(f"{', '.join(n)} {d[:12]}" for d, n in digests.items())
                yield error(
                    f"servers at version {version} hold different weights: {listed}",
                    "push again: skyctl sync-weights CKPT",
                )


def router(facts: RunningFacts) -> Iterator[Result]:
    """Does the router list the servers it should, and no others?"""
    status = facts.status
    if status.router is None or facts.workers is None:
        return
    own = {normalized(replica.url): replica.url for replica in status.replicas if replica.url}
    listed = {own.get(normalized(url), url.rstrip("/")) for url in facts.workers}
    problems = [(f.severity, f.message, f.hint) for f in from_routing(status, listed)]
    if any(replica.state is ReplicaState.READY for replica in status.replicas):
        problems += [
            error(
                f"{replica.name} is paused, and the router sends it requests that wait",
                f"skyctl resume {replica.name}",
            )
            for replica in status.replicas
            if replica.url in listed and replica.state is ReplicaState.PAUSED
        ]
    for url in sorted(listed - {replica.url for replica in status.replicas}):
        removal = engines.routing(facts.engine).removal(status.router.url, url)
        problems.append(
            error(f"the router lists {url}, which is not a server of this fleet", removal)
        )
    yield from problems
    if not problems:
        yield ok(f"the router lists what it should: {count_of(len(listed), 'server')}")


def control_tokens(facts: RunningFacts) -> Iterator[Result]:
    """Do control routes refuse requests without a token?"""
    open_to_all = sorted(name for name, asks in facts.asks_token.items() if not asks)
    if open_to_all and facts.status.supervised is None:
        yield warning(
            f"{', '.join(open_to_all)}: control routes take requests without a token; every "
            "client that reaches these ports can replace the weights",
            "bind them to loopback, or start them with skyctl, which guards them",
        )
    elif open_to_all:
        yield warning(
            f"{', '.join(open_to_all)}: control routes take requests without a token; every "
            "user of this machine can replace the weights",
            "leave `auth` out of the fleet file; then: skyctl up",
        )
    elif facts.asks_token:
        yield ok("control routes of every server require a token")


def last_push(facts: RunningFacts) -> Iterator[Result]:
    """Did the latest push succeed?"""
    if not facts.pushes:
        return
    push = facts.pushes[0]
    if push.ok:
        frozen = push.result.get("freeze_window_s")
        shown = f", frozen for {format_seconds(frozen)}" if frozen else ""
        yield ok(f"{push.job} went well: {push.version}{shown}")
    else:
        reason = str(push.result.get("error", ""))
        yield warning(f"{push.job} failed: {reason}", f"look: skyctl jobs show {push.job}")


CHECKS = {
    "supervisor": supervisor,
    "replicas": replicas,
    "restarts": restarts,
    "paused": paused_too_long,
    "drift": drifted,
    "vllm-versions": vllm_versions,
    "weight-versions": weight_versions,
    "weight-digests": weight_digests,
    "router": router,
    "control-tokens": control_tokens,
    "last-push": last_push,
}


def _verified(report: Mapping[str, Any]) -> Iterator[Result]:
    servers = report["servers"]
    for row in servers:
        if row["as_recorded"] is False:
            yield error(
                f"{row['server']}: {row['detail']}",
                "another program may push to it; push again: skyctl sync-weights CKPT",
            )
    if report["agree"]:
        yield ok(f"{len(servers)} servers hold the same weights (verified now)")
    elif report["agree"] is False:
        listed = ", ".join(f"{row['server']} {row['digest'][:12] or '?'}" for row in servers)
        yield error(
            f"servers hold different weights: {listed}", "push again: skyctl sync-weights CKPT"
        )
    else:
        yield warning(
            "not every server could digest its weights", "see which: skyctl weights verify"
        )

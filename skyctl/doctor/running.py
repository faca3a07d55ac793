"""Checks a running fleet against its intended state. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyctl import engines
from skyctl.core.status import MIXED, TRANSIENT_STATES, FleetStatus
from skyctl.doctor.finding import About, Finding, Severity
from skyctl.push.arrangement import comparable
from skyctl.service.drift import Drift
from skyctl.store.journal import PushRecord
from skyctl.store.state import ServerRow
from skyctl.units import count_of, format_seconds

_about = About("running")
LONG_PAUSE_S = 600.0
# states whose servers a router may list
_MAY_BE_ROUTED = ("ready", "paused", "updating", "starting", "restarting", "unsupervised")


@dataclass(frozen=True)
class RunningFacts:
    """One fleet now. What is unknown is None or left out of its mapping.

    `vllm` and `versions` map a server to its vLLM's version and the weight version it reports;
    `workers` are the URLs the router lists; `verification` is a fresh comparison of the weights;
    `asks_token` maps a server to whether its control routes refuse requests without a token.
    """

    status: FleetStatus
    drift: Sequence[Drift] = ()
    rows: Sequence[ServerRow] = ()
    pushes: Sequence[PushRecord] = ()
    vllm: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    workers: Sequence[str] | None = None
    verification: Mapping[str, Any] | None = None
    asks_token: Mapping[str, bool] = field(default_factory=dict)
    engine: str = engines.DEFAULT


def check_running(facts: RunningFacts) -> list[Finding]:
    """All checks of this section; one line for a fleet that is down."""
    if facts.status.health == "down" and not facts.status.replicas:
        return [_about.ok("supervisor", f"fleet {facts.status.name} is not running")]
    return [finding for check in CHECKS for finding in check(facts)]


def supervisor(facts: RunningFacts) -> Iterator[Finding]:
    """Is there a supervisor for what runs?"""
    status = facts.status
    if status.supervised:
        yield _about.ok(
            "supervisor", f"fleet {status.name}: supervisor runs, pid {status.supervisor_pid}"
        )
    elif status.supervised is False:
        yield _about.error(
            "supervisor",
            f"fleet {status.name}: the supervisor is gone, its servers run on without restarts",
            "take them over: skyctl up; or stop them: skyctl down",
        )


def replicas(facts: RunningFacts) -> Iterator[Finding]:
    """Is every replica, and the router, as it should be?"""
    status = facts.status
    for reason in status.reasons:
        if reason.message.startswith(MIXED) or "supervisor is gone" in reason.message:
            continue  # they have their own checks
        on_the_way = any(f"is {state}" in reason.message for state in TRANSIENT_STATES)
        severity = Severity.WARNING if on_the_way else Severity.ERROR
        fix = reason.hint or "wait: skyctl wait --for ready"
        yield Finding("running", "replicas", severity, reason.message, fix)
    if not status.reasons:
        states = ", ".join(sorted({replica.state for replica in status.replicas}))
        yield _about.ok("replicas", f"{len(status.replicas)} replicas: {states}")
    for replica in status.replicas:
        if replica.restarts:
            yield _about.warning(
                "restarts",
                f"{replica.name} was started again {replica.restarts} times"
                + (f", last: {replica.restart_reason}" if replica.restart_reason else ""),
                f"see why: skyctl logs {replica.name}",
            )


def paused_too_long(facts: RunningFacts) -> Iterator[Finding]:
    """Did somebody forget to resume?"""
    for replica in facts.status.replicas:
        if replica.state == "paused" and (replica.state_s or 0.0) > LONG_PAUSE_S:
            yield _about.warning(
                "paused",
                f"{replica.name} has been paused for {format_seconds(replica.state_s or 0.0)}; "
                "its requests wait",
                f"skyctl resume --server {replica.name}",
            )


def drifted(facts: RunningFacts) -> Iterator[Finding]:
    """Does the fleet match its file and its intended state?"""
    for drift in facts.drift:
        yield _about.warning("drift", f"{drift.subject} {drift.message}", drift.hint)


def vllm_versions(facts: RunningFacts) -> Iterator[Finding]:
    """Do all servers run the same version? A push refuses to mix them."""
    found, title = sorted(set(facts.vllm.values())), engines.ENGINES[facts.engine].title
    if len(found) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in sorted(facts.vllm.items()))
        yield _about.error(
            "vllm-versions",
            f"servers run different versions of {title}: {listed}",
            "skyctl restart",
        )
    elif found:
        yield _about.ok("vllm-versions", f"every server runs {title} {found[0]}")


def weight_versions(facts: RunningFacts) -> Iterator[Finding]:
    """Is every server at the fleet's weight version, and does it report it?"""
    found = {r.name: r.weight_version for r in facts.status.replicas if r.state != "starting"}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {version or 'base'}" for name, version in found.items())
        yield _about.error(
            "weight-versions",
            f"servers are at different weight versions: {listed}",
            "push once more: skyctl sync-weights CKPT",
        )
    for name, recorded in found.items():
        said = facts.versions.get(name)
        if recorded is not None and said is not None and said != recorded:
            yield _about.error(
                "weight-versions",
                f"{name} says it has weights {said}, and {recorded} was pushed to it",
                "somebody else pushed to it; push once more: skyctl sync-weights CKPT",
            )


def weight_digests(facts: RunningFacts) -> Iterator[Finding]:
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
                yield _about.error(
                    "weight-digests",
                    f"servers at version {version} hold different weights: {listed}",
                    "push once more: skyctl sync-weights CKPT",
                )


def router(facts: RunningFacts) -> Iterator[Finding]:
    """Does the router list the servers it should, and no others?"""
    status = facts.status
    if status.router is None or facts.workers is None:
        return
    listed = {url.rstrip("/") for url in facts.workers}
    in_step = True
    ready = [r for r in status.replicas if r.state == "ready"]
    for replica in status.replicas:
        if replica.state == "ready" and replica.url not in listed:
            problem, fix = "is ready, and the router does not list it", "skyctl restart "
        elif replica.url in listed and replica.state not in _MAY_BE_ROUTED:
            problem, fix = f"is {replica.state}, and the router lists it", "skyctl restart "
        elif replica.url in listed and replica.state == "paused" and ready:
            problem, fix = "is paused, and the router sends it requests that wait", "skyctl resume "
        else:
            continue
        in_step = False
        target = f"--server {replica.name}" if "resume" in fix else replica.name
        yield _about.error("router", f"{replica.name} {problem}", fix + target)
    for url in sorted(listed - {replica.url for replica in status.replicas}):
        in_step = False
        yield _about.error(
            "router",
            f"the router lists {url}, which is no server of this fleet",
            engines.routing(facts.engine).removal(status.router.url, url),
        )
    if in_step:
        yield _about.ok(
            "router", f"the router lists what it should: {count_of(len(listed), 'server')}"
        )


def control_tokens(facts: RunningFacts) -> Iterator[Finding]:
    """Can anybody who reaches a server's port control it?"""
    open_to_all = sorted(name for name, asks in facts.asks_token.items() if not asks)
    if open_to_all and facts.status.supervised is None:
        yield _about.warning(
            "control-tokens",
            f"{', '.join(open_to_all)}: control routes ask for no token; whoever reaches these "
            "ports can replace the weights",
            "bind them to loopback, or start them with skyctl, which guards them",
        )
    elif open_to_all:
        yield _about.warning(
            "control-tokens",
            f"{', '.join(open_to_all)}: control routes ask for no token; every user of this "
            "machine can replace the weights",
            "leave `auth` out of the fleet file; then: skyctl up",
        )
    elif facts.asks_token:
        yield _about.ok("control-tokens", "control routes of every server ask for a token")


def last_push(facts: RunningFacts) -> Iterator[Finding]:
    """Did the latest push succeed?"""
    if not facts.pushes:
        return
    push = facts.pushes[0]
    if push.ok:
        frozen = push.result.get("freeze_window_s")
        shown = f", frozen for {format_seconds(frozen)}" if frozen else ""
        yield _about.ok("last-push", f"{push.job} went well: {push.version}{shown}")
    else:
        error = str(push.result.get("error", ""))
        yield _about.warning(
            "last-push", f"{push.job} failed: {error}", f"look: skyctl jobs show {push.job}"
        )


CHECKS: tuple[Callable[[RunningFacts], Iterator[Finding]], ...] = (
    supervisor,
    replicas,
    paused_too_long,
    drifted,
    vllm_versions,
    weight_versions,
    weight_digests,
    router,
    control_tokens,
    last_push,
)


def _verified(report: Mapping[str, Any]) -> Iterator[Finding]:
    servers = report["servers"]
    for row in servers:
        if row["as_recorded"] is False:
            yield _about.error(
                "weight-digests",
                f"{row['server']}: {row['detail']}",
                "somebody else may push to it; push once more: skyctl sync-weights CKPT",
            )
    if report["agree"]:
        yield _about.ok(
            "weight-digests", f"{len(servers)} servers hold the same weights (verified now)"
        )
    elif report["agree"] is False:
        listed = ", ".join(f"{row['server']} {row['digest'][:12] or '?'}" for row in servers)
        yield _about.error(
            "weight-digests",
            f"servers hold different weights: {listed}",
            "push once more: skyctl sync-weights CKPT",
        )
    else:
        yield _about.warning(
            "weight-digests",
            "not every server could digest its weights",
            "see which: skyctl weights verify",
        )

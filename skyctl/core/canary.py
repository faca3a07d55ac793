"""A canary: another version on some servers, with a share of the requests. What it may be, how the
router's list gives it that share, and when its rules end it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from skyctl.engines.traffic import ServerTraffic
from skyctl.errors import UsageError
from skyctl.push.request import PushRequest
from skyctl.store.fleet_weights import Canary, CanaryStage
from skyctl.units import count_of, parse_duration, percent

if TYPE_CHECKING:
    from skyctl.core.plan import FleetPlan

LEAST_SHARE, LARGEST_SHARE = 0.01, 0.99
_PRECISION = 0.015
"""How far the smaller share may be off, as a part of itself."""
_MOST_ENTRIES = 300
_FEWEST_REQUESTS = 20
_RULE = re.compile(r"^\s*(errors|ttft_p95|latency_p95)\s*>\s*(\S+)\s*$")


@dataclass(frozen=True)
class CanaryRequest:
    """What is to be done about a fleet's canary."""

    action: Literal["status", "start", "promote", "rollback"] = "status"
    """What to do; each returns the status."""
    push: PushRequest | None = None
    """The checkpoint of a canary that starts."""
    share: float = 0.0
    """Of all requests, between 0 and 1."""
    replicas: int = 0
    """On how many servers; 0: as many as the share is of them."""
    rollback_if: tuple[str, ...] = ()
    """What ends it, each as `METRIC>LIMIT`."""
    promote_after_s: float | None = None
    """How long it serves before it is promoted; None: until that is requested."""


@dataclass(frozen=True)
class VersionTraffic:
    """What one of the two versions has answered since the canary began to serve."""

    version: str
    """Its label, "base" for what the servers were started with."""
    servers: tuple[str, ...]
    """Those that are to serve it."""
    share: float
    """Its share of the requests, as requested."""
    seen: float | None
    """Its share as counted; None before the first request."""
    requests: int
    """Answers, counted by its servers."""
    errors: int
    """Those with a status of 500 or above."""
    first_token_s: tuple[float, float] | None
    """Seconds until the first token: the median and the 95th percentile."""
    latency_s: tuple[float, float] | None
    """Seconds until the last token: the same."""
    output_tokens: tuple[float, float] | None
    """Generated tokens of a request: the same."""


@dataclass(frozen=True)
class CanaryStatus:
    """A fleet's canary, and how it compares."""

    stage: CanaryStage | None = None
    """None: there is none."""
    began_at: float = 0.0
    """In seconds since the epoch."""
    versions: tuple[VersionTraffic, ...] = ()
    """The canary's, and the fleet's."""
    rollback_if: tuple[str, ...] = ()
    """What ends it."""
    promote_after_s: float | None = None
    """How long it serves before it is promoted."""
    job: str = ""
    """The push that was begun."""
    operation: int = 0
    """The number of the operation that was begun."""


@dataclass(frozen=True)
class Rule:
    """Ends a canary whose metric is above the limit."""

    metric: str
    limit: float

    @classmethod
    def parsed(cls, text: str) -> Rule:
        """From `errors>1%` or `ttft_p95>2s`. Raises UsageError."""
        match = _RULE.match(text)
        try:
            if match is None:
                raise ValueError
            metric, value = match.groups()
            limit = parse_share(value) if metric == "errors" else parse_duration(value)
        except ValueError:
            raise UsageError(
                f"{text!r} is not a rule",
                hint="write it like errors>1%, ttft_p95>2s or latency_p95>30s",
            ) from None
        return cls(metric, limit)

    def measured(self, traffic: ServerTraffic) -> float | None:
        """The canary's value; None if its traffic does not say it, or says too little."""
        if traffic.requests < _FEWEST_REQUESTS:
            return None
        if self.metric == "errors":
            return traffic.errors / traffic.requests
        times = traffic.first_token_s if self.metric == "ttft_p95" else traffic.latency_s
        return times.quantile(0.95)

    def broken_by(self, traffic: ServerTraffic) -> str:
        """How the canary's traffic breaks it; "" if it does not, or cannot be measured."""
        value = self.measured(traffic)
        if value is None or value <= self.limit:
            return ""
        shown, limit = f"{value:.3g} s", f"{self.limit:g} s"
        if self.metric == "errors":
            shown = f"{percent(value)} ({traffic.errors} of {traffic.requests})"
            limit = percent(self.limit)
        return f"{self.metric} {shown} > {limit}"


def parse_share(text: str) -> float:
    """A share from `10%` or `0.1`. Raises ValueError."""
    share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= share <= 1:
        raise ValueError(text)
    return share


def servers_for(share: float, replicas: int, names: Sequence[str]) -> tuple[str, ...]:
    """The servers of a canary. The first: `scale` removes the last.

    Raises:
        UsageError: it cannot have this share, or not on so many.
    """
    if not LEAST_SHARE <= share <= LARGEST_SHARE:
        raise UsageError(
            f"--share {percent(share)}: a canary gets 1% to 99% of the requests",
            hint="for all of them: skyctl sync-weights CKPT",
        )
    count = replicas or min(max(1, round(share * len(names))), len(names) - 1)
    if not 0 < count < len(names):
        raise UsageError(
            f"a canary on {count_of(max(count, 1), 'server')} leaves none of "
            f"{count_of(len(names), 'server')} to the fleet's version",
            hint="it needs two servers: skyctl scale 2" if len(names) < 2 else "fewer --replicas",
        )
    if _closest(share, count, len(names) - count)[0] > _PRECISION:
        raise UsageError(
            f"{percent(share)} of the requests cannot be given to {count} of "
            f"{count_of(len(names), 'server')}: too many entries in the router's list",
            hint="leave --replicas out",
        )
    return tuple(names[:count])


def _closest(share: float, canaries: int, others: int) -> tuple[float, tuple[int, int]]:
    """How often the router lists each server of a canary, and each other, so that its requests,
    which go to all entries alike, have this share: the fewest entries within the precision. Before
    it how far off they are, as a part of the smaller share.
    """
    ratio = share / (1 - share) * others / canaries
    closest = (1.0, (1, 1))
    for canary in range(1, _MOST_ENTRIES):
        other = max(1, round(canary / ratio))
        entries = canary * canaries + other * others
        error = abs(canary * canaries / entries - share) / min(share, 1 - share)
        if entries > _MOST_ENTRIES:
            break
        closest = min(closest, (error, (canary, other)))
        if error <= _PRECISION:
            break
    return closest


def entries(canary: Canary, routed: Collection[str]) -> dict[str, int]:
    """How often the router lists each of the servers that it routes to."""
    canaries = [name for name in routed if name in canary.servers]
    others = [name for name in routed if name not in canary.servers]
    if not canaries or not others:
        return {}
    _, weights = _closest(canary.share, len(canaries), len(others))
    return dict.fromkeys(canaries, weights[0]) | dict.fromkeys(others, weights[1])


def refuse_plan(plan: FleetPlan, canary: Canary | None, counting: Collection[str]) -> None:
    """Raise UsageError for a fleet that cannot have a canary, or not this one. `counting`: the
    router policies that give every server the same number of requests.
    """
    if plan.router is None:
        raise UsageError(
            f"fleet {plan.name} has no router that skyctl runs: nothing shares its requests out",
            hint="set `router: {policy: round_robin}` in the fleet file, then: skyctl up",
        )
    section = plan.config.router
    policy = "" if isinstance(section, str) else section.policy
    if policy not in counting:
        raise UsageError(
            f"the router's policy {policy} gives servers requests by load or content, not by share",
            hint="set `router: {policy: round_robin}` in the fleet file, then: skyctl up",
        )
    if plan.config.pairs:
        raise UsageError(
            "a canary would have decode servers go on from what prefill servers computed with "
            "other weights: the router pairs any two of them",
        )
    names = {spec.name for spec in plan.servers}
    if canary is not None and not (names >= {*canary.servers} and names > {*canary.servers}):
        raise UsageError(
            f"the canary needs {', '.join(canary.servers)} and another server",
            hint="end it first: skyctl canary promote, or skyctl canary rollback",
        )


def compared(
    canary: Canary, fleet_version: str | None, counted: Mapping[str, ServerTraffic]
) -> tuple[VersionTraffic, ...]:
    """Both versions side by side; `counted` is what each server has answered, all if known."""
    others = tuple(name for name in counted if name not in canary.servers)
    groups = (
        (canary.weights.version or "", canary.servers, canary.share),
        (fleet_version or "base", others, 1 - canary.share),
    )
    sums = [total(counted, names) for _, names, _ in groups]
    requests = sum(traffic.requests for traffic in sums)
    return tuple(
        VersionTraffic(
            version,
            names,
            share,
            traffic.requests / requests if requests else None,
            traffic.requests,
            traffic.errors,
            *(
                _percentiles(histogram.quantile(0.5), histogram.quantile(0.95))
                for histogram in (traffic.first_token_s, traffic.latency_s, traffic.output_tokens)
            ),
        )
        for (version, names, share), traffic in zip(groups, sums, strict=True)
    )


def total(counted: Mapping[str, ServerTraffic], names: Collection[str]) -> ServerTraffic:
    """What these servers have answered together."""
    traffic = ServerTraffic()
    for name in names:
        traffic = traffic.combined(counted.get(name, ServerTraffic()))
    return traffic


def _percentiles(median: float | None, high: float | None) -> tuple[float, float] | None:
    return None if median is None or high is None else (median, high)


def verdict(
    canary: Canary, traffic: ServerTraffic | None, now: float, *, ready: bool
) -> tuple[Literal["rollback", "promote"] | None, str]:
    """What its rules demand now, and why. `traffic` is what its servers have answered, None if they
    do not say; `ready`: all of them serve it, and say. One that is not, or whose rules cannot all
    be checked, is not promoted.
    """
    if canary.stage is not CanaryStage.SERVING or traffic is None:
        return None, ""
    rules = [Rule.parsed(rule) for rule in canary.rollback_if]
    for rule in rules:
        if reason := rule.broken_by(traffic):
            return "rollback", reason
    due = canary.promote_after_s is not None and now - canary.began_at >= canary.promote_after_s
    checked = all(rule.measured(traffic) is not None for rule in rules)
    if due and ready and checked and traffic.requests >= _FEWEST_REQUESTS:
        return "promote", f"{count_of(traffic.requests, 'request')} without a broken rule"
    return None, ""

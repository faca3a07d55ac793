"""Digests of what servers hold before a push: what an undone push must have left in place."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import PreflightError
from skyctl.http.fanout import fan_out
from skyctl.http.target import ServerTarget
from skyctl.push.server_facts import ServerFacts
from skyctl.push.sites import Holds, Site
from skyctl.push.verify import HOW_TO_DIGEST, CannotDigest, weights_digest


async def weigh(
    sites: Sequence[Site], facts: Sequence[ServerFacts], *, timeout_s: float
) -> list[str]:
    """Fill `digest_before` of servers of which no digest is on record; notes about it.

    Not of those that sleep: their memory may be unmapped. One that fails to answer is only noted,
    as an earlier push may have left it half loaded.

    Raises:
        PreflightError: a server could not be verified after the push either.
    """
    by_name = {
        site.name: site
        for site, fact in zip(sites, facts, strict=True)
        if not (fact.asleep or site.asleep or site.server.weights_awake or site.server.sleep_level)
        and not site.server.weights_digest
        and site.holds is Holds.OLD
    }

    async def ask(target: ServerTarget) -> PreflightError | None:
        """Why its weights can never be verified; None where they can."""
        try:
            found = await weights_digest(by_name[target.name].vllm, timeout_s=timeout_s)
        except CannotDigest as error:
            return PreflightError(error.message, hint=error.hint)
        if found.compared is None:
            return PreflightError(
                f"{target.name} cannot be compared with the checkpoint: its workers lack skyctl's "
                "extension",
                hint=HOW_TO_DIGEST,
            )
        by_name[target.name].digest_before = found.digest
        return None

    targets = [site.target for site in by_name.values()]
    outcomes = await fan_out(targets, ask, timeout_s=timeout_s)
    for outcome in outcomes:
        if outcome.value is not None:
            raise outcome.value
    return [
        f"{outcome.server} could not be looked at before the push: {outcome.detail}"
        for outcome in outcomes
        if not outcome.ok
    ]

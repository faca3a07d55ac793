"""The outcome of a push: its result, or the error that says how each server was left."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import PushError, SkyctlError
from skyctl.push.delivery import Delivery
from skyctl.push.preflight import Prepared
from skyctl.push.request import PushResult
from skyctl.push.run import Run
from skyctl.push.sites import Site, Weights


def cut_short(run: Run, sites: Sequence[Site], error: BaseException) -> BaseException:
    """The error to raise when a push ends midway; says which servers must not be resumed.

    An error that already says how each server was left stays as it is.
    """
    if isinstance(error, PushError) and "servers" in error.details:
        return error
    in_doubt = [site for site in sites if site.weights in (Weights.UNKNOWN, Weights.NEW)]
    for site in in_doubt:
        site.failure = site.failure or f"the push was interrupted ({error!r})"
        run.observer.server(site.name, "quarantined", site.failure)
    if isinstance(error, SkyctlError) or not isinstance(error, Exception):
        return error
    return PushError(
        f"the push broke off: {error!r}",
        details={"servers": [site.report().to_json() for site in sites]},
    )


def settle(run: Run, prepared: Prepared, label: str, delivery: Delivery) -> PushResult:
    """The result; raises PushError if a server is not at the new version and thawed."""
    result = result_of(run, prepared, label, delivery)
    failed = [server for server in result.servers if not server.ok]
    if run.observer.failures:
        result.notes.append(f"progress could not be recorded: {run.observer.failures[0]!r}")
    if not failed:
        return result
    for server in failed:
        if server.state == "quarantined":
            run.observer.server(server.server, "quarantined", server.detail)
    updated = [server.server for server in result.servers if server.ok]
    done = f"{', '.join(updated)} at {label}; " if updated else ""
    stay = ", ".join(f"{server.server} {server.state}" for server in failed)
    raise PushError(
        f"the push failed on {len(failed)} of {len(result.servers)} servers: {done}{stay} "
        f"({failed[0].detail})",
        hint=f"skyctl restart {failed[0].server}",
        details={**result.to_json(), "learned": result.learned},
    )


def result_of(
    run: Run, prepared: Prepared, label: str, delivery: Delivery | None = None
) -> PushResult:
    """The result as of now; a dry run has no delivery."""
    total = prepared.checkpoint.total_bytes
    moving_s = sum(run.stages.get(name, 0.0) for name in ("update", "finish"))
    frozen_s = 0.0 if run.froze_at is None else run.thawed_at - run.froze_at
    dry = run.request.dry_run
    skipped = prepared.skipped
    sent = total - (skipped["bytes"] if skipped is not None else 0)
    return PushResult(
        version=label,
        checkpoint=prepared.source,
        checkpoint_digest=prepared.identity,
        transport=prepared.choice.name,
        total_bytes=total,
        chunks=prepared.chunks,
        seconds=run.clock() - run.began,
        gb_per_s=sent / moving_s / 1e9 if moving_s else 0.0,
        freeze_window_s=frozen_s,
        stages=dict(run.stages),
        servers=[site.report() for site in prepared.sites],
        content_digest=delivery.content_digest if delivery is not None else "",
        skipped=skipped,
        content=delivery.content if delivery is not None else None,
        canary=[result.to_json() for result in run.canary],
        notes=list(run.notes),
        compared=_compared(prepared),
        layout_share=sum(site.copied for site in prepared.sites) / len(prepared.sites),
        learned=run.learned.to_json(),
        plan=prepared.to_json() if dry else None,
    )


def _compared(prepared: Prepared) -> dict[str, int] | None:
    """How much of the checkpoint every verified server was seen to hold: the least of them."""
    seen = [s.compared for s in prepared.sites if s.compared and s.weights is Weights.VERIFIED]
    if not (seen and prepared.source):
        return None
    least = min(seen, key=lambda one: one.bytes)
    return {
        "tensors": least.tensors,
        "of_tensors": len(prepared.checkpoint.tensors),
        "bytes": least.bytes,
        "of_bytes": prepared.checkpoint.total_bytes,
    }

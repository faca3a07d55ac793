"""How a push left each server, as its result or its error says it."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.errors import PushError, SkyctlError
from skyctl.push.check import Checked
from skyctl.push.phases import Delivered
from skyctl.push.request import PushResult
from skyctl.push.run import Run
from skyctl.push.servers import Holds, PushedServer
from skyctl.states import PushStage, PushState
from skyctl.units import count_of


def cut_short(run: Run, servers: Sequence[PushedServer], error: BaseException) -> BaseException:
    """The error to raise when a push ends midway; says which servers must not be resumed.

    An error that already says how each server was left stays as it is.
    """
    if isinstance(error, PushError) and "servers" in error.details:
        return error
    in_doubt = [server for server in servers if server.holds in (Holds.UNKNOWN, Holds.NEW)]
    for server in in_doubt:
        server.failure = server.failure or f"the push was interrupted ({error!r})"
        run.observer.server(server.name, PushState.QUARANTINED, server.failure)
    if isinstance(error, SkyctlError) or not isinstance(error, Exception):
        return error
    return PushError(
        f"the push broke off: {error!r}",
        details={"servers": [server.report().to_json() for server in servers]},
    )


def conclude(run: Run, delivered: Delivered) -> PushResult:
    """The result; raises PushError if a server is not at the new version and thawed."""
    result = result_of(
        run, delivered.checked, delivered.label, content_digest=delivered.content_digest
    )
    behind = [server for server in result.servers if not server.ok]
    if run.observer.failures:
        result.notes.append(f"progress could not be recorded: {run.observer.failures[0]!r}")
    if not behind:
        return result
    for server in behind:
        if server.state == PushState.QUARANTINED:
            run.observer.server(server.server, PushState.QUARANTINED, server.detail)
    updated = [server.server for server in result.servers if server.ok]
    done = f"{', '.join(updated)} at {delivered.label}; " if updated else ""
    stay = ", ".join(f"{server.server} {server.state}" for server in behind)
    raise PushError(
        f"the push failed on {len(behind)} of {count_of(len(result.servers), 'server')}: "
        f"{done}{stay} ({behind[0].detail})",
        hint="skyctl recover",
        details={**result.to_json(), "learned": result.learned},
    )


def result_of(run: Run, checked: Checked, label: str, *, content_digest: str = "") -> PushResult:
    """The result as of now; a dry run has delivered nothing."""
    total = checked.source.whole.bytes
    moving_s = sum(run.stages.get(name, 0.0) for name in (PushStage.UPDATE, PushStage.FINISH))
    frozen_s = 0.0 if run.froze_at is None else run.thawed_at - run.froze_at
    dry = run.request.dry_run
    return PushResult(
        version=label,
        checkpoint=checked.source.path,
        checkpoint_digest=checked.source.identity,
        transport=checked.way.name,
        total_bytes=total,
        chunks=checked.plan.chunks,
        seconds=run.clock() - run.began,
        gb_per_s=total / moving_s / 1e9 if moving_s else 0.0,
        freeze_window_s=frozen_s,
        stages=dict(run.stages),
        servers=[server.report() for server in checked.servers],
        content_digest=content_digest,
        canary=[result.to_json() for result in run.canary],
        notes=list(run.notes),
        compared=_compared(checked),
        layout_share=sum(server.proof.copied for server in checked.servers) / len(checked.servers),
        ranks=run.request.ranks,
        learned=run.learned.to_json(),
        plan=checked.to_json() if dry else None,
    )


def _compared(checked: Checked) -> dict[str, int] | None:
    """How much of the checkpoint every verified server was seen to hold: the least of them."""
    seen = [
        server.proof.compared
        for server in checked.servers
        if server.proof.compared and server.holds is Holds.VERIFIED
    ]
    if not (seen and checked.source.whole.tensors):
        return None
    least = min(seen, key=lambda compared: compared.bytes)
    return {
        "tensors": least.tensors,
        "of_tensors": checked.source.whole.tensors,
        "bytes": least.bytes,
        "of_bytes": checked.source.whole.bytes,
    }

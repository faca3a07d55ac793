"""`skyctl canary`: another version on some servers, with a share of the requests."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl import output
from skyctl.cli.fleet_calls import begun_and_followed, call_fleet, chosen, follow
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.cli.sources import checkpoint_path
from skyctl.core.registry import FleetRef, RemoteRef, find
from skyctl.errors import UsageError
from skyctl.units import count_of, format_ago, format_seconds, parse_duration, percent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from skyctl.core.canary import CanaryRequest, CanaryStatus, VersionTraffic
    from skyctl.service import FleetService

app = typer.Typer(help="Another version on some servers, for a share of the requests.")

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CKPT", help="Checkpoint directory, or hub id.")
]
ShareOption = Annotated[
    str, typer.Option("--share", metavar="PERCENT", help="Of all requests: 10%, or 0.1.")
]
ReplicasOption = Annotated[
    int | None,
    typer.Option(
        "--replicas", metavar="N", min=1, help="On how many servers (default: as the share)."
    ),
]
WeightVersionOption = Annotated[
    str | None,
    typer.Option("--weight-version", metavar="LABEL", help="Label (default: from its digest)."),
]
KeepOption = Annotated[
    bool, typer.Option("--keep", help="The fleet makes its own copy of the checkpoint first.")
]
RollbackIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rollback-if",
        metavar="RULE",
        help="End it by itself: errors>1%, ttft_p95>2s, latency_p95>30s. Repeatable.",
    ),
]
PromoteAfterOption = Annotated[
    str | None,
    typer.Option("--promote-after", metavar="TIME", help="Promote it by itself: 90s, 30m, 2h, 1d."),
]
WaitTimeoutOption = Annotated[
    float | None, seconds("How long to wait; what was begun goes on (default: no limit).")
]


@app.callback(invoke_without_command=True)
def canary(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Another version on some servers, for a share of the requests; without a command: compare it.

    The router's policy must be round_robin or random. Each answer names its version in the header
    x-weight-version-begin.

    \b
    skyctl canary start runs/step-200 --share 10%
    skyctl canary status
    skyctl canary promote
    """
    context.obj = (file, fleet)
    if context.invoked_subcommand is None:
        _show(context, None, None)


@app.command("start")
def start(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    share: ShareOption,
    replicas: ReplicasOption = None,
    weight_version: WeightVersionOption = None,
    keep: KeepOption = False,
    rollback_if: RollbackIfOption = None,
    promote_after: PromoteAfterOption = None,
    timeout: WaitTimeoutOption = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Push a checkpoint into some servers, which get this share of the requests.

    They are drained first, and serve it from then on, also after a restart. Other pushes are
    refused until the canary is promoted or rolled back. A push that fails brings the fleet's
    weights back.

    \b
    skyctl canary start runs/step-200 --share 10%
    skyctl canary start runs/step-200 --share 25% --rollback-if 'errors>1%'
    """
    from skyctl.core.canary import CanaryRequest, Rule, parse_share
    from skyctl.push.request import PushRequest

    try:
        part = parse_share(share)
    except ValueError as error:
        message = f"--share {share}: not a share"
        raise UsageError(message, hint="write it like --share 10%") from error
    try:
        after_s = parse_duration(promote_after) if promote_after else None
    except ValueError as error:
        message = f"--promote-after {promote_after}: not a duration"
        raise UsageError(message, hint="write it like --promote-after 30m") from error
    for rule in rollback_if or ():
        Rule.parsed(rule)
    ref = find(*chosen(context, file, fleet))
    located = checkpoint_path(ref, checkpoint)
    push = PushRequest(located, weight_version=weight_version, keep=keep)
    rules = tuple(rollback_if or ())
    request = CanaryRequest("start", push, part, replicas or 0, rules, after_s)
    _push(ref, request, timeout)


@app.command("status")
def status(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Compare the canary with the fleet's version: share, errors, times and lengths.

    The servers count: since the canary began to serve, or since their own start if that was later.
    Times and lengths are the median and the 95th percentile, estimated from their histograms.

    \b
    skyctl canary status
    skyctl canary status --json | jq '.data.versions[] | {version, seen, errors}'
    """
    _show(context, file, fleet)


@app.command("promote")
def promote(
    context: typer.Context,
    timeout: WaitTimeoutOption = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Push the canary into all servers, as sync-weights does: it is the fleet's version.

    \b
    skyctl canary promote
    """
    from skyctl.core.canary import CanaryRequest

    _push(find(*chosen(context, file, fleet)), CanaryRequest("promote"), timeout)


@app.command("rollback")
def rollback(
    context: typer.Context,
    timeout: WaitTimeoutOption = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Return the canary's servers to the fleet's weights; until then they get no requests.

    If nothing was pushed into the fleet before, they are restarted.

    \b
    skyctl canary rollback
    """
    from skyctl.core.canary import CanaryRequest
    from skyctl.core.status import OperationKind

    ref, title = find(*chosen(context, file, fleet)), "rolling the canary back"

    async def follow_rollback(running: FleetService, begun: CanaryStatus) -> CanaryStatus:
        await follow(running, begun.operation, title, timeout_s=timeout)
        return await running.canary()

    def hint(begun: CanaryStatus) -> str:
        from skyctl.cli.job_view import going_on

        return going_on(f"{OperationKind.RECOVER}-{begun.operation}", undoable=False)

    request = CanaryRequest("rollback")
    _emit(begun_and_followed(ref, lambda running: running.canary(request), follow_rollback, hint))


def _show(context: typer.Context, file: Any, fleet: str | None) -> None:
    ref = find(*chosen(context, file, fleet))
    _emit(call_fleet(ref, lambda running: running.canary()))


def _push(ref: FleetRef | RemoteRef, request: CanaryRequest, timeout_s: float | None) -> None:
    """Begin a push, show it until it ends, then how the canary is."""
    from skyctl.cli.job_view import follow_job, going_on
    from skyctl.core.results import job_error

    async def follow_push(running: FleetService, begun: CanaryStatus) -> CanaryStatus:
        if error := job_error(await follow_job(running, begun.job, timeout_s=timeout_s)):
            raise error
        return await running.canary()

    _emit(
        begun_and_followed(
            ref,
            lambda running: running.canary(request),
            follow_push,
            lambda begun: going_on(begun.job),
        )
    )


def _emit(state: CanaryStatus) -> None:
    output.emit(asdict(state), *_views(state))


def _views(state: CanaryStatus) -> list[RenderableType]:
    if state.stage is None:
        return ["no canary (start one: skyctl canary start CKPT --share 10%)"]
    columns = ["VERSION", "SERVERS", ">SHARE", ">SEEN", ">REQUESTS", ">ERRORS"]
    columns += [">TTFT P50/P95", ">LATENCY P50/P95", ">TOKENS P50/P95"]
    rows = [_row(version) for version in state.versions]
    views: list[RenderableType] = [
        output.table(columns, rows, spare=("SERVERS",)),
        f"{state.stage}, began {format_ago(state.began_at)}",
    ]
    rules = [f"rolled back if {rule}" for rule in state.rollback_if]
    if state.promote_after_s is not None:
        rules.append(f"promoted after {format_seconds(state.promote_after_s)}")
    return [*views, *rules]


def _row(version: VersionTraffic) -> list[Any]:
    times = (version.first_token_s, version.latency_s)
    lengths = version.output_tokens
    return [
        version.version or "(being pushed)",
        count_of(len(version.servers), "server"),
        percent(version.share),
        None if version.seen is None else percent(version.seen),
        version.requests,
        version.errors,
        *(None if pair is None else "/".join(map(format_seconds, pair)) for pair in times),
        None if lengths is None else "/".join(f"{length:.0f}" for length in lengths),
    ]

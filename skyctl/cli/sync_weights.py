"""`skyctl sync-weights`: push a checkpoint into every running server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import complete
from skyctl.cli.fleet_calls import run_following
from skyctl.cli.options import FileOption, FleetOption, JsonOption, PauseModeOption, seconds

if TYPE_CHECKING:
    from skyctl.push.request import PushRequest
    from skyctl.service import FleetService
    from skyctl.store.journal import Job


StageOption = StrEnum(
    "StageOption", {"AUTO": "auto", "GPU": "gpu", "HOST": "host", "STREAM": "stream"}
)
LayoutOption = StrEnum(
    "LayoutOption", {"AUTO": "auto", "RUNTIME": "runtime", "CHECKPOINT": "checkpoint"}
)
TransportOption = StrEnum(
    "TransportOption",
    {"AUTO": "auto", "NCCL": "nccl", "IPC": "ipc", "GLOO": "gloo", "SHM": "shm", "DISK": "disk"},
)


# panels of --help
VERSION, SERVED = "Which weights", "While users are served"
CHECKS, TRAVEL = "Checks", "How tensors travel"


def sync_weights(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CKPT",
            help="Checkpoint directory: config.json and *.safetensors.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan only; nothing is paused.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return at once with the job's id.")
    ] = False,
    timeout: Annotated[
        float | None, seconds("Stop waiting after this long; the job goes on.")
    ] = None,
    json: JsonOption = False,
    weight_version: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL",
            help="Label (default: the checkpoint's name and digest).",
            rich_help_panel=VERSION,
        ),
    ] = None,
    back: Annotated[
        bool,
        typer.Option(
            "--rollback",
            help="Push the previous version, or the one in CKPT's place (base: as started).",
            rich_help_panel=VERSION,
        ),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Push a copy of the fleet's own, which stays when the directory goes.",
            rich_help_panel=VERSION,
        ),
    ] = False,
    mode: Annotated[
        PauseModeOption | None,
        typer.Option(
            help="Running requests (default: keep; wait with --canary and --rolling).",
            rich_help_panel=SERVED,
        ),
    ] = None,
    rolling: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="N servers at a time, while the others serve.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    canary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts (YAML, JSON) that new weights must answer as expected.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    colocated: Annotated[
        bool,
        typer.Option(
            "--colocated",
            help="Into a sleeping fleet; asleep again when it fails.",
            rich_help_panel=SERVED,
        ),
    ] = False,
    sleep_after: Annotated[
        int | None,
        typer.Option(
            metavar="LEVEL",
            min=1,
            max=2,
            help="Put the updated servers to sleep.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare the servers' weights at the end (default).",
            rich_help_panel=CHECKS,
            show_default=False,
        ),
    ] = True,
    scan_nan: Annotated[
        bool | None,
        typer.Option(
            "--scan-nan/--no-scan",
            help="Look for NaN and infinity first, or never (default: as tensors pass).",
            rich_help_panel=CHECKS,
        ),
    ] = None,
    allow_unproven_reload: Annotated[
        bool,
        typer.Option(
            "--allow-unproven-reload",
            help="Accept another digest than the same checkpoint had before.",
            rich_help_panel=CHECKS,
        ),
    ] = False,
    allow_config: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-config",
            metavar="KEY",
            help="Accept another value of this key of config.json (repeatable).",
            rich_help_panel=CHECKS,
        ),
    ] = None,
    transport: Annotated[
        TransportOption,
        typer.Option(
            help="See: skyctl help transports (auto: by topology).",
            rich_help_panel=TRAVEL,
            show_default=False,
        ),
    ] = TransportOption.AUTO,
    stage: Annotated[
        StageOption,
        typer.Option(
            help="Where the checkpoint waits for the freeze: GPU or host memory, or in a ring of "
            "chunks (auto: the GPU if it fits).",
            rich_help_panel=TRAVEL,
            show_default=False,
        ),
    ] = StageOption.AUTO,
    stage_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes read per second while servers serve, such as 2GB (default: no bound).",
            rich_help_panel=TRAVEL,
        ),
    ] = None,
    layout: Annotated[
        LayoutOption,
        typer.Option(
            help="Copy into the parameters, or give to the engine's loader (auto: copy if proven).",
            rich_help_panel=TRAVEL,
            show_default=False,
        ),
    ] = LayoutOption.AUTO,
    chunk_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Bytes per chunk, such as 256MiB.", rich_help_panel=TRAVEL
        ),
    ] = None,
) -> None:
    """Push a checkpoint into every server while it runs.

    Everything is checked and staged before anything is paused. The servers are frozen only while
    tensors move, and end at one verified version, or paused with the reason in `skyctl status`.

    With --canary all servers leave the router until their answers are as expected: it answers 503
    meanwhile. With --rolling as well, no request fails. Wrong answers bring back the old weights.

    \b
    skyctl sync-weights runs/step-200
    skyctl sync-weights runs/step-200 --dry-run --scan-nan
    skyctl sync-weights runs/step-200 --detach && skyctl jobs wait push-7
    skyctl sync-weights runs/step-200 --rolling 1 --canary canary.yaml
    skyctl sync-weights --rollback               # to the previous version
    skyctl sync-weights --rollback step-100      # see: skyctl weights history
    """
    # what a push is asked for comes first; what shows it is imported while it runs
    from skyctl.checkpoints.checkpoint import absolute
    from skyctl.core.registry import FleetRef, find
    from skyctl.errors import UsageError
    from skyctl.push.request import PushRequest, usual_mode
    from skyctl.service import connect
    from skyctl.units import parse_bytes

    if not checkpoint and not back:
        raise UsageError(
            "missing argument 'CKPT'", hint="how it is typed: skyctl sync-weights --help"
        )
    sizes: dict[str, int | None] = {}
    for option, text in (("--chunk-size", chunk_size), ("--stage-rate", stage_rate)):
        try:
            sizes[option] = parse_bytes(text) if text else None
        except ValueError as error:
            raise UsageError(f"{option}: {error}") from error
    ref = find(file, fleet)
    local = isinstance(ref, FleetRef)  # otherwise the path is on another machine
    prompts = None
    if canary is not None:
        from skyctl.push.canary import read_canary

        prompts = read_canary(canary)
    request = PushRequest(
        checkpoint=(absolute(checkpoint) if local else checkpoint)
        if checkpoint and not back
        else "",
        transport=transport.value,
        chunk_size=sizes["--chunk-size"],
        stage=stage.value,
        stage_rate=sizes["--stage-rate"],
        layout=layout.value,
        weight_version=weight_version,
        pause_mode=mode.value if mode else usual_mode(leaves_router=bool(canary or rolling)),
        verify=verify,
        dry_run=dry_run,
        scan_nan=scan_nan,
        allow_unproven_reload=allow_unproven_reload,
        allow_config=tuple(allow_config or ()),
        canary=prompts,
        keep=keep,
        rolling=rolling or 0,
        colocated=colocated,
        sleep_after=sleep_after or 0,
    )
    if back and weight_version:
        raise UsageError("--rollback keeps the version's own label: leave --weight-version out")
    attached = isinstance(ref, FleetRef) and ref.attached
    if detach and attached:
        raise UsageError(f"fleet {ref.name} has no supervisor that could run the push on its own")
    started: list[str] = []

    async def run() -> Job | None:
        async with connect(ref) as running:
            resolved = await _resolved(running, request, checkpoint if back else None, back)
            started.append(await running.start_push(resolved))
            if detach:
                return None
            from skyctl.cli.job_view import follow_job

            return await follow_job(running, started[0], timeout_s=timeout)

    def on_interrupt() -> str:
        if not started or attached:
            return ""
        return f"the push goes on without you: skyctl jobs wait {started[0]}"

    job = run_following(run(), on_interrupt)
    from skyctl import output
    from skyctl.cli.job_view import emit_job

    if job is None:
        output.emit({"job": started[0]}, f"{started[0]} (follow it: skyctl jobs wait {started[0]})")
    else:
        emit_job(job)


async def _resolved(
    running: FleetService, request: PushRequest, version: str | None, back: bool
) -> PushRequest:
    """The request to send: a rollback takes its checkpoint from the history. Warns of a label that
    the history has for other weights.
    """
    if not back and not request.weight_version:
        return request
    state = await running.weights()
    if back:
        from skyctl.push.versions import rollback

        kept = [kept_version.kept for kept_version in await running.kept_versions()]
        return rollback(request, state.pushes, kept, version, state.base, state.base_digest)
    from skyctl import output
    from skyctl.push.versions import reused_label

    if warning := reused_label(request, state.pushes):
        output.warn(warning)
    return request

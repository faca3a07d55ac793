"""`skyctl sync-weights`: push a checkpoint into every running server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli import complete
from skyctl.cli.fleet_calls import run_following
from skyctl.cli.options import FileOption, FleetOption, JsonOption, PauseModeOption, seconds
from skyctl.cli.sources import checkpoint_path
from skyctl.errors import UsageError
from skyctl.units import parse_bytes

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef, RemoteRef
    from skyctl.push.request import PushRequest
    from skyctl.service import FleetService
    from skyctl.store.journal import Job


StageChoice = StrEnum(
    "StageChoice", {"AUTO": "auto", "GPU": "gpu", "HOST": "host", "STREAM": "stream"}
)
LayoutChoice = StrEnum(
    "LayoutChoice", {"AUTO": "auto", "RUNTIME": "runtime", "CHECKPOINT": "checkpoint"}
)
TransportChoice = StrEnum(
    "TransportChoice",
    {"AUTO": "auto", "NCCL": "nccl", "IPC": "ipc", "GLOO": "gloo", "SHM": "shm", "DISK": "disk"},
)


# panels of --help
VERSION, SERVED = "Which weights", "While users are served"
CHECKS, TRAVEL = "Checks", "How tensors travel"


CheckpointArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CKPT",
        help="Checkpoint directory: config.json and *.safetensors.",
        autocompletion=complete.checkpoints,
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check and plan only; nothing is paused.")
]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return at once with the job's id.")]
WaitTimeoutOption = Annotated[
    float | None, seconds("Stop waiting after this long; the job goes on.")
]
WeightVersionOption = Annotated[
    str | None,
    typer.Option(
        metavar="LABEL",
        help="Label (default: the checkpoint's name and digest).",
        rich_help_panel=VERSION,
    ),
]
BackOption = Annotated[
    bool,
    typer.Option(
        "--rollback",
        help="Push the previous version, or the one in CKPT's place (base: as started).",
        rich_help_panel=VERSION,
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="The draft model of servers that speculate (default: the checkpoint's MTP head).",
        rich_help_panel=VERSION,
    ),
]
KeepOption = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Push a copy of the fleet's own, which stays when the directory goes.",
        rich_help_panel=VERSION,
    ),
]
WatchOption = Annotated[
    Path | None,
    typer.Option(
        "--watch",
        metavar="DIR",
        help="Push each finished checkpoint below DIR, until Ctrl-C.",
        rich_help_panel=VERSION,
    ),
]
ModeOption = Annotated[
    PauseModeOption | None,
    typer.Option(
        help="Running requests (default: keep; wait with --trial and --rolling).",
        rich_help_panel=SERVED,
    ),
]
RollingOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="N servers at a time, while the others serve.",
        rich_help_panel=SERVED,
    ),
]
TrialOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts (YAML, JSON) that new weights must answer as expected.",
        rich_help_panel=SERVED,
    ),
]
ColocatedOption = Annotated[
    bool,
    typer.Option(
        "--colocated",
        help="Into a sleeping fleet; asleep again when it fails.",
        rich_help_panel=SERVED,
    ),
]
SleepAfterOption = Annotated[
    int | None,
    typer.Option(
        metavar="LEVEL",
        min=1,
        max=2,
        help="Put the updated servers to sleep.",
        rich_help_panel=SERVED,
    ),
]
VerifyOption = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="Compare the servers' weights at the end (default: as the fleet file says).",
        rich_help_panel=CHECKS,
        show_default=False,
    ),
]
ScanNanOption = Annotated[
    bool | None,
    typer.Option(
        "--scan-nan/--no-scan",
        help="Look for NaN and infinity first, or never (default: as tensors pass).",
        rich_help_panel=CHECKS,
    ),
]
AllowUnprovenReloadOption = Annotated[
    bool,
    typer.Option(
        "--allow-unproven-reload",
        help="Accept another digest than the same checkpoint had before.",
        rich_help_panel=CHECKS,
    ),
]
AllowConfigOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-config",
        metavar="KEY",
        help="Accept another value of this key of config.json (repeatable).",
        rich_help_panel=CHECKS,
    ),
]
TransportOption = Annotated[
    TransportChoice,
    typer.Option(
        metavar="WAY",
        help=f"{', '.join(TransportChoice)}: see skyctl help transports.",
        rich_help_panel=TRAVEL,
        show_default=False,
    ),
]
StageOption = Annotated[
    StageChoice,
    typer.Option(
        metavar="WHERE",
        help="Where the checkpoint waits for the freeze: gpu or host memory, or stream: a ring of "
        "chunks (auto: the GPU if it fits).",
        rich_help_panel=TRAVEL,
        show_default=False,
    ),
]
StageRateOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Bytes read per second while servers serve, such as 2GB (default: no bound).",
        rich_help_panel=TRAVEL,
    ),
]
LayoutOption = Annotated[
    LayoutChoice,
    typer.Option(
        metavar="KIND",
        help="runtime: copy into the parameters; checkpoint: give to the engine's loader (auto: "
        "copy if proven).",
        rich_help_panel=TRAVEL,
        show_default=False,
    ),
]
ChunkSizeOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes per chunk, such as 256MiB.", rich_help_panel=TRAVEL),
]


def sync_weights(
    checkpoint: CheckpointArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    timeout: WaitTimeoutOption = None,
    json: JsonOption = False,
    weight_version: WeightVersionOption = None,
    back: BackOption = False,
    keep: KeepOption = False,
    draft: DraftOption = None,
    watch: WatchOption = None,
    mode: ModeOption = None,
    rolling: RollingOption = None,
    trial: TrialOption = None,
    colocated: ColocatedOption = False,
    sleep_after: SleepAfterOption = None,
    verify: VerifyOption = None,
    scan_nan: ScanNanOption = None,
    allow_unproven_reload: AllowUnprovenReloadOption = False,
    allow_config: AllowConfigOption = None,
    transport: TransportOption = TransportChoice.AUTO,
    stage: StageOption = StageChoice.AUTO,
    stage_rate: StageRateOption = None,
    layout: LayoutOption = LayoutChoice.AUTO,
    chunk_size: ChunkSizeOption = None,
) -> None:
    """Push a checkpoint into every server while it runs.

    Everything is checked and staged before anything is paused. The servers are frozen only while
    tensors move, and end at one verified version, or paused with the reason in `skyctl status`.

    With --trial all servers leave the router until their answers are as expected: it answers 503
    until then. With --rolling as well, no request fails. Wrong answers bring back the old weights.

    \b
    skyctl sync-weights runs/step-200
    skyctl sync-weights runs/step-200 --dry-run --scan-nan
    skyctl sync-weights runs/step-200 --detach && skyctl jobs wait push-7
    skyctl sync-weights runs/step-200 --rolling 1 --trial trial.yaml
    skyctl sync-weights --rollback step-100      # see: skyctl weights history
    skyctl sync-weights --watch runs             # each new runs/checkpoint-N
    """
    from skyctl.core.registry import find
    from skyctl.push.request import PushRequest, usual_mode

    if watch is not None and (
        checkpoint or back or weight_version or dry_run or detach or timeout is not None
    ):
        raise UsageError(
            "--watch pushes what it finds: leave CKPT, --rollback, --weight-version, --dry-run, "
            "--detach and --timeout out"
        )
    if not checkpoint and not back and watch is None:
        raise UsageError(
            "missing argument 'CKPT'", hint="how it is typed: skyctl sync-weights --help"
        )
    sizes = _size("--chunk-size", chunk_size), _size("--stage-rate", stage_rate)
    ref = find(file, fleet)
    request = PushRequest(
        checkpoint=checkpoint_path(ref, checkpoint) if checkpoint and not back else "",
        transport=transport.value,
        chunk_size=sizes[0],
        stage=stage.value,
        stage_rate=sizes[1],
        layout=layout.value,
        weight_version=weight_version,
        pause_mode=mode.value if mode else usual_mode(leaves_router=bool(trial or rolling)),
        verify=verify,
        dry_run=dry_run,
        scan_nan=scan_nan,
        allow_unproven_reload=allow_unproven_reload,
        allow_config=tuple(allow_config or ()),
        trial=_prompts(trial),
        keep=keep,
        draft=checkpoint_path(ref, draft) if draft else "",
        rolling=rolling or 0,
        colocated=colocated,
        sleep_after=sleep_after or 0,
    )
    if back and weight_version:
        raise UsageError("--rollback keeps the version's own label: leave --weight-version out")
    if watch is not None:
        from skyctl.cli.watching import watch as watch_run

        watch_run(ref, watch, request)
        return
    _push(ref, request, checkpoint if back else None, back=back, detach=detach, timeout_s=timeout)


def _size(option: str, text: str | None) -> int | None:
    """The bytes of an option's value; None without one."""
    try:
        return parse_bytes(text) if text else None
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _prompts(trial: Path | None) -> dict[str, Any] | None:
    """The content of a trial file."""
    if trial is None:
        return None
    from skyctl.push.trial_file import read_trial

    return read_trial(trial)


def _push(
    ref: FleetRef | RemoteRef,
    request: PushRequest,
    version: str | None,
    *,
    back: bool,
    detach: bool,
    timeout_s: float | None,
) -> None:
    """Start the push and show it until it ends, or print its job's id; `version` is the one to roll
    back to.
    """
    from skyctl.core.registry import FleetRef
    from skyctl.service import connect

    attached = isinstance(ref, FleetRef) and ref.attached
    if detach and attached:
        raise UsageError(f"fleet {ref.name} has no supervisor that could run the push on its own")
    started: list[str] = []

    async def run() -> Job | None:
        async with connect(ref) as running:
            resolved = await _resolved(running, request, version, back)
            started.append(await running.start_push(resolved))
            if detach:
                return None
            # what shows a push is imported once it runs
            from skyctl.cli.job_view import follow_job

            return await follow_job(running, started[0], timeout_s=timeout_s)

    def on_interrupt() -> str:
        if not started or attached:
            return ""
        from skyctl.cli.job_view import going_on

        return going_on(started[0])

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
        from skyctl.push.source import rollback

        kept = [kept_version.kept for kept_version in await running.kept_versions()]
        return rollback(request, state.pushes, kept, version, state.base, state.base_digest)
    from skyctl import output
    from skyctl.push.source import reused_label

    if warning := reused_label(request, state.pushes):
        output.warn(warning)
    return request

"""`skyctl tinker`: what the Tinker API has stored."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli.fleet_calls import chosen, in_loop
from skyctl.cli.options import FileOption, FleetOption, JsonOption
from skyctl.core.registry import Files, select
from skyctl.store.paths import expanded
from skyctl.units import count_of, format_ago, format_bytes

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef
    from skyctl.tinker.stored import StoredCheckpoint

app = typer.Typer(help="Checkpoints that the Tinker API has stored: list, copy, merge, delete.")

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="The path that the SDK returned: tinker://….")
]
AllOption = Annotated[
    bool, typer.Option("--all", help="Also what was saved for one sampling client, unnamed.")
]


@app.callback(invoke_without_command=True)
def tinker(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Checkpoints that the Tinker API has stored; without a command: list them.

    Commands that take a directory take such a path as well.

    \b
    skyctl tinker
    skyctl adapters load math tinker://RUN/sampler_weights/final   # by a name
    skyctl sync-weights tinker://RUN/sampler_weights/final         # whole model
    skyctl tinker export tinker://RUN/weights/final ./merged --merged
    """
    if context.invoked_subcommand is None:
        _show(select(file, fleet), False)
    else:
        context.obj = (file, fleet)


@app.command("ls")
def list_(
    context: typer.Context,
    unnamed: AllOption = False,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Path, kind, rank, size and age of each checkpoint, the latest first.

    It reads the API's database: the fleet need not run.

    \b
    skyctl tinker ls
    skyctl tinker ls --all --json
    """
    _show(select(*chosen(context, file, fleet)), unnamed)


@app.command()
def path(
    context: typer.Context,
    path: PathArgument,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """The directory of a checkpoint; without -f and --fleet, of any fleet of this machine.

    \b
    skyctl tinker path tinker://RUN/weights/final
    """
    stored = _find(context, path, file, fleet)
    output.emit({"path": path, "directory": str(stored.directory)}, str(stored.directory))


@app.command()
def export(
    context: typer.Context,
    path: PathArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory to make.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The base model with the adapter added to its weights.")
    ] = False,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Copy a checkpoint without its optimizer's state: a PEFT directory, or a whole model.

    \b
    skyctl tinker export tinker://RUN/weights/final ./adapter
    skyctl tinker export tinker://RUN/weights/final ./model --merged
    """
    from skyctl.tinker.export import copy_checkpoint, merge_adapter

    stored, to = _find(context, path, file, fleet), expanded(directory).absolute()
    if merged and stored.rank:
        merge_adapter(stored.directory, stored.model, to)
    else:
        copy_checkpoint(stored.directory, to)
    size = sum(entry.stat().st_size for entry in to.iterdir())
    output.emit(
        {"path": path, "directory": str(to), "merged": merged and stored.rank > 0, "bytes": size},
        f"{to}: {format_bytes(size)}",
    )


@app.command()
def rm(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(metavar="PATH…", help="Paths of checkpoints, or runs.")
    ],
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Delete checkpoints, or all those of a run; the run itself can be trained on.

    The API deletes them: the fleet must be up. A sampler that uses one fails from then on.

    \b
    skyctl tinker rm tinker://RUN/weights/step-10 tinker://RUN/weights/step-20
    skyctl tinker rm RUN
    """
    from skyctl.tinker.stored import delete_checkpoints

    deleted = in_loop(delete_checkpoints(select(*chosen(context, file, fleet)), names))
    size = format_bytes(sum(checkpoint.size for checkpoint in deleted))
    output.emit(
        {"deleted": [checkpoint.path for checkpoint in deleted]},
        f"deleted {count_of(len(deleted), 'checkpoint')}, {size}",
    )


def _find(context: typer.Context, path: str, file: Files, fleet: str | None) -> StoredCheckpoint:
    from skyctl.tinker.stored import find_checkpoint

    file, fleet = chosen(context, file, fleet)
    return find_checkpoint(path, select(file, fleet) if file or fleet else None)


def _show(ref: FleetRef, unnamed: bool) -> None:
    from skyctl.tinker.stored import checkpoints_of

    stored = checkpoints_of(ref)
    listed = [checkpoint for checkpoint in stored if unnamed or not checkpoint.unnamed]
    rows = [
        [
            checkpoint.path,
            checkpoint.kind,
            str(checkpoint.rank) if checkpoint.rank else "whole model",
            format_bytes(checkpoint.size),
            format_ago(checkpoint.created),
            "trains" if checkpoint.trains else "ended",
        ]
        for checkpoint in listed
    ]
    size = format_bytes(sum(checkpoint.size for checkpoint in stored))
    footer = f"{count_of(len(stored), 'checkpoint')}, {size}"
    if hidden := len(stored) - len(listed):
        footer += f"; {hidden} without a name are not listed (--all)"
    output.emit(
        {
            "checkpoints": [
                asdict(checkpoint) | {"directory": str(checkpoint.directory)}
                for checkpoint in listed
            ]
        },
        output.table(["PATH", "KIND", "RANK", ">SIZE", "SAVED", "RUN"], rows) if rows else None,
        footer if stored else f"the Tinker API of {ref.name} has stored nothing",
    )

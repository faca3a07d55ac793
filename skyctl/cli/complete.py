"""Shell completion of values: fleets, replicas, jobs, weight versions and checkpoints.

Completers must be fast and silent: they read the state directory and the fleet file, start
nothing, and return nothing rather than raise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from skyctl.errors import SkyctlError

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef

_MOST = 200


def _silent(complete: Callable[..., Iterable[str]]) -> Callable[..., list[str]]:
    """A completer that returns at most 200 sorted answers, and none on an error."""

    @wraps(complete)
    def safe(*args: Any, **kwargs: Any) -> list[str]:
        try:
            return sorted(set(complete(*args, **kwargs)))[:_MOST]
        except Exception:  # a traceback under the prompt would be in the way
            return []

    return safe


@_silent
def fleets(incomplete: str) -> Iterable[str]:
    """Names of the fleets this user has."""
    from skyctl.core.registry import known_fleets

    return [name for name in known_fleets() if name.startswith(incomplete)]


@_silent
def replicas(ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Names of the chosen fleet's replicas, from its file and its state."""
    from skyctl.cli.fleet_calls import call_fleet
    from skyctl.core.placement import expand_replicas

    ref = _chosen(ctx)
    names = [] if ref.attached else [replica.name for replica in expand_replicas(ref.config)]
    # a fleet that was scaled has replicas that its file does not list; attached servers are named
    # by their records, and those that must be discovered are not discovered for a key press
    with suppress(SkyctlError):
        names += [row.name for row in call_fleet(ref, lambda fleet: fleet.weights()).servers]
    return [name for name in names if name.startswith(incomplete)]


@_silent
def processes(ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Replicas, and the other processes that have logs."""
    others = [n for n in ("router", "tinker", "supervisor") if n.startswith(incomplete)]
    return [*replicas(ctx, incomplete), *others]


@_silent
def jobs(ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Ids of the chosen fleet's latest jobs."""
    from skyctl.cli.fleet_calls import call_fleet

    listed_jobs = call_fleet(_chosen(ctx), lambda fleet: fleet.jobs())
    return [job.id for job in listed_jobs if job.id.startswith(incomplete)]


@_silent
def versions(ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Weight versions that were pushed to the chosen fleet."""
    from skyctl.cli.fleet_calls import call_fleet

    pushes = call_fleet(_chosen(ctx), lambda fleet: fleet.weights()).pushes
    pushed = [push.version for push in pushes if push.version]
    return [version for version in pushed if version.startswith(incomplete)]


@_silent
def conditions(ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """The conditions of `wait --for`."""
    words = ["ready", "paused", "awake"]
    words += [f"version={version}" for version in versions(ctx, "")] or ["version="]
    return [word for word in words if word.startswith(incomplete)]


@_silent
def topics(incomplete: str) -> Iterable[str]:
    """The topics of `skyctl help`."""
    from skyctl.help import topics

    return [name for name in topics() if name.startswith(incomplete)]


@_silent
def checkpoints(incomplete: str) -> Iterable[str]:
    """Directories below the typed path; a checkpoint ends without a slash, others with one."""
    typed, last = os.path.split(incomplete)
    directory = Path(typed).expanduser() if typed else Path()
    for entry in directory.iterdir():
        hidden = entry.name.startswith(".") and not last.startswith(".")
        if not entry.name.startswith(last) or hidden or not entry.is_dir():
            continue
        path = f"{typed.rstrip('/')}/{entry.name}" if typed else entry.name
        yield path if (entry / "config.json").exists() else f"{path}/"


def _chosen(ctx: typer.Context) -> FleetRef:
    """The fleet that -f and --fleet (or their variables) name so far."""
    from skyctl.core.registry import select

    files = ctx.params.get("file") or os.environ.get("SKYCTL_FILE", "").split(os.pathsep)
    name = ctx.params.get("fleet") or os.environ.get("SKYCTL_FLEET")
    return select([Path(file) for file in files if file], str(name) if name else None)

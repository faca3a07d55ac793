"""`skyctl weights save`: a server's weights as a checkpoint in a directory of the user's."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from skyctl import engines
from skyctl.checkpoints.checkpoint import locate
from skyctl.checkpoints.keeping import copy_small_files
from skyctl.checkpoints.live import running_model
from skyctl.core.requests import SaveWeights
from skyctl.core.results import SavedWeights
from skyctl.errors import ConflictError, NotFoundError, PreflightError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.saving import write_weights
from skyctl.store.in_doubt import in_doubt
from skyctl.store.paths import sync_directory
from skyctl.store.state import FleetState

CALL_TIMEOUT_S = 120.0
"""How long a server may take to write a single tensor, or to digest its weights."""


async def save_weights(
    request: SaveWeights,
    targets: Sequence[ServerTarget],
    *,
    base: str | None,
    state: FleetState,
    client: ControlClient,
) -> SavedWeights:
    """Save by the first of these servers whose weights are the fleet's. The caller keeps pushes
    out. `base` is the model that they were started with. Raises as `FleetService.save_weights`.
    """
    began = time.monotonic()
    version = state.weights().version
    if request.version and request.version != version:
        raise NotFoundError(
            f"the fleet serves {version or 'what it was started with'}, not {request.version}",
            hint="versions with a copy: skyctl weights kept",
        )
    target = _source(targets, state)
    model = await asyncio.to_thread(running_model, base)
    directory = Path(request.directory)
    partial = await asyncio.to_thread(_begin, directory)
    try:
        written = await write_weights(
            engines.server(client, target, timeout_s=CALL_TIMEOUT_S),
            model,
            partial,
            digest=state.server(target.name).weights_digest or "",
            timeout_s=CALL_TIMEOUT_S,
        )
        await asyncio.to_thread(_finish, partial, directory, base)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return SavedWeights(
        *(str(directory), version, target.name, written.digest),
        *(written.tensors, written.total_bytes, time.monotonic() - began),
    )


def _source(targets: Sequence[ServerTarget], state: FleetState) -> ServerTarget:
    """Raises PreflightError if none of them has the fleet's weights."""
    version, doubts = state.weights().version, in_doubt(state)
    for target in targets:
        row = state.server(target.name)
        current = row.weight_version == version and not row.quarantine and target.name not in doubts
        if current and not row.sleep_level:
            return target
    raise PreflightError(
        "no server is awake that has the fleet's weights", hint="see: skyctl weights"
    )


def _begin(directory: Path) -> Path:
    """The directory in which the checkpoint is made."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PreflightError(f"{directory} is not empty", hint="name a new directory")
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ConflictError(
            f"{partial} exists: weights are being saved there, or were when a supervisor died",
            hint=f"remove it (rm -r {partial}) once nothing is",
        ) from None
    except OSError as error:
        raise SkyctlError(f"cannot make {partial}: {error.strerror}") from error
    return partial


def _finish(partial: Path, directory: Path, base: str | None) -> None:
    source = locate(base) if base else None
    if source is not None:
        copy_small_files(source, partial)
    sync_directory(partial)
    partial.rename(directory)

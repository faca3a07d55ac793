"""`skyctl weights save`: a server's weights as a checkpoint in a directory of the user's."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from skyctl import engines
from skyctl.checkpoints.checkpoint import locate, read_checkpoint
from skyctl.checkpoints.keeping import copy_small_files, mark_recorded, sweep_kept
from skyctl.checkpoints.live import in_thread, running_model
from skyctl.core.diagnosis import foreign_version
from skyctl.core.requests import SaveWeights
from skyctl.core.results import SavedWeights
from skyctl.errors import ConflictError, NotFoundError, PreflightError, ServerError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.saving import tensors_to_write, write_weights
from skyctl.store.in_doubt import in_doubt
from skyctl.store.kept_weights import KeptWeights, kept_weights, remember
from skyctl.store.paths import private_directory, sync_directory
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
    target = source_of(targets, state)
    server = engines.server(client, target, timeout_s=CALL_TIMEOUT_S)
    # one that was started again, or that another fleet has pushed to, holds something else
    foreign = foreign_version(version, await server.weight_version())
    if version is not None and foreign:
        raise PreflightError(f"{target.name} {foreign}", hint="put it right: skyctl recover")
    if (await server.metrics()).sleep_level:  # not on record; its memory may be unmapped
        raise PreflightError(f"{target.name} is asleep", hint="type: skyctl wake")
    model = await asyncio.to_thread(running_model, base)
    directory = Path(request.directory)
    partial = await asyncio.to_thread(_begin, directory)
    try:
        written = await write_weights(
            server,
            model,
            partial,
            digest=state.server(target.name).weights_digest or "",
            timeout_s=CALL_TIMEOUT_S,
        )
        await in_thread(_finish, partial, directory, base)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return SavedWeights(
        *(str(directory), version, target.name, written.digest),
        *(written.tensors, written.total_bytes, time.monotonic() - began),
    )


async def unsavable(
    targets: Sequence[ServerTarget], *, base: str | None, client: ControlClient
) -> str:
    """Why none of these servers could save its weights; "" if one can. Changes nothing."""
    reason = "no server is up that sees the fleet's directory; name one with shared_dir"
    model = await asyncio.to_thread(running_model, base)
    for target in targets:
        server = engines.server(client, target, timeout_s=CALL_TIMEOUT_S)
        try:
            await tensors_to_write(server, model, timeout_s=CALL_TIMEOUT_S)
        except (PreflightError, ServerError) as error:
            reason = error.message
        else:
            return ""
    return reason


async def keep_weights(
    version: str,
    targets: Sequence[ServerTarget],
    *,
    kept: Path,
    base: str | None,
    state: FleetState,
    client: ControlClient,
) -> SavedWeights:
    """Make the fleet's own copy of weights that no file has, in `kept`. Servers that restart load
    it from then on, and others' records name it. Raises as `save_weights`.
    """
    recorded = {weights.checkpoint for weights in kept_weights(state)} | state.checkpoints()
    place = await asyncio.to_thread(_swept, kept, recorded)
    copy = place / secrets.token_hex(8) / "weights"
    try:
        saved = await save_weights(
            SaveWeights(str(copy), version), targets, base=base, state=state, client=client
        )
        checkpoint = await asyncio.to_thread(read_checkpoint, str(copy))
        own = KeptWeights(
            version=version,
            checkpoint=str(copy),
            source=str(copy),
            checkpoint_digest=checkpoint.identity_digest,
            source_digest=checkpoint.identity_digest,
            content_digest="",
            bytes=checkpoint.total_bytes,
            at=time.time(),
        )
        _record(state, own)
    except BaseException:
        shutil.rmtree(copy.parent, ignore_errors=True)
        raise
    mark_recorded(copy)
    return saved


def _swept(kept: Path, recorded: Collection[str | None]) -> Path:
    """Where copies are made, without those that one which died has left."""
    sweep_kept(private_directory(kept), recorded)
    return kept.resolve()  # pushes record paths without links


def _record(state: FleetState, own: KeptWeights) -> None:
    with state.durable():
        remember(state, own)
        weights = state.weights()
        if weights.version != own.version or weights.checkpoint or state.canary():
            return
        file = {"checkpoint": own.checkpoint, "checkpoint_digest": own.checkpoint_digest}
        rows = [r for r in state.servers() if r.weight_version == own.version and not r.checkpoint]
        state.set_weights(replace(weights, **file))
        state.update_servers({row.name: file for row in rows})


def source_of(targets: Sequence[ServerTarget], state: FleetState) -> ServerTarget:
    """The first of these servers that has the fleet's weights, and is awake. Raises PreflightError
    if none is.
    """
    weights, doubts = state.weights(), in_doubt(state)
    files = weights.version, weights.checkpoint_digest  # a label may have meant others
    for target in targets:
        row = state.server(target.name)
        current = (row.weight_version, row.checkpoint_digest) == files
        kept_out = row.quarantine or row.sleep_level or target.name in doubts
        if current and not kept_out:
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
    """Complete the checkpoint, and give it its name once all of it is on the disk."""
    source = locate(base) if base else None
    try:
        if source is not None:
            copy_small_files(source, partial)
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # also what the server's workers have written
        sync_directory(partial)
        partial.rename(directory)
        sync_directory(directory.parent)
    except OSError as error:
        raise SkyctlError(f"cannot write {directory}: {error.strerror or error}") from error

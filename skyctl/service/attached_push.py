"""A push into servers that skyctl did not start: the same job, run by this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from skyctl import engines
from skyctl.checkpoints.checkpoint import locate
from skyctl.core import expectations, jobs
from skyctl.core.arbiter import Turn
from skyctl.core.guardian import guarded
from skyctl.core.registry import FleetRef
from skyctl.errors import UsageError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.live.offer import Live
from skyctl.push.request import PushFleet, PushRequest, PushServer
from skyctl.push.trainer import Trainer
from skyctl.store.journal import Job
from skyctl.store.state import FleetState


def begin(
    ref: FleetRef,
    targets: Sequence[ServerTarget],
    request: PushRequest,
    client: ControlClient,
    state: FleetState,
    turn: Turn,
    trainer: Trainer | None = None,
    live: Live | None = None,
) -> tuple[Job, asyncio.Task[None]]:
    """Open a push job and start its task, which releases the turn. A `trainer` sends its weights,
    or they are `live` in its memory.

    Raises:
        StateUnwritable: it cannot be put on record; nothing was touched.
        UsageError: it is to be kept, and is in no file.
    """
    if request.keep and not request.checkpoint:
        raise UsageError(
            "no process is there to keep weights that no file has: this fleet is attached",
            hint="leave keep out, and then: skyctl weights save DIR",
        )
    fleet = replace(push_fleet(ref, targets, request, state), trainer=trainer, live=live)
    job = jobs.open_push(state.journal, turn, request)

    async def run() -> None:
        with turn:
            try:
                await jobs.run_push(
                    job,
                    request,
                    fleet,
                    client=client,
                    state=state,
                    guardian=guarded(ref.paths),
                    kept=ref.paths.kept,
                )
            except (Exception, asyncio.CancelledError) as error:
                jobs.abandon(state, job.id, error)  # unless it has recorded how it ended
                raise

    return job, asyncio.create_task(run(), name=job.id)


def push_fleet(
    ref: FleetRef, targets: Sequence[ServerTarget], request: PushRequest, state: FleetState
) -> PushFleet:
    """The servers of a push, described as the push needs them."""
    # the push's preflight finds out backend, device and world size
    servers = [
        PushServer(target, device="cuda" if ref.config.device == "cuda" else "cpu")
        for target in targets
    ]
    python = ref.config.python or sys.executable
    pushed = _pushed(state)
    return replace(
        expectations.push_fleet(ref.name, ref.config, servers, state, python),
        # a directory overwritten since its push would be compared with itself
        model_path=pushed if pushed != request.checkpoint else None,
        pushes=tuple(state.journal.pushes()) if request.dry_run else (),
    )


async def model_path(
    targets: Sequence[ServerTarget], client: ControlClient, state: FleetState
) -> str | None:
    """What the servers run: the last pushed checkpoint while it exists, else what they report."""
    model = _pushed(state) or (await engines.server(client, targets[0]).started_with()).model
    return model or None


def _pushed(state: FleetState) -> str | None:
    """The last pushed checkpoint; None if it is gone (weights from memory are not kept)."""
    checkpoint = state.weights().checkpoint
    return checkpoint if checkpoint and locate(checkpoint) else None

"""A push into servers that skyctl did not start: the same job, run by this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from skyctl import engines
from skyctl.checkpoints.checkpoint import locate
from skyctl.core import jobs
from skyctl.core.arbiter import Turn
from skyctl.core.guardian import guarded
from skyctl.core.registry import FleetRef
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.live.offer import Live
from skyctl.push.request import PushFleet, PushRequest, PushServer
from skyctl.push.trainer import Trainer
from skyctl.store.in_doubt import NO_DOUBT, in_doubt
from skyctl.store.journal import Job
from skyctl.store.state import FleetState, ServerRow


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
    """
    fleet = replace(push_fleet(ref, targets, request, state), trainer=trainer, live=live)
    job = jobs.open_push(state.journal, turn, request)

    async def run() -> None:
        with turn:
            await jobs.run_push(
                job,
                request,
                fleet,
                client=client,
                state=state,
                guardian=guarded(ref.paths),
                kept=ref.paths.kept,
            )

    return job, asyncio.create_task(run(), name=job.id)


def push_fleet(
    ref: FleetRef, targets: Sequence[ServerTarget], request: PushRequest, state: FleetState
) -> PushFleet:
    """The servers of a push, described as the push needs them."""
    transfer, doubts = ref.config.weight_transfer, in_doubt(state)
    recorded = {row.name: row for row in state.servers()}
    rows = {target.name: recorded.get(target.name, ServerRow(target.name)) for target in targets}
    return PushFleet(
        name=ref.name,
        # the push's preflight finds out backend, device and world size
        servers=tuple(
            PushServer(
                target,
                device="cuda" if ref.config.device == "cuda" else "cpu",
                half_updated=doubts.get(target.name, NO_DOUBT).half_updated,
                thaw=doubts.get(target.name, NO_DOUBT).thaw and not rows[target.name].paused,
                verified_as=doubts.get(target.name, NO_DOUBT).version,
                weights_awake=rows[target.name].weights_awake,
                sleep_level=rows[target.name].sleep_level,
                paused=rows[target.name].paused,
            )
            for target in targets
        ),
        # a directory overwritten since its push would be compared with itself
        model_path=pushed if (pushed := _pushed(state)) != request.checkpoint else None,
        chunk_size=transfer.chunk_size,
        rendezvous_timeout_s=transfer.rendezvous_timeout_s,
        update_timeout_s=transfer.update_timeout_s,
        control_timeout_s=ref.config.control_timeout_s,
        python=ref.config.python or sys.executable,
        transport=transfer.transport,
        stage_rate=transfer.stage_rate,
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

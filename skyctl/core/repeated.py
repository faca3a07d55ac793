"""The pushes that recovery makes: the interrupted one again, or the fleet's weights."""

from __future__ import annotations

from dataclasses import replace

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.configs import ALL_KEYS
from skyctl.errors import SkyctlError, WeightsGone
from skyctl.push.request import PushRequest
from skyctl.push.source import refuse_changed, refuse_changed_draft
from skyctl.states import TRAINER
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import EventKind, number_of
from skyctl.store.state import FleetState


def interrupted_request(state: FleetState) -> PushRequest | None:
    """The request of the latest push that left servers half updated, for the very files it pushed;
    None without one, or if it must not be repeated: the fleet may have moved on.
    """
    doubted = {record.job for record in in_doubt(state).values() if record.half_updated}
    # an admission that broke off is not among the jobs
    interrupted = [job for job in state.journal.jobs() if job.id in doubted]
    if not interrupted:
        return None
    latest = max(interrupted, key=lambda job: number_of(job.id))
    succeeded = [push.job for push in state.journal.pushes() if push.ok]
    if any(number_of(job) > number_of(latest.id) for job in succeeded):
        return None
    try:
        request = PushRequest.from_json(latest.request)
    except (SkyctlError, TypeError):  # pruned, or written by another skyctl
        return None
    prepared = [e.data for e in state.journal.events(latest.id) if e.kind is EventKind.PREPARED]
    if not prepared or not prepared[-1]["checkpoint"]:
        return None  # it never read its files, or had none: nothing says which they were
    if request.transport == TRAINER:  # the trainer cannot be asked again; its files can be pushed
        request = replace(request, transport="auto", weights_digest=None)
    request = replace(
        request,
        checkpoint=prepared[-1]["checkpoint"],  # the fleet's own copy, if it made one
        expected_digest=prepared[-1]["checkpoint_digest"],
        expected_draft=prepared[-1].get("draft_digest", ""),
        keep=False,
    )
    # a trial that did not finish has accepted nothing, and a roll is not the fleet's version
    # before its end: the fleet's weights go back
    return None if request.leaves_router else request


def published(weights: FleetWeights) -> PushRequest:
    """A request for the fleet's weights.

    Raises:
        SkyctlError: it has none but those it was started with.
        WeightsGone: their files are gone, or hold something else now.
    """
    if weights.version is None:
        raise SkyctlError("nothing was pushed into this fleet yet")
    if weights.checkpoint is None:
        raise WeightsGone(f"{weights.version} was sent by a trainer, and no file has it")
    require_draft(weights)
    try:
        checkpoint = read_checkpoint(weights.checkpoint)
    except SkyctlError as error:
        raise WeightsGone(f"{weights.version} is gone: {error.message}") from error
    request = PushRequest(
        checkpoint=weights.checkpoint,
        transport=weights.transport,
        weight_version=weights.version,
        expected_digest=weights.checkpoint_digest,
        expected_content=weights.content_digest,
        draft=weights.draft,
        expected_draft=weights.draft_digest,
        scan_nan=False,  # they were accepted when they were pushed, and so was their configuration
        allow_config=(ALL_KEYS,),
    )
    refuse_changed(request, checkpoint)
    # a trainer may overwrite them at any moment: the push reads what was checked here
    return replace(request, expected_digest=checkpoint.identity_digest)


def require_draft(weights: FleetWeights) -> None:
    """Raise WeightsGone if the draft model that belongs to these weights is gone, or is another
    now.
    """
    if not weights.draft:
        return
    try:
        checkpoint = read_checkpoint(weights.draft)
    except SkyctlError as error:
        message = f"the draft model of {weights.version} is gone: {error.message}"
        raise WeightsGone(message) from error
    refuse_changed_draft(weights.draft_digest, checkpoint)


def needed(state: FleetState) -> set[str | None]:
    """Checkpoints that recovery may have to push again."""
    request = interrupted_request(state)
    return {request.checkpoint} if request is not None else set()

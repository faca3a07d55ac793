"""Admission of a new server, before it is routed to: the fleet's weights first, then its intent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from skyctl import engines
from skyctl.checkpoints.checkpoint import locate
from skyctl.core import actions, expectations
from skyctl.core.expectations import (
    arguments_of,
    files_of,
    other_settings,
    other_weights,
)
from skyctl.core.findings import Condition, Finding, Severity
from skyctl.core.health import probe_alive
from skyctl.core.plan import FleetPlan
from skyctl.core.tinker import LABEL_PREFIX
from skyctl.engines.base import Feature
from skyctl.errors import DeadlineExceeded, ServerError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome
from skyctl.push.request import PushFleet, PushServer
from skyctl.push.verify import CannotDigest, arrangement_of, weights_digest
from skyctl.store.base_weights import BaseWeights, base_weights, learn_base, record_base
from skyctl.store.expected import ExpectedDigest, Learned, by_files
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import PushRecord
from skyctl.store.state import FleetState
from skyctl.supervisor.replica import Replica

_LOG = logging.getLogger(__name__)


def push_fleet(
    plan: FleetPlan,
    replicas: Sequence[Replica],
    state: FleetState,
    model_path: str,
    committed: FleetWeights | None = None,
    pushes: Sequence[PushRecord] = (),
) -> PushFleet:
    """The servers of a push, described as the push needs them (see `expectations.push_fleet`)."""
    servers = [
        PushServer(
            target=replica.target,
            node=replica.spec.node,
            machines=1 + len(replica.spec.followers),
            backend=replica.spec.backend,
            device=plan.device,
            gpus=replica.spec.gpus,
            world_size=replica.spec.world_size,
            instance=replica.instance,
            arguments=arguments_of(replica.spec),
        )
        for replica in replicas
    ]
    fleet = expectations.push_fleet(plan.name, plan.config, servers, state, plan.python)
    return replace(fleet, model_path=model_path, committed=committed, pushes=tuple(pushes))


def committed(state: FleetState, plan: FleetPlan) -> FleetWeights | None:
    """The weights that the fleet serves, None if they are in no file; before a first push, those it
    was started with.
    """
    weights = state.weights()
    if weights.version is not None:
        return weights if weights.checkpoint else None
    base = started_with(plan)
    return (
        FleetWeights(checkpoint=base, checkpoint_digest=base_digest(state, plan)) if base else None
    )


def base_digest(state: FleetState, plan: FleetPlan) -> str | None:
    """The identity that the model's files had when the fleet came up; None if it is not known."""
    base = base_weights(state).get(plan.servers[0].base_as_written) if plan.servers else None
    return base.files.shards.removeprefix(by_files("")) or None if base else None


def off_base(state: FleetState, plan: FleetPlan) -> Finding | None:
    """What is to be said of a Tinker API whose servers hold another base than it trains."""
    weights = state.weights()
    version = weights.version
    if plan.tinker is None or version is None or version.startswith(LABEL_PREFIX):
        return None
    if weights.checkpoint_digest == base_digest(state, plan):
        return None  # it was pushed back
    detail = f"trains {plan.base}, and its adapters are sampled over {version}"
    hint = "go back: skyctl sync-weights --rollback base; or train what was pushed: `model:`"
    return Finding("tinker", Condition.OFF_BASE, detail, hint=hint, severity=Severity.WARNING)


def started_with(plan: FleetPlan) -> str | None:
    """The model that servers are started with, None if its weights are in no file that a push
    reads.
    """
    directory = locate(plan.base)
    has_shards = directory is not None and any(directory.glob("*.safetensors"))
    return plan.base if has_shards else None


def record_files(state: FleetState, plan: FleetPlan) -> None:
    """Put on record what the models of a plan are now, before servers are started with them. What
    is on record stays while the fleet is up; what was not here then is added.
    """
    recorded, bases = base_weights(state), {}
    for spec in plan.servers:
        if spec.base:
            base = recorded.get(spec.base_as_written, BaseWeights())
            missing = not base.files.shards and not base.files.settings
            files = files_of(spec.base) if missing else base.files
            bases[spec.base_as_written] = replace(base, files=files)
    if bases != recorded:
        record_base(state, bases)


async def compare_with_base(
    replica: Replica, state: FleetState, plan: FleetPlan, client: ControlClient
) -> None:
    """Quarantine a server that was not started with what the fleet came up with. Before the first
    push its weights are compared by digest.
    """
    # one that sleeps was compared before, and its memory may be unmapped
    if replica.adopted and (replica.row.sleep_level or replica.asleep):
        replica.compared = True
        return
    model, launched = replica.spec.base_as_written, replica.launched
    engine, digest, unread = "", replica.row.weights_digest or "", ""
    began = state.weights().version is None and replica.row.weight_version is None
    if began and not digest:
        engine, digest, unread = await _digest_at_start(replica, plan, client)
    base = base_weights(state).get(model, BaseWeights())
    place = f"{engine} {arrangement_of(digest)}"
    problem = other_settings(base, launched)
    instead = "begin again with what they are now: skyctl down, then skyctl up"
    settings_differ = bool(problem)
    if began and not settings_differ:
        problem = other_weights(base, launched, place, digest, unread)
        instead = "push what the fleet is to serve: skyctl sync-weights CKPT"
    replica.compared = True
    if problem:
        with state.transaction():
            if settings_differ:
                state.expected.mark_other_settings(replica.name)
            replica.update_row(
                quarantine=f"{model}: {problem}; put its files back, then: skyctl restart "
                f"{replica.name}; or {instead}"
            )
    elif engine:
        with state.transaction():
            learn_base(state, model, place, digest)
            replica.update_row(weights_digest=digest)
            if launched and launched.shards:
                launch = ExpectedDigest(launched.shards, engine, digest, "launch")
                state.expected.learn(Learned([launch]).to_json())


async def _digest_at_start(
    replica: Replica, plan: FleetPlan, client: ControlClient
) -> tuple[str, str, str]:
    """The engine of a server, with its arguments, and the digest of its weights; "" if it cannot
    say, or the fleet verifies nothing. Third, why it did not say what it can.
    """
    transfer = plan.config.weight_transfer
    if not transfer.verify or "dummy" in replica.spec.argv:  # random weights
        return "", "", ""
    if Feature.PUSH not in engines.ENGINES[plan.config.engine].supports:
        return "", "", ""  # nothing moves its weights, and it need not have workers to ask
    server = engines.server(client, replica.target, timeout_s=plan.config.control_timeout_s)
    try:
        weights = await weights_digest(server, timeout_s=transfer.update_timeout_s)
        version = await server.version()
    except ServerError as error:
        _LOG.warning("%s: its weights were not checked: %s", replica.name, error.message)
        cannot = isinstance(error, CannotDigest) or error.status == 404
        return "", "", "" if cannot else error.message
    if weights.how and plan.device == "cpu":  # checksums of linear layers are of nothing there
        return "", "", ""
    return f"{version}+{arguments_of(replica.spec)}", weights.digest, ""


async def wake(replica: Replica, client: ControlClient) -> None:
    """Wake a server that slept outside the fleet. Raises ServerError if it does not."""
    [outcome] = await actions.wake(client, [replica.target])
    if not outcome.ok:
        raise ServerError(f"{replica.name} did not wake: {outcome.detail}")
    replica.asleep = False
    replica.observe(paused=False)


async def apply_intent(replica: Replica, client: ControlClient, timeout_s: float) -> None:
    """Bring a server to its intended state: paused or asleep as its predecessor was, or running."""
    row, resume = replica.row, replica.resume_when_up
    replica.intent_changed = replica.resume_when_up = False  # later changes are applied next
    outcomes: Sequence[Outcome[Any]]
    if row.sleep_level:
        outcomes = await actions.sleep(
            client, [replica.target], level=row.sleep_level, timeout_s=timeout_s
        )
    elif row.paused:
        outcomes = await actions.pause(
            client, [replica.target], mode="keep", timeout_s=timeout_s, keep_partial=True
        )
    elif resume and not row.quarantine:
        outcomes = await actions.resume(client, [replica.target], timeout_s=timeout_s)
    else:
        return
    if not outcomes[0].ok:
        raise ServerError(f"{replica.name} could not be made as intended: {outcomes[0].detail}")
    await refresh_all([replica], client, timeout_s)


async def refresh_all(
    replicas: Collection[Replica], client: ControlClient, timeout_s: float
) -> dict[str, str]:
    """Ask servers whether they are paused; returns the errors of those that refused or failed, by
    name.

    A server that does not answer in time is left to the health probes: it may only be busy.

    All states change at once: between the first server seen paused and the last, the router would
    send everything to those not yet seen.
    """
    numbers = [replica.begin_probe() for replica in replicas]
    probes = (probe_alive(client, replica.target, timeout_s) for replica in replicas)
    answers = await asyncio.gather(*probes, return_exceptions=True)
    failed = {}
    for replica, number, paused in zip(replicas, numbers, answers, strict=True):
        if isinstance(paused, bool):
            replica.observe(paused=paused, probe=number)
        elif not isinstance(paused, ServerError):
            raise paused
        elif not isinstance(paused, DeadlineExceeded):
            failed[replica.name] = paused.message
    return failed


def reload_rows(replicas: Sequence[Replica], state: FleetState) -> None:
    """Take over what another process wrote about several servers."""
    rows = {row.name: row for row in state.servers()}
    for replica in replicas:
        replica.reload_row(rows.get(replica.name))


def is_current(state: FleetState, replica: Replica) -> bool:
    """Whether the server has the weights every routed server must have."""
    weights, row = state.weights_of(replica.name), replica.row
    if weights.version is None:  # it has those that it was started with, unless a push reached it
        return row.weight_version is None and replica.name not in in_doubt(state)
    # a label alone proves little: "latest" may have meant other bytes
    return (row.weight_version, row.checkpoint_digest) == (
        weights.version,
        weights.checkpoint_digest,
    )

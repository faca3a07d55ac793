"""Bring a server that starts, or that recovery repairs, to the fleet's weights: from files, or from
a sibling where no file has them.

The server's workers copy what the sibling's hold (`push/sibling_way.py`). Where they cannot, the
sibling writes it into a file in memory (`push/saving.py`), and that is pushed. It serves meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from skyctl import engines
from skyctl.checkpoints.configs import ALL_KEYS
from skyctl.checkpoints.live import running_model
from skyctl.checkpoints.staging import in_use, staged, sweep
from skyctl.core.arbiter import PATIENCE_S
from skyctl.core.expectations import informed
from skyctl.core.repeated import published, require_draft
from skyctl.errors import (
    ConflictError,
    PreflightError,
    ServerError,
    SkyctlError,
    StateUnwritable,
    WeightsGone,
)
from skyctl.push.request import PushObserver, PushRequest, PushResult, Sibling
from skyctl.push.saving import write_weights
from skyctl.push.sibling_way import BUFFER_BYTES
from skyctl.push.verify import arrangement_of, can_compare
from skyctl.states import Phase
from skyctl.store.in_doubt import clear_doubt, in_doubt, leave_to_next_push, touch
from skyctl.supervisor.admission import is_current, push_fleet
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.replica import Replica


async def bring_to_weights(replica: Replica, running: RunningFleet) -> None:
    """Push the fleet's weights into this server; quarantine it if that fails.

    If the fleet has moved on to other weights meanwhile, a failure is ignored.
    """
    state = running.state
    weights = state.weights_of(replica.name)
    try:
        await push_alone(replica, running)
    except SkyctlError as error:
        if state.weights_of(replica.name) != weights:
            return  # what was pushed may be gone from disk by now: the caller tries the new weights
        if isinstance(error, WeightsGone):
            leave_to_next_push(state, replica.name)
        again = "push or update again (skyctl sync-weights CKPT)"
        hint = f"{again}, then: skyctl restart {replica.name}"
        if isinstance(error, StateUnwritable):
            hint = f"{error.hint}, then: skyctl recover"
        replica.update_row(
            quarantine=f"not brought to weight version {weights.version}: {error.message}; {hint}"
        )


async def push_alone(replica: Replica, running: RunningFleet) -> None:
    """Push the fleet's weights into this server, unless another call just did. Raises SkyctlError.

    A recovery may want to bring a server that has ended meanwhile and is brought by its own start.
    """
    under_way = replica.pushed_alone.locked()
    async with replica.pushed_alone:
        doubted = replica.name in in_doubt(running.state)
        if not (under_way and not doubted and is_current(running.state, replica)):
            await _push_alone(replica, running)


async def _push_alone(replica: Replica, running: RunningFleet) -> None:
    state = running.state
    weights = state.weights_of(replica.name)
    await asyncio.to_thread(require_draft, weights)  # no sibling has it in a file
    try:
        # may read a whole checkpoint
        request = await asyncio.to_thread(published, weights)
    except WeightsGone as error:
        result = await _from_sibling(replica, running, error)
    else:
        with in_use(request.checkpoint):
            result = await _pushed(request, replica, running)
    digest = next((s.weights_digest for s in result.servers), "")
    _refuse_unlike(replica, running, digest)
    state.expected.learn(result.learned)
    clear_doubt(state, replica.name)
    replica.update_row(
        weight_version=weights.version,
        checkpoint=weights.checkpoint,
        checkpoint_digest=weights.checkpoint_digest,
        weights_digest=digest or None,
    )


async def _pushed(
    request: PushRequest, replica: Replica, running: RunningFleet, sibling: Sibling | None = None
) -> PushResult:
    """Push into this server alone."""
    from skyctl.push.transaction import push

    state, plan = running.state, running.require_plan()
    fleet = informed(push_fleet(plan, [replica], state, plan.base), state)
    # first: this process may die meanwhile
    touch(state, replica.name)
    try:
        return await push(
            request,
            replace(fleet, sibling=sibling),
            client=running.client,
            observer=PushObserver(),
        )
    except SkyctlError as error:
        state.expected.learn(error.details.pop("learned", None))
        raise


async def _from_sibling(replica: Replica, running: RunningFleet, gone: WeightsGone) -> PushResult:
    """Take the weights from a sibling: out of its workers' memory where both fit, else out of a
    file that it writes.

    Raises:
        WeightsGone: no sibling has them, or can give them.
    """
    state = running.state
    sibling = _sibling_of(replica, running)
    if sibling is None:
        raise gone
    state.add_event(replica.name, f"taking its weights from {sibling.name}: {gone.message}")
    if _same_form(replica, sibling, running):
        new = replica.name not in in_doubt(state)
        try:
            result = await _copied(replica, sibling, running)
        except SkyctlError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # this server died meanwhile
            if new and isinstance(error, PreflightError):
                clear_doubt(state, replica.name)  # nothing was touched
            reason = f"its workers did not copy those of {sibling.name}: {error.message}"
            state.add_event(replica.name, f"{reason}; {sibling.name} writes them to a file")
        else:
            state.add_event(replica.name, f"its workers copied those of {sibling.name}")
            return result
        sibling = _sibling_of(replica, running)
        if sibling is None:
            raise WeightsGone(f"{gone.message}, and {reason}")
    async with AsyncExitStack() as stack:
        try:
            request = await stack.enter_async_context(_written_by(sibling, running))
        except SkyctlError as error:
            raise WeightsGone(f"{gone.message}, and {error.message}") from error
        return await _pushed(request, replica, running)


@asynccontextmanager
async def none_copied(replicas: Iterable[Replica]) -> AsyncIterator[None]:
    """Nothing is read out of these servers' memory inside, which their sleep unmaps.

    Raises:
        ConflictError: another server takes its weights from one, for longer than a verb waits.
    """
    async with AsyncExitStack() as stack:
        for replica in replicas:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await stack.enter_async_context(replica.copied_from)
            except TimeoutError:
                raise ConflictError(
                    f"a server that starts takes its weights from {replica.name}",
                    hint="wait for it: skyctl wait",
                ) from None
        yield


@asynccontextmanager
async def _awake(sibling: Replica, running: RunningFleet) -> AsyncIterator[None]:
    """A sibling is read for one server at a time, and does not fall asleep meanwhile.

    Raises:
        PreflightError: it sleeps by now.
    """
    async with sibling.copied_from:
        if running.state.server(sibling.name).sleep_level:
            raise PreflightError(f"{sibling.name} sleeps by now")
        yield


def _same_form(replica: Replica, sibling: Replica, running: RunningFleet) -> bool:
    """Whether the workers of these two may hold the same tensors, on one machine, with a digest on
    record to compare them by.
    """
    specs, plan = (replica.spec, sibling.spec), running.require_plan()
    return (
        can_compare(replica.target)
        and all(spec.node is None and not spec.followers for spec in specs)
        and replica.spec.world_size == sibling.spec.world_size
        and bool(sibling.row.weights_digest)
        and not running.state.weights_of(replica.name).draft
        and plan.config.weight_transfer.verify
    )


async def _copied(replica: Replica, sibling: Replica, running: RunningFleet) -> PushResult:
    """Have this server's workers copy what the sibling's hold. PreflightError: nothing was
    touched.
    """
    plan, paths = running.require_plan(), running.paths
    control = engines.server(
        running.client, sibling.target, timeout_s=plan.config.control_timeout_s
    )
    request = PushRequest(
        checkpoint="",
        weight_version=sibling.row.weight_version,
        weights_digest=sibling.row.weights_digest,
        scan_nan=False,  # they were accepted when they were pushed
    )
    needed_bytes = BUFFER_BYTES * sibling.spec.world_size if plan.device == "cpu" else 0
    try:
        async with _awake(sibling, running):
            with staged(paths.staging, needed_bytes=needed_bytes) as directory:
                return await _pushed(request, replica, running, Sibling(control, str(directory)))
    finally:
        await asyncio.to_thread(sweep, paths.staging, running.state.checkpoints())


def _sibling_of(replica: Replica, running: RunningFleet) -> Replica | None:
    """A server that has the weights that this one is to have, and writes them where this machine
    reads them.
    """
    doubts = in_doubt(running.state)
    for sibling in running.replicas.values():
        reaches = sibling.spec.node is None or running.paths.shared is not None
        up = sibling is not replica and sibling.phase is Phase.UP and reaches
        row = running.state.server(sibling.name)  # recovery may have just released it
        whole = not row.quarantine and not row.sleep_level and sibling.name not in doubts
        same = running.state.weights_of(sibling.name) == running.state.weights_of(replica.name)
        if up and whole and same and is_current(running.state, sibling):
            return sibling
    return None


@asynccontextmanager
async def _written_by(sibling: Replica, running: RunningFleet) -> AsyncIterator[PushRequest]:
    """A request with the weights that a sibling runs."""
    state, plan, paths = running.state, running.require_plan(), running.paths
    transfer = plan.config.weight_transfer
    weights = state.weights_of(sibling.name)
    model = await asyncio.to_thread(running_model, plan.base)
    server = engines.server(running.client, sibling.target, timeout_s=plan.config.control_timeout_s)
    in_memory = paths.shared is None
    try:
        with staged(
            paths.staging, needed_bytes=model.total_bytes, in_memory=in_memory
        ) as directory:
            async with _awake(sibling, running):
                await write_weights(
                    server,
                    model,
                    directory,
                    digest=sibling.row.weights_digest or "",
                    timeout_s=transfer.update_timeout_s,
                )
            yield PushRequest(
                checkpoint=str(directory),
                weight_version=sibling.row.weight_version,
                draft=weights.draft,  # a server writes its model alone
                expected_draft=weights.draft_digest,
                scan_nan=False,  # they were accepted when they were pushed
                allow_config=(ALL_KEYS,),
            )
    finally:
        await asyncio.to_thread(sweep, paths.staging, state.checkpoints())


def _refuse_unlike(replica: Replica, running: RunningFleet, digest: str) -> None:
    """Raise ServerError if a sibling that holds the model in the same way has other weights on
    record."""
    state = running.state
    for sibling in running.replicas.values():
        recorded = sibling.row.weights_digest or ""
        same = state.weights_of(sibling.name) == state.weights_of(replica.name)
        if sibling is replica or not recorded or not same or not is_current(state, sibling):
            continue
        if arrangement_of(recorded) == arrangement_of(digest) and recorded != digest:
            raise ServerError(f"{replica.name} did not get the weights of {sibling.name}")

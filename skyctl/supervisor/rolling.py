"""Bring a fleet to a plan without taking it down: what is missing starts first, the others restart
a few at a time; the first that does not come back ends that, and gets its old settings back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from skyctl.core.plan import FleetPlan, FrontSpec, RouterSpec, ServerSpec
from skyctl.engines.logs import tail, this_run
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.states import Phase
from skyctl.supervisor import adapters, rollout
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.replica import Replica
from skyctl.supervisor.router import RouterChild
from skyctl.supervisor.steps import Order, Step, order_of
from skyctl.supervisor.wire import spec_hash

_LOG_LINES = 20


async def apply_plan(
    running: RunningFleet, plan: FleetPlan, *, parallel: int = 1, undo: bool = True
) -> None:
    """Bring the fleet to the plan; returns once every new replica and front has settled.

    Raises:
        SkyctlError: a replica or a front was given up. The others run, those that were not reached
            with their old settings.
    """
    await adapters.take_initial(running, plan)
    specs = {spec.name: spec for spec in plan.servers}
    order = _order(running, plan, parallel)
    for name in order.first:
        _begin(running, specs[name])
    moved = {r.spec.role for r in running.replicas.values()} != {s.role for s in plan.servers}
    if running.router is None or moved:  # a router of pairs takes no other servers
        await rollout.remove_other_fronts(running, plan)
        rollout.start_router(running, plan)
    if order.steps or order.last:
        await _settled(running, order.first)
        _raise_for(running, order.first)
    await roll(running, order.steps, specs, undo=undo)
    await _replace_fronts(running, plan, undo=undo)
    for name in order.last:
        await _remove(running, running.replicas[name])
    rollout.start_tinker(running, plan)  # it asks for its endpoint once
    running.replicas = {name: running.replicas[name] for name in specs}
    await _settled(running, specs)
    await rollout.settle_fronts(running)
    rollout.raise_for_failures(running)


async def restart_rolling(running: RunningFleet, replicas: Sequence[Replica]) -> None:
    """Restart one replica after the other: out of the router, drained, new process, back in.

    Raises:
        SkyctlError: a replica did not come back; those after it were not touched.
    """
    specs = {replica.name: replica.planned for replica in replicas}
    specs |= {spec.name: spec for spec in running.require_plan().servers if spec.name in specs}
    await roll(running, [Step((name,), (name,)) for name in specs], specs, undo=False)
    await rollout.settle_router(running)


def in_force(running: RunningFleet, before: FleetPlan) -> FleetPlan:
    """The plan of a fleet that did not become what it should: `before`, with what runs by now."""
    router, tinker = running.router, running.tinker
    return replace(
        before,
        servers=tuple(replica.planned for replica in running.replicas.values()),
        router=router.planned if router and isinstance(router.planned, RouterSpec) else None,
        tinker=tinker.planned if tinker and isinstance(tinker.planned, FrontSpec) else None,
    )


async def roll(
    running: RunningFleet,
    steps: Sequence[Step],
    specs: Mapping[str, ServerSpec],
    *,
    undo: bool,
) -> None:
    """Take the steps in turn. Raises SkyctlError after the first that fails."""
    total = sum(len(step.start) for step in steps)
    for number, step in enumerate(steps):
        done = sum(len(earlier.start) for earlier in steps[:number])
        running.progress = (done, total)
        serving = [name for name in step.stop if _serves(running.replicas[name])]
        running.replaced = {name: running.replicas[name].planned for name in serving}
        failures = await _take(running, step, specs)
        if failures:
            later = [name for step in steps[number + 1 :] for name in step.start]
            await _stop_at(running, step, failures, later, undo=undo)
        running.replaced = {}
        completed = {*step.start}
        running.started_by_operation = [
            name for name in running.started_by_operation if name not in completed
        ]
        for name in step.stop:
            if name not in specs:
                await rollout.remove(running, running.replicas[name])
    running.progress = None


async def _stop_at(
    running: RunningFleet,
    step: Step,
    failures: Mapping[str, str],
    later: Collection[str],
    *,
    undo: bool,
) -> None:
    """Give the servers of a failed step their old settings back. Raises SkyctlError, which says how
    they all are.
    """
    logs = {name: tail(running.paths.log(name), _LOG_LINES) for name in failures}
    running.failed_logs = {name: tuple(this_run(lines)) for name, lines in logs.items()}
    parts = [f"{name} did not come back: {reason}" for name, reason in failures.items()]
    same = all(
        name in running.replicas and _same(running.replicas[name].planned, spec)
        for name, spec in running.replaced.items()
    )
    if undo and not same:
        parts += await put_back(running, [n for n in step.start if n not in running.replaced])
    running.replaced, running.progress = {}, None
    if later:
        parts.append(f"not touched: {', '.join(later)}")
    raise SkyctlError("; ".join(parts))


async def put_back(running: RunningFleet, added: Iterable[str] = ()) -> list[str]:
    """End the `added` servers of a step that failed or was interrupted, and start those that they
    replaced with what they ran with before. Returns what has become of each.
    """
    old, running.replaced = running.replaced, {}
    if not old:
        return []
    for name in added:
        if name in running.replicas:
            await rollout.remove(running, running.replicas[name])
    replicas = [running.replicas[name] for name in old]
    changed = [r for r in replicas if not _serves(r) or not _same(r.planned, old[r.name])]
    restarts = (rollout.restart(running, replica, old[replica.name]) for replica in changed)
    await asyncio.gather(*restarts, return_exceptions=True)
    running.held_out.difference_update(old)
    await rollout.sync_router(running)
    back = [replica.name for replica in changed if _serves(replica)]
    parts = [f"with their old settings again: {', '.join(back)}"] if back else []
    return parts + [
        f"{replica.name} does not start with its old settings either: {_reason(replica)}"
        for replica in changed
        if not _serves(replica)
    ]


async def _take(
    running: RunningFleet, step: Step, specs: Mapping[str, ServerSpec]
) -> dict[str, str]:
    """Take one step; returns why those that did not come back did not."""
    ending = [running.replicas[name] for name in step.stop]
    try:
        ends = (_end(running, replica) for replica in ending)
        outcomes = dict(zip(step.stop, await asyncio.gather(*ends), strict=True))
        failures = {name: error for name, error in outcomes.items() if error is not None}
        for name in step.start:
            error = failures.get(name)
            # what an unreachable machine runs is ended before the start
            if error is None or isinstance(error, HostUnreachable):
                _begin(running, specs[name])
        if failures:
            return {name: error.message for name, error in failures.items()}
        await _settled(running, step.start)
    finally:
        running.held_out.difference_update(step.stop)
        await rollout.sync_router(running)
    replicas = [running.replicas[name] for name in step.start]
    return {replica.name: _reason(replica) for replica in replicas if not _serves(replica)}


async def _end(running: RunningFleet, replica: Replica) -> SkyctlError | None:
    """Take a replica out of the router and end its process; returns why it did not end."""
    try:
        await rollout.leave_router(running, replica)
        await replica.stop()
    except SkyctlError as error:
        return error
    return None


async def _remove(running: RunningFleet, replica: Replica) -> None:
    """Remove a replica; interrupted before it has ended, it serves again (`put_back`)."""
    running.replaced = {replica.name: replica.planned} if _serves(replica) else {}
    await rollout.remove(running, replica)
    running.replaced = {}


def _begin(running: RunningFleet, spec: ServerSpec) -> None:
    replica = running.replicas.get(spec.name)
    if replica is None or (replica.phase.ended and spec.name not in running.replaced):
        running.started_by_operation.append(spec.name)
    if replica is None:
        running.start_new(spec)
        return
    replica.planned = spec
    replica.start()


async def _replace_fronts(running: RunningFleet, plan: FleetPlan, *, undo: bool) -> None:
    """Start the plan's router in the place of another. Raises SkyctlError if it is given up."""
    router = running.router
    serves = router is not None and router.phase is Phase.READY
    old = router.planned if router and serves and _runs_as_planned(router) else None
    running.router_before = old if isinstance(old, RouterSpec) else None
    await rollout.remove_other_fronts(running, plan)
    rollout.start_router(running, plan)
    if not isinstance(old, RouterSpec) or running.router in (None, router) or not undo:
        return
    await rollout.settle_router(running)
    assert running.router is not None  # just started
    if not running.router.phase.given_up:
        running.router_before = None
        return
    reason = running.router.reason
    running.failed_logs = {"router": tuple(tail(running.paths.log("router"), _LOG_LINES))}
    await rollout.remove_front(running, running.router)
    rollout.new_router(running, old).start()
    await rollout.settle_router(running)
    raise SkyctlError(f"router did not come back: {reason}; it has its old settings again")


async def put_router_back(running: RunningFleet) -> None:
    """Start the router that an interrupted change was replacing, unless another serves by now."""
    old, router = running.router_before, running.router
    if old is None or router is None or router.planned == old or router.phase is Phase.READY:
        return
    await rollout.remove_front(running, router)
    rollout.new_router(running, old).start()


def _order(running: RunningFleet, plan: FleetPlan, parallel: int) -> Order:
    return order_of(
        running.changes(plan),
        {name: replica.spec for name, replica in running.replicas.items()},
        {spec.name: spec for spec in plan.servers},
        serving=[name for name, replica in running.replicas.items() if _serves(replica)],
        parallel=parallel,
        share_gpus=plan.config.share_gpus,
    )


async def _settled(running: RunningFleet, names: Iterable[str]) -> None:
    await asyncio.gather(*(running.replicas[name].settled.wait() for name in names))


def _raise_for(running: RunningFleet, names: Iterable[str]) -> None:
    """Raise SkyctlError if a new server does not serve: nothing else is touched then."""
    replicas = [running.replicas[name] for name in names]
    problems = [
        f"{replica.name} {_reason(replica)}" for replica in replicas if not _serves(replica)
    ]
    if problems:
        raise SkyctlError(f"{'; '.join(problems)}; what runs was not touched")


def _serves(replica: Replica) -> bool:
    return replica.phase is Phase.UP and not replica.row.quarantine


def _reason(replica: Replica) -> str:
    return replica.row.quarantine or replica.reason or replica.phase


def _runs_as_planned(router: RouterChild) -> bool:
    """Whether it runs with its `planned` settings: an adopted one may run with others."""
    return router.running_hash == spec_hash(router.planned)


def _same(spec: ServerSpec, other: ServerSpec) -> bool:
    return spec_hash(spec) == spec_hash(other)

"""What is done with single processes of a fleet: start, drain, restart, remove, take down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from skyctl import engines
from skyctl.core.plan import FleetPlan, FrontSpec, RouterSpec, ServerSpec
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.kill_points import reached
from skyctl.launch import DEFAULT, HOSTS
from skyctl.launch.base import Host
from skyctl.states import Phase, ReplicaState
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.front import Front, FrontContext, TinkerChild
from skyctl.supervisor.replica import Replica
from skyctl.supervisor.router import RouterChild
from skyctl.supervisor.wire import spec_hash

_DRAIN_POLL_S = 0.25
_SETTLE_POLL_S = 0.25


async def remove(running: RunningFleet, replica: Replica) -> None:
    """Take a replica out of the fleet: drained, stopped, forgotten."""
    try:
        await leave_router(running, replica)
        await replica.stop()
    finally:  # one that was not ended may be started again
        running.held_out.discard(replica.name)
    running.replicas.pop(replica.name, None)
    running.state.forget_process(replica.name)
    running.state.forget_server(replica.name)


async def take_down(running: RunningFleet, drain_timeout_s: float) -> None:
    """Stop the Tinker API, which makes requests of its own, stop routing, drain, stop the router,
    stop the servers, forget the run.

    Raises:
        SkyctlError: some process could not be stopped; everything else was.
    """
    running.draining = True
    host = host_of(running.state)
    replicas = list(running.replicas.values())
    problems: list[object] = []
    if running.tinker is not None:
        problems += await asyncio.gather(running.tinker.stop(), return_exceptions=True)
    if drain_timeout_s > 0:
        await sync_router(running)
        await asyncio.gather(*(_drain(running, r, drain_timeout_s) for r in replicas))
    if running.router is not None:
        problems += await asyncio.gather(running.router.stop(), return_exceptions=True)
    problems += await asyncio.gather(*(r.stop() for r in replicas), return_exceptions=True)
    stop_timeout_s = running.plan.config.stop_timeout_s if running.plan else 15.0
    rows = running.state.processes()  # never adopted, or from an interrupted spawn
    stopping = (stop_recorded(row, host, stop_timeout_s) for row in rows)
    problems += await asyncio.gather(*stopping, return_exceptions=True)
    running.replicas.clear()
    reached("down.stopped")
    raise_all(problems)
    running.state.forget_run()
    await asyncio.to_thread(host.sweep, running.paths)


def raise_all(outcomes: Sequence[object]) -> None:
    """Raise SkyctlError with the distinct errors among the outcomes of parallel work."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failed:
        raise SkyctlError("; ".join(dict.fromkeys(str(error) for error in failed)))


def host_of(state: FleetState) -> Host:
    """Where the processes on record run."""
    return HOSTS[state.get("launcher") or DEFAULT]


async def stop_recorded(row: ProcessRow, host: Host, timeout_s: float) -> bool:
    """Stop whatever is left of a recorded process; True if there was something.

    Raises:
        SkyctlError: it cannot be stopped.
    """
    process = host.adopt(row.identity, row.token, row.descendants)
    if not process.members():
        return False
    await process.stop(timeout_s)
    return True


async def sync_router(running: RunningFleet) -> None:
    """Bring the router's workers up to date now; on failure its own loop tries again."""
    router = running.router
    if router is None:
        return
    if router.phase is not Phase.READY and not router.renewing:
        router.wake()
        return
    try:
        await router.sync()
    except SkyctlError:
        router.wake()


async def remove_other_fronts(running: RunningFleet, plan: FleetPlan) -> None:
    """Remove the fronts that the plan does not have, or has with other settings."""
    for role in ("router", "tinker"):
        front, planned = getattr(running, role), getattr(plan, role)
        same = front and planned and front.running_hash == spec_hash(planned)
        if front is not None and not same:
            await remove_front(running, front)
        elif front is None and planned is not None:
            running.started_by_operation.append(role)


async def remove_front(running: RunningFleet, front: Front) -> None:
    """Take a front out of the fleet: stopped, forgotten."""
    await front.stop()
    running.state.forget_process(front.name)
    setattr(running, front.name, None)


def start_router(running: RunningFleet, plan: FleetPlan) -> None:
    """Start the plan's router, unless it runs."""
    if plan.router is not None:
        (running.router or new_router(running, plan.router)).start()


def start_tinker(running: RunningFleet, plan: FleetPlan) -> None:
    """Start the plan's Tinker API, unless it runs."""
    if plan.tinker is not None:
        (running.tinker or new_tinker(running, plan.tinker)).start()


def new_router(running: RunningFleet, spec: RouterSpec) -> RouterChild:
    """The fleet's router, not started yet."""
    context = _front_context(running, running.desired, running.wake_tinker)
    running.router = RouterChild(spec, context)
    return running.router


def new_tinker(running: RunningFleet, spec: FrontSpec) -> TinkerChild:
    """The fleet's Tinker API, not started yet."""
    context = _front_context(running, running.routed, lambda: None)
    running.tinker = TinkerChild(spec, context)
    return running.tinker


def _front_context(
    running: RunningFleet, desired: Callable[[], Mapping[str, str]], changed: Callable[[], None]
) -> FrontContext:
    return FrontContext(
        state=running.state,
        paths=running.paths,
        client=running.client,
        config=lambda: running.require_plan().config,
        changed=changed,
        desired=desired,
        undecided=running.undecided,
        role=lambda name: running.replicas[name].spec.role,
        entries=running.entries,
    )


async def settle_router(running: RunningFleet) -> None:
    """Wait for the router and its workers, unless there is nothing to route to."""
    if running.router is not None:
        await _await_front(running.router, lambda: _to_come(running))
        if running.desired():
            await sync_router(running)


async def settle_fronts(running: RunningFleet) -> None:
    """Wait for the router, its workers and the Tinker API, each unless it has nothing to serve."""
    await settle_router(running)
    if running.tinker is not None:
        await _await_front(running.tinker, lambda: takes_requests(running))


async def _await_front(front: Front, worth: Callable[[], bool]) -> None:
    """Wait until a front has settled, or until it waits for something and `worth` is false."""
    settled = asyncio.create_task(front.settled.wait())
    try:
        while not settled.done() and (front.phase is not Phase.WAITING or worth()):
            await asyncio.wait({settled}, timeout=_SETTLE_POLL_S)
    finally:
        settled.cancel()


def _to_come(running: RunningFleet) -> bool:
    """Whether there is a server to route to, or one starting."""
    replicas = running.replicas.values()
    return bool(running.desired()) or any(not r.phase.settled for r in replicas)


def takes_requests(running: RunningFleet) -> bool:
    """Whether the fleet takes requests, or will by itself."""
    router = running.router
    return _to_come(running) and (router is None or not router.phase.given_up)


def raise_for_failures(running: RunningFleet) -> None:
    """Raise SkyctlError if a replica or a front was given up."""
    failed = [r for r in running.replicas.values() if r.phase not in (Phase.UP, Phase.ASLEEP)]
    problems = [f"{r.name} {r.reason or r.phase}" for r in failed]
    for front in (running.router, running.tinker):
        if front is not None and front.phase.given_up:
            problems.append(f"{front.name} {front.reason}")
    if problems:
        raise SkyctlError("; ".join(problems))


async def restart(running: RunningFleet, replica: Replica, spec: ServerSpec) -> None:
    """Start a new process for one replica, out of the router meanwhile; returns once it has
    settled.

    Raises:
        HostUnreachable: its machine does not answer. It starts once that has ended what runs there.
    """
    await leave_router(running, replica)
    try:
        try:
            await replica.stop()
        except HostUnreachable:
            replica.planned = spec
            replica.start()
            raise
        replica.planned = spec
        replica.start()
        await replica.settled.wait()
    finally:
        running.held_out.discard(replica.name)
        await sync_router(running)


async def drain_all(
    running: RunningFleet, replicas: Sequence[Replica], timeout_s: float | None = None
) -> None:
    """Wait for the requests of servers that are not routed to (None: as the fleet file says)."""
    if timeout_s is None:
        timeout_s = running.require_plan().config.drain_timeout_s
    await asyncio.gather(*(_drain(running, replica, timeout_s) for replica in replicas))


async def leave_router(running: RunningFleet, replica: Replica) -> None:
    """Have no more requests sent to a server, and wait for those that it has."""
    running.held_out.add(replica.name)
    await sync_router(running)
    plan = running.require_plan()
    await _drain(running, replica, plan.config.drain_timeout_s)


async def _drain(running: RunningFleet, replica: Replica, timeout_s: float) -> None:
    """Wait until the server has no requests, at most `timeout_s` seconds."""
    # requests of a frozen server do not finish
    if timeout_s <= 0 or replica.state is not ReplicaState.READY:
        return
    server = engines.server(running.client, replica.target, timeout_s=min(5.0, timeout_s))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if (await server.metrics()).in_flight == 0:
                return
        except SkyctlError:
            return
        await asyncio.sleep(_DRAIN_POLL_S)
    running.state.add_event(replica.name, f"still has requests after {timeout_s:g} s")

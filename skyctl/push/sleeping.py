"""A push into a sleeping fleet (`--colocated`), and one that ends asleep (`--sleep-after`).

    stage ─► wake weights ─► push … verify ─► wake kv_cache ─► resume ─► [sleep]
             └─ fails before the first byte: asleep again, as far as vLLM allows it

vLLM ignores a sleep while any part of a server is asleep: to put awake weights back to sleep, the
rest is woken first. This is not done for weights that a level-2 sleep discarded, because such a
server would generate from nothing: it stays asleep with its weights awake, and says so.

These calls have the deadline of an update: a first sleep pins host memory, which takes long.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyctl import engines
from skyctl.engines.base import Server
from skyctl.errors import PreflightError, ServerError, StateUnwritable
from skyctl.kill_points import reached
from skyctl.push.freeze import require_all
from skyctl.push.frozen import take_over_awake
from skyctl.push.request import PushRequest
from skyctl.push.run import Run
from skyctl.push.servers import Holds, PushedServer, alive, each, responsive
from skyctl.states import DISCARDED, PushState


def refuse_impossible(request: PushRequest) -> None:
    """Raise PreflightError for options that exclude each other, or a level that there is not."""
    if request.sleep_after not in (0, 1, DISCARDED):
        raise PreflightError(f"--sleep-after {request.sleep_after}: the levels are 1 and 2")
    if request.leaves_router and (request.colocated or request.sleep_after):
        raise PreflightError(
            "--colocated and --sleep-after are for fleets that serve nobody meanwhile, --rolling "
            "and --trial for fleets that do",
            hint="push without one of them",
        )


async def wake_weights(run: Run, servers: Sequence[PushedServer]) -> None:
    """Make room for the new weights in every sleeping server, also where they are awake by their
    record, which a death can make wrong.
    """
    asleep = sleepers(servers)
    if not asleep:
        run.note("no server was asleep: --colocated made no difference")

    async def call(server: PushedServer) -> None:
        if not server.given.recorded.weights_awake:
            # before the call: if its answer is lost, or we die, they may be awake
            server.did.woken = True
            run.observer.server(server.name, PushState.WAKING)
        await wake_weights_alone(_patient(run, server))
        if await server.control.is_paused():
            return
        if (await server.control.metrics()).sleep_level:  # another program has resumed it
            await server.control.pause("abort", clear_cache=False)
        else:
            await take_over_awake(server)

    await each(asleep, call, timeout_s=run.fleet.timeouts.update_s, call_name="wake the weights")
    reached("push.woken")
    require_all(run, servers)


def sleepers(servers: Sequence[PushedServer]) -> list[PushedServer]:
    """Those that sleep, wholly or except for their weights."""
    return [s for s in servers if s.before.asleep or s.given.recorded.weights_awake]


async def sleep_again(run: Run, servers: Sequence[PushedServer]) -> None:
    """Nothing was sent: free the memory that was taken, where possible."""
    woken = [server for server in servers if server.did.woken and server.holds is Holds.OLD]
    for server in woken:
        if server.given.recorded.sleep_level == DISCARDED:
            server.failure = server.failure or "its weights are awake, and empty: push again"
    whole = [server for server in woken if server.given.recorded.sleep_level != DISCARDED]
    failed = [server for server in whole if server.failure]
    answering = await responsive(failed, control_timeout_s=run.fleet.timeouts.control_s)

    async def call(server: PushedServer) -> None:
        asleep = await server.control.is_paused() or (await server.control.metrics()).sleep_level
        if not asleep:  # it was started again, or another program has woken it
            server.did.woken = False
            return
        level = max(1, server.given.recorded.sleep_level)
        # a sleep while they sleep and the rest is awake would be ignored
        await wake_weights_alone(_patient(run, server))
        await back_to_sleep(_patient(run, server), level)
        server.did.slept, server.did.woken = level, False

    able = alive(whole) + answering
    await each(able, call, timeout_s=2 * run.fleet.timeouts.update_s, call_name="sleep again")
    for server in woken:
        if not server.did.woken or server.given.recorded.sleep_level == DISCARDED:
            run.observer.server(server.name, PushState.ASLEEP, server.failure)


async def wake_weights_alone(server: Server) -> None:
    """Wake the weights of a sleeping server, which stays frozen. Waking those of one that is awake
    would thaw it, whatever it holds, so a server that says that it is awake is left as it is.
    """
    if (await server.metrics()).sleep_level == 0:
        return
    if await server.wake(["weights"]):  # the rest was awake: the engine runs now
        await server.pause("abort", clear_cache=False)


async def back_to_sleep(server: Server, level: int) -> None:
    """Put a server back to sleep whose weights alone are awake."""
    await server.wake(["kv_cache"])
    await server.sleep(level, "abort")


async def wake_all(run: Run, servers: Sequence[PushedServer]) -> None:
    """The new weights are verified: wake the rest of each sleeping server, which resumes it."""

    async def call(server: PushedServer) -> None:
        if not await _patient(run, server).wake(["kv_cache"]):
            raise ServerError(f"{server.name}: it says that it is still asleep")
        server.did.slept, server.did.woken = 0, False
        if server.given.recorded.paused:  # it fell asleep while paused by somebody
            await server.control.pause("keep", clear_cache=False)
        else:
            server.did.resumed = True

    asleep = [
        server
        for server in alive(servers)
        if server.before.asleep and server.holds is Holds.VERIFIED
    ]
    await each(asleep, call, timeout_s=2 * run.fleet.timeouts.update_s, call_name="wake the cache")
    reached("push.awake")


async def sleep_after(run: Run, servers: Sequence[PushedServer]) -> None:
    """Free the servers' memory again, for whatever shares it with them."""
    level = run.request.sleep_after
    if not level:
        return
    if level == DISCARDED:
        run.note("a level-2 sleep discards the weights that were just pushed: push before waking")

    async def call(server: PushedServer) -> None:
        await _patient(run, server).sleep(level, "abort")
        server.did.slept = level

    able = [server for server in alive(servers) if server.holds is Holds.VERIFIED]
    try:  # on record first: else the weights of whoever is found dead here would count as loaded
        run.observer.intend({server.name: PushState.SLEEPING for server in able})
    except StateUnwritable as error:
        for server in able:
            server.failure = f"sleep: {error.message}"
        return
    await each(able, call, timeout_s=run.fleet.timeouts.update_s, call_name="sleep")


def _patient(run: Run, server: PushedServer) -> Server:
    """Its control routes, with the deadline of an update."""
    return engines.server(run.client, server.target, timeout_s=run.fleet.timeouts.update_s)

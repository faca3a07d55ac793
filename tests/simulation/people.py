"""Who does what to a fleet, and what breaks: trainers, a second terminal, servers, disk …"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from skyctl import kill_points
from skyctl.core.requests import Control, Pause, Resume, Sleep, Wake
from skyctl.http.transport import Request, TransportError
from skyctl.push.request import PushRequest
from tests.simulation import seams, trainer
from tests.simulation.engine import CHANGING, STRANGER
from tests.simulation.kernel import Process
from tests.simulation.network import Weather

if TYPE_CHECKING:
    from tests.simulation.world import World

FAULTS = (
    "kill-point",
    "kill-write",
    "kill-time",
    "kill-sender",
    "kill-guardian",
    "kill-server",
    "interrupt",
    "disk-full",
    "disk-failing",
    "network",
    "engine-fails",
    "engine-corrupts",
    "engine-sticks",
    "engine-builds-on",
    "digest-fails",
    "verbs",
    "second-pusher",
    "impatient",
    "recover-early",
    "overwrite",
    "same-label",
    "same-time",
    "moving-references",
    "fork",
    "stop",
    "stranger",
    "guard",
)
ATTACHED_FAULTS = ("edited-list", "other-fleet")
SUPERVISED_FAULTS = ("kill-supervisor", "kill-router", "restarts")
LIVE = "live"
"""A training job whose ranks push."""
GPU = "gpu"
"""Servers and trainers have GPUs: workers copy out of each other's memory, and of ranks'."""
SLEEPS = "sleeps"
"""Trainers share the memory of the servers, which sleep meanwhile; so may other programs."""

_UNDONE = ("push.pause.call", "push.pause.done", "push.init.done", "push.start.call")
"""Points at which a push that is interrupted is undone."""
_REQUESTS = (*CHANGING, "/update_weights", "/update_weight_version", "/resume")
_PUSH_POINTS = (*kill_points.PUSH, "recover.begin")
_SUPERVISOR_POINTS = (*kill_points.PUSH, *kill_points.SUPERVISOR)
LATEST = "latest"
"""The label of every step of a trainer that has no others, whatever its directory holds by then."""
VERBS = frozenset({"pause", "resume", "sleep", "wake", STRANGER})
_VERBS = (
    Pause(mode="keep", clear_cache=False),
    Pause(mode="abort"),
    Pause(mode="wait"),
    Resume(),
    Resume(),
    Resume(),
    Sleep(),
    Wake(),
    Wake(tags=("weights",)),
)
_SLEEPERS_VERBS = (
    Sleep(level=2),
    Sleep(level=2),
    Wake(tags=("weights",)),
    Wake(tags=("kv_cache",)),
)


def all_of(world: World) -> list[Coroutine[Any, Any, None]]:
    """Everybody that this schedule has."""
    faults = world.faults
    begun = (begin(world) for causes, begin in _ACTORS if causes & faults)
    if world.on_gpu and world.dice.random() < 0.7:  # a trainer that opens meets no other push
        return begun
    return [_train(world, "latest"), *begun]


def weaken(world: World) -> None:
    """How often engines fail in this schedule."""
    dice, faults, frailty = world.dice, world.faults, world.frailty
    if "engine-fails" in faults:
        frailty.update_fails = dice.choice((0.02, 0.1, 0.3))
    if "engine-corrupts" in faults:
        frailty.corrupts = dice.choice((0.02, 0.1))
    if "digest-fails" in faults:
        frailty.digest_fails = dice.choice((0.1, 0.5))
    if "engine-sticks" in faults:
        frailty.sticks = dice.choice((0.002, 0.02))


def doom(world: World, process: Process, *, push: bool = False) -> None:
    """Decide how this process dies, if it does."""
    dice, faults = world.dice, world.faults
    ways = [w for w in ("kill-point", "kill-write", "kill-time", "interrupt") if w in faults]
    if not ways or dice.random() < 0.25:
        return
    way = dice.choice(ways)
    if way == "kill-point" and push and not world.supervised and dice.random() < 0.5:
        process.doomed |= {"request": dice.choice(_REQUESTS), "passes": dice.randrange(3)}
    elif way == "kill-point":
        points = kill_points.COMMAND if world.supervised else _PUSH_POINTS
        process.doomed |= {"point": dice.choice(points), "passes": dice.choice((0, 0, 1))}
    elif way == "kill-write":
        process.doomed["writes"] = dice.randrange(60)
    elif way == "kill-time":
        world.loop.call_later(dice.random() * 2.5, world.kernel.kill, process)
    elif push and not world.supervised and dice.random() < 0.5:
        process.doomed["interrupt"] = dice.choice(kill_points.PUSH)
    elif push:
        world.loop.call_later(dice.random() * 2.5, process.interrupt)


async def _train(world: World, name: str) -> None:
    """A trainer: writes a version over the one before, and pushes it."""
    dice = world.dice
    steps = (3, 4, 5) if "same-label" in world.faults else (1, 2, 2, 3)
    for _ in range(dice.choice(steps)):
        await asyncio.sleep(dice.random() * 2.0)
        number = world.checkpoints.next_number()
        directory = name if dice.random() < 0.8 else f"step-{number}"
        if "moving-references" in world.faults:
            move = dice.choice((world.checkpoints.move_link, world.checkpoints.commit))
            path = move("moving", number)
        else:
            path = world.checkpoints.write(directory, number, same_time=_same_time(world))
        label = f"v{number}" if dice.random() < 0.6 else None
        if "same-label" in world.faults:
            label = LATEST
        elif world.faults & {"overwrite", "moving-references"}:
            label = None  # what is about to change cannot be said to be something
        if label is not None:
            world.labels.setdefault(label, set()).add(number)
        request = PushRequest(
            checkpoint=path,
            weight_version=label,
            pause_mode=dice.choice(("keep", "keep", "wait", "abort")),
        )
        if SLEEPS in world.faults and dice.random() < 0.7:
            request = await _make_room(world, request)
        process = world.push(request, number)
        doom(world, process, push=True)
        if "kill-sender" in world.faults and dice.random() < 0.5:
            world.loop.call_later(dice.random() * 2.0, _kill_labelled, world, "sender")
        if "overwrite" in world.faults and dice.random() < 0.4:
            world.loop.call_later(dice.random() * 1.5, _overwrite, world, directory)
        await process.gone(within_s=0.1)
        if process.code == 0 and dice.random() < 0.1:  # the same once more
            await world.push(request, number).gone(within_s=0.1)
        if process.error is None and process.code is None:  # killed: it is started again
            await _push_at_once(world, request, number)
            await asyncio.sleep(dice.random() * 3.0)


async def _make_room(world: World, request: PushRequest) -> PushRequest:
    """The trainer's step needs the servers' memory, and may need it again after the push."""
    dice = world.dice
    if dice.random() < 0.7:
        process = world.type(Sleep(level=dice.choice((1, 2))))
        if dice.random() < 0.3:
            doom(world, process)
        await process.gone(within_s=0.1)
        await asyncio.sleep(dice.random())
    return replace(request, colocated=True, sleep_after=dice.choice((0, 0, 1, 2)))


async def _train_live(world: World) -> None:
    """A training job whose ranks push out of their memory."""
    dice = world.dice
    for _ in range(dice.choice((2, 3, 4) if world.on_gpu else (1, 1, 2))):
        await asyncio.sleep(dice.random() * 2.0)
        ranks = dice.choice((1, 2, 2, 3))
        steps = [_live_step(world, ranks) for _ in range(dice.choice((1, 2, 3)))]
        processes = trainer.begin(world, ranks, steps, goes_on=dice.random() < 0.5)
        for process in processes:
            if "kill-point" in world.faults and dice.random() < 0.4:
                point = dice.choice(kill_points.RANK)
                process.doomed |= {"point": point, "passes": dice.choice((0, 0, 1))}
            elif dice.random() < 0.5:
                doom(world, process, push=True)
        for process in processes:
            await process.gone(within_s=0.1)


def _live_step(world: World, ranks: int) -> trainer.Step:
    dice, number = world.dice, world.checkpoints.next_number()
    world.checkpoints.values(number)
    # where servers read the file, and not skyctl, no label comes from its content
    label = LATEST if "same-label" in world.faults else f"v{number}"
    world.labels.setdefault(label, set()).add(number)
    odd = dice.randrange(1, ranks) if ranks > 1 and dice.random() < 0.05 else -1
    mode = dice.choice(("keep", "keep", "wait", "abort"))
    keep = world.on_gpu and dice.random() < 0.3
    return trainer.Step(dice.random() * 2.0, number, label, mode, odd, keep)


async def _push_at_once(world: World, request: PushRequest, number: int) -> None:
    """A script, or somebody impatient, starts again what was killed, and may think better of it."""
    dice, impatient = world.dice, "impatient" in world.faults
    if impatient or dice.random() < 0.4:
        process = world.push(request, number)
        if impatient and not world.supervised and dice.random() < 0.6:
            process.doomed["interrupt"] = dice.choice(_UNDONE)
        else:
            doom(world, process, push=True)
        await process.gone(within_s=0.1)


def _same_time(world: World) -> bool:
    """Whether a program writes that sets the times of files to what they were."""
    return "same-time" in world.faults and world.dice.random() < 0.5


def _overwrite(world: World, directory: str) -> None:
    """A careless trainer writes on while its push reads."""
    number = world.checkpoints.next_number()
    world.labels.setdefault(LATEST, set()).add(number)
    world.tell(f"{directory} is overwritten with {number}")
    world.checkpoints.write(directory, number, same_time=_same_time(world))


def _kill_labelled(world: World, label: str) -> None:
    for process in list(world.kernel.processes.values()):
        if process.label == label and not process.dead:
            world.kernel.kill(process)


async def _type(world: World) -> None:
    """A second terminal."""
    dice = world.dice
    choices: list[str | Control] = [*_VERBS, "status", "recover"]
    if "restarts" in world.faults:
        choices += ["restart", "restart", "up"]
    if SLEEPS in world.faults:
        choices += _SLEEPERS_VERBS
    for _ in range(dice.randint(1, 5)):
        await asyncio.sleep(dice.random() * 3.0)
        process = world.type(dice.choice(choices))
        if dice.random() < 0.2:
            doom(world, process)


async def _type_elsewhere(world: World) -> None:
    """A terminal in another directory, whose fleet file lists the same servers."""
    dice = world.dice
    for _ in range(dice.randint(1, 4)):
        await asyncio.sleep(dice.random() * 2.5)
        if dice.random() < 0.3:
            number = world.checkpoints.next_number()
            path = world.checkpoints.write("elsewhere", number)
            process = world.push(PushRequest(checkpoint=path), number, world.other)
        else:
            process = world.type(dice.choice((*_VERBS, "status", "recover")), world.other)
        if dice.random() < 0.3:
            doom(world, process)


async def _edit(world: World) -> None:
    """Somebody adds, drops and moves lines of the fleet file."""
    dice = world.dice
    for _ in range(dice.choice((1, 2, 3))):
        await asyncio.sleep(dice.random() * 3.0)
        world.edit_list(dice.sample(world.engines, dice.randint(1, len(world.engines))))


async def _fork(world: World) -> None:
    """The process that pushes starts a data loader, or another child that outlives it."""
    await asyncio.sleep(world.dice.random() * 2.0)
    if process := _living(world, "push"):
        world.kernel.fork(process, seams.dropped_by_children())


async def _stop(world: World) -> None:
    """Ctrl-Z, or a debugger; `fg` later, or never."""
    dice = world.dice
    for _ in range(dice.choice((1, 2))):
        await asyncio.sleep(dice.random() * 2.5)
        label = "supervisor" if world.supervised and dice.random() < 0.3 else ""
        if process := _living(world, label or dice.choice(("push", "recover", ""))):
            world.kernel.stop(process)
            if dice.random() < 0.6:
                await asyncio.sleep(dice.random() * dice.choice((2.0, 20.0)))
                world.kernel.resume(process)


def _living(world: World, label: str) -> Process | None:
    """A command that runs, or another process with this label."""
    labels = {process.label for process in world.commands}
    found = [
        process
        for process in world.kernel.processes.values()
        if not process.dead
        and (process.label.startswith(label) if label else process.label in labels)
    ]
    return world.dice.choice(found) if found else None


async def _meddle(world: World) -> None:
    """Somebody with `curl`, or another program that knows nothing of skyctl."""
    dice = world.dice
    for _ in range(dice.choice((1, 1, 2))):
        await asyncio.sleep(dice.random() * 2.5)
        meddles = _put_to_sleep if SLEEPS in world.faults and dice.random() < 0.5 else _curl
        process = world.kernel.spawn(STRANGER, partial(meddles, world))
        await process.gone(within_s=0.1)


async def _curl(world: World) -> None:
    """Thaw a server, perhaps once it answers nobody, and perhaps freeze it again."""
    engine, again = world.dice.choice(world.engines), world.dice.random() < 0.5
    looks = 60 if world.dice.random() < 0.5 else 0
    while looks and not engine.paused:
        looks -= 1
        await asyncio.sleep(0.05)
    await asyncio.sleep(world.dice.random() * 0.3)
    with suppress(TransportError):
        await world.network.call(Request("POST", engine.url, "/resume", {}, None), 5.0)
        if again:
            await asyncio.sleep(world.dice.random() * 0.3)
            await world.network.call(Request("POST", engine.url, "/pause?mode=keep", {}, None), 5.0)


async def _put_to_sleep(world: World) -> None:
    """Take a server's memory, or give it back, or both, in parts or as a whole."""
    dice = world.dice
    engine, parts = dice.choice(world.engines), dice.sample(("weights", "kv_cache"), 2)
    paths = [f"/sleep?level={dice.choice((1, 2))}"] if dice.random() < 0.7 else []
    paths += [f"/wake_up?tags={part}" for part in parts] if dice.random() < 0.5 else ["/wake_up"]
    with suppress(TransportError):
        for path in paths[: dice.choice((1, 2, 3))]:
            await world.network.call(Request("POST", engine.url, path, {}, None), 5.0)
            await asyncio.sleep(dice.random() * 2.0)


async def _break_servers(world: World) -> None:
    dice = world.dice
    for _ in range(dice.choice((1, 1, 2))):
        await asyncio.sleep(dice.random() * 6.0)
        engine = dice.choice(world.engines)
        if engine.process is None or engine.process.dead:
            continue
        world.kernel.kill(engine.process)
        if not world.supervised:
            await asyncio.sleep(dice.uniform(2.0, 10.0))  # none loads a model in less
            engine.start(world.kernel.spawn(f"server {engine.name}", None))


async def _break_supervisor(world: World) -> None:
    dice = world.dice
    for _ in range(dice.choice((1, 1, 2))):
        await asyncio.sleep(dice.random() * 3.0)
        for process in world.kernel.processes.values():
            if process.label == "supervisor" and not process.dead:
                if dice.random() < 0.5:
                    world.kernel.kill(process)
                elif dice.random() < 0.5:
                    process.doomed["writes"] = dice.randrange(80)
                elif dice.random() < 0.4:
                    process.doomed |= {
                        "request": dice.choice(_REQUESTS),
                        "passes": dice.randrange(3),
                    }
                else:
                    point = dice.choice(_SUPERVISOR_POINTS)
                    process.doomed |= {"point": point, "passes": dice.choice((0, 0, 1))}
                break


async def _break_router(world: World) -> None:
    await asyncio.sleep(world.dice.random() * 6.0)
    _kill_labelled(world, "router")


async def _break_disk(world: World) -> None:
    dice, disk = world.dice, world.disk
    for _ in range(dice.choice((1, 2))):
        await asyncio.sleep(dice.random() * 4.0)
        if "disk-full" in world.faults:
            disk.full = True
        if "disk-failing" in world.faults:
            disk.failing = dice.choice((0.05, 0.3))
        world.tell("the disk is not well")
        await asyncio.sleep(dice.random() * dice.choice((0.3, 2.0, 8.0)))
        heal_disk(world)


def heal_disk(world: World) -> None:
    world.tell("the disk is well")
    world.disk.full, world.disk.failing = False, 0.0


async def _break_network(world: World) -> None:
    dice = world.dice
    for _ in range(dice.choice((1, 2, 3))):
        await asyncio.sleep(dice.random() * 3.0)
        weather = world.network.weather
        for name in ("refused", "reset_before", "lost_answer", "reset_after"):
            if dice.random() < 0.5:
                setattr(weather, name, dice.choice((0.02, 0.1)))
        weather.slow = dice.choice((0.02, 0.2))
        await asyncio.sleep(dice.random() * 4.0)
        world.network.weather = Weather()


_ACTORS: tuple[tuple[set[str], Callable[[World], Coroutine[Any, Any, None]]], ...] = (
    ({"second-pusher"}, lambda world: _train(world, "other")),
    ({LIVE}, _train_live),
    ({"verbs", "recover-early"}, _type),
    ({"stranger"}, _meddle),
    ({"other-fleet"}, _type_elsewhere),
    ({"edited-list"}, _edit),
    ({"fork"}, _fork),
    ({"stop"}, _stop),
    ({"kill-server"}, _break_servers),
    ({"disk-full", "disk-failing"}, _break_disk),
    ({"network"}, _break_network),
    ({"kill-supervisor"}, _break_supervisor),
    ({"kill-router"}, _break_router),
)
"""Who comes with which faults. The order is that in which the dice are thrown."""

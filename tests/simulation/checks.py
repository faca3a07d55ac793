"""What must hold: after every change of a server, when a push says it succeeded, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.store.state import FleetState
from tests.simulation.engine import Engine
from tests.simulation.kernel import Process

if TYPE_CHECKING:
    from tests.simulation.world import World


def serves(world: World, engine: Engine) -> str:
    """What is wrong with the answers that a server would give now, or ""."""
    if not engine.serving:
        return ""
    if engine.open:
        return "half loaded: it serves amid an update"
    content = engine.content
    if content is None:
        return "half loaded: it serves empty layers"
    number = world.checkpoints.of_content.get(content)
    if number is None:
        return "half loaded: it serves weights of no version"
    if not labelled(world, engine.label, number):
        return "label: it serves weights that its label does not mean"
    return ""


def labelled(world: World, label: str, number: int) -> bool:
    """Whether this label means this version."""
    if label in world.labels:
        return number in world.labels[label]
    return label.partition("@")[2] == world.checkpoints.digests[number][:8]


def push_succeeded(world: World, job: Job, number: int) -> None:
    """As it says so, every server it names holds what its version means."""
    assert job.result is not None
    version = job.result["version"]
    if number not in world.labels.get(version, {number}):
        return
    for row in job.result["servers"]:
        engine = next(one for one in world.engines if one.name == row["server"])
        content = engine.content
        found = None if content is None else world.checkpoints.of_content.get(content)
        if (
            engine.serving
            and engine.label == version
            and (found is None or not labelled(world, version, found))
        ):
            world.violate("success: a push succeeded, and a server holds something else")


def at_the_end(world: World, last: Process) -> None:
    """Servers are committed or quarantined, nothing is held, records and reality agree."""
    process = world.kernel.spawn("checker", None)
    process.context.run(_at_the_end, world, last)
    world.kernel.kill(process, "is done")


def _at_the_end(world: World, last: Process) -> None:
    if last.error is not None:
        world.violate(f"recover fails: {type(last.error).__name__}: {str(last.error)[:90]}")
    with FleetState(world.ref.paths.database) as state:
        running = [job.id for job in state.journal.jobs() if not job.ended]
        if running and not world.is_down():  # the next `up` or `down` closes it
            world.violate("records: a job still runs in the journal")
        for lock in ("turn", "up"):
            if state.locks.taken(lock):
                world.violate(f"records: the {lock} lock is held")
        doubts, weights = in_doubt(state), state.weights()
        held: set[int | None] = set()
        for engine in world.engines:
            row = state.server(engine.name)
            content = engine.content
            found = None if content is None else world.checkpoints.of_content.get(content)
            world.tell(
                f"{engine.name}: serving {engine.serving} paused {engine.paused} "
                f"asleep {sorted(engine.asleep)} label {engine.label} holds {found}; {row}"
            )
            if row.quarantine:
                # of a server that is not ours, it may serve what it was restarted with
                continue
            down = world.is_down()
            if engine.name in doubts and not down:  # a new process is in no doubt
                world.violate("records: in doubt and not quarantined")
            if not engine.serving and row.intended == "running" and not (world.verbs_open or down):
                world.violate("frozen: it does not serve, and nobody says why")
            if engine.serving and row.weight_version not in (None, engine.label):
                world.violate("records: a server's version is not what it serves")
            if engine.serving and engine.label != (weights.version or "default"):
                world.violate("versions: it serves another version than the fleet's")
            if engine.serving:
                held.add(found)
    if len(held) > 1:
        world.violate("versions: servers hold different weights under one label")
    world.check_routing()

"""What must hold: after every change of a server, when a push says it succeeded, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from skyctl.states import is_empty
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.store.state import FleetState
from tests.simulation.engine import STRANGER, Engine
from tests.simulation.kernel import Process
from tests.simulation.seams import EPOCH

if TYPE_CHECKING:
    from tests.simulation.world import World

_ELSEWHERE = "type: skyctl recover --fleet"
"""What recovery says of a server that another fleet has to repair first."""


def thawed_by_stranger(engine: Engine) -> bool:
    """Whether a program that knows nothing of skyctl let it serve, past no guard."""
    stranger = engine.thawed_by is not None and engine.thawed_by.label == STRANGER
    return stranger and not engine.protected


def started_again_unseen(engine: Engine) -> bool:
    """Whether the server was started again while its pusher was stopped, after that had looked for
    the last time before it began: nothing tells the server that the update is not its own."""
    pusher = engine.loading_by
    return pusher is not None and pusher.stopped_at <= engine.ready_at <= pusher.continued_at


def unseen_sleep(world: World, engine: Engine) -> bool:
    """Whether nobody can know what of it sleeps, or holds nothing since it slept: another program
    has changed that, or the record of what ours did may be lost."""
    return engine.meddled_with or bool(world.faults & {"disk-full", "disk-failing"})


def serves(world: World, engine: Engine) -> str:
    """What is wrong with the answers that a server would give now, or ""."""
    if not engine.serving:
        return ""
    if engine.open:
        return "half loaded: it serves amid an update"
    if engine.content is None:
        return "half loaded: it serves empty layers"
    number = world.checkpoints.number(engine.content)
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


def push_succeeded(
    world: World, job: Job, number: int, urls: Mapping[str, str], *, on_record: bool
) -> None:
    """As it says so, every server it names holds what its version means, and all hold the same: to
    the last bit, and as after the push before it of the same files."""
    assert job.result is not None
    assert job.finished_at is not None
    version, ended = job.result["version"], job.finished_at - EPOCH
    if number not in world.labels.get(version, {number}):
        return
    contents = set()
    for row in job.result["servers"]:
        engine = world.engine_at(urls[row["server"]])
        assert engine is not None
        # the command may notice the end of its push much later, amid the next
        later = engine.begun_at > ended
        if engine.unseen:
            world.excused += 1
        elif engine.answered and not later:
            world.violate("success: a push succeeded, and a server answered amid it")
        loading = later and engine.loading_by is not None
        if not engine.serving or engine.label != version or loading:
            continue
        found = world.checkpoints.number(engine.content)
        if found is None and engine.meddled_with:
            world.excused += 1  # another program has discarded it since
        elif found is None or not labelled(world, version, found):
            world.violate("success: a push succeeded, and a server holds something else")
        elif found == number:
            contents.add(engine.content)
    if len(contents) > 1:
        world.violate("success: a push succeeded, and its servers hold different weights")
    elif contents and on_record:
        world.accepted.setdefault(number, next(iter(contents)))


def labelled_anew(world: World, engine: Engine) -> None:
    """What gets the label of files is what these came to in the push before it, to the last bit."""
    number = world.checkpoints.number(engine.content)
    if number is not None and world.accepted.get(number, engine.content) != engine.content:
        world.violate("label: a server gets it, and its files came to other weights before")


def push_ended(world: World, job: Job, pusher: Process | None) -> None:
    """What was thawed while the push loaded it is frozen again, unless that was after it had looked
    for the last time: it looks again once it writes to no server any more. What a push leaves whose
    process has died amid it is left to recovery."""
    assert job.finished_at is not None
    ended = job.finished_at - EPOCH  # its command may notice much later
    if pusher is not None and pusher.died_at <= ended:
        return
    for engine in world.engines:
        looked = engine.looked_at >= world.last_write_of(pusher, ended)
        late = engine.thawed_at > ended or looked or not world.network_well
        if engine.answered and engine.loading_by is pusher and engine.serving and not late:
            world.violate(
                "thawed: a push has ended, and leaves a server so that was thawed amid it"
            )


def at_the_end(world: World, last: Process, findings: dict[str, str]) -> None:
    """Servers are committed or quarantined, nothing is held, records and reality agree."""
    if last.error is not None:
        world.violate(f"recover fails: {type(last.error).__name__}: {str(last.error)[:90]}")
    _look(world, lambda state: _at_the_end(world, state, findings))


def after_all(world: World) -> None:
    """When an operator has typed all that helps, every server serves, unless it is quarantined with
    a reason that no command takes away."""
    _look(world, lambda state: _after_all(world, state))


def _look(world: World, use: Callable[[FleetState], None]) -> None:
    def look() -> None:
        with FleetState(world.ref.paths.database) as state:
            use(state)

    process = world.kernel.spawn("checker", None)
    process.context.run(look)
    world.kernel.kill(process, "is done")


def _at_the_end(world: World, state: FleetState, findings: dict[str, str]) -> None:
    running = [job.id for job in state.journal.jobs() if not job.ended]
    down = world.is_down()
    if running and not down:  # the next `up` or `down` closes it
        world.violate("records: a job still runs in the journal")
    for lock in ("turn", "up"):
        if state.locks.taken(lock):
            world.violate(f"records: the {lock} lock is held")
    world.note_names(state)
    doubts, weights = in_doubt(state), state.weights()
    if weights.version is not None:  # else nothing says which of both fleets is right
        world.others.clear()
    versions: set[int | None] = set()
    for engine in world.engines:
        row = state.server(world.name_of(engine))
        number = world.checkpoints.number(engine.content)
        world.tell(
            f"{engine.name}: serving {engine.serving} paused {engine.paused} "
            f"asleep {sorted(engine.asleep)} label {engine.label} holds {number}; {row}"
        )
        elsewhere = _ELSEWHERE in findings.get(row.name, "")  # recovery leaves it alone until then
        if found := serves(world, engine):
            known = is_empty(row.sleep_level, engine.label, row.weight_version)
            if engine.meddled_with and (world.supervised or not known):
                world.excused += 1  # nothing shows that its weights are discarded
                continue
            if not thawed_by_stranger(engine):
                world.violate(found)
            elif elsewhere or engine.url in world.recovery_found_stuck:
                world.excused += 1  # nobody can pause an engine that does not answer
            elif engine.thawed_at < world.recovery_looked_at[engine.url]:
                world.violate(f"{found}: another program thawed it, and recovery has seen that")
        if not engine.serving and down:
            world.excused += 1
        elif not engine.serving:
            _frozen(world, engine, row, findings)
        if row.quarantine:
            if "overwritten" in row.quarantine and world.checkpoints.has(weights.version or ""):
                world.violate("quarantined: files are said to be overwritten, and are not")
            # of a server that is not ours, it may serve what it was restarted with
            continue
        if row.name in doubts and not down and not elsewhere:  # a new process is in no doubt
            world.violate("records: in doubt and not quarantined")
        if elsewhere or not engine.serving:
            continue
        if row.weight_version not in (None, engine.label):
            world.violate("records: a server's version is not what it serves")
        if engine.label != (weights.version or "default") and engine.url not in world.others:
            world.violate("versions: it serves another version than the fleet's")
        if engine.url not in world.others:
            versions.add(number)
    if len(versions) > 1:
        world.violate("versions: servers hold different weights under one label")
    world.check_routing()


def _frozen(world: World, engine: Engine, row: Any, findings: dict[str, str]) -> None:
    """Somebody wants it so, or it is quarantined, or recovery says who has to thaw it; what a push
    froze, it has thawed."""
    if row.quarantine or row.intended != "running":
        return
    detail = findings.get(row.name, "")
    if _ELSEWHERE in detail:
        return
    by_push = engine.frozen_for_push and not engine.asleep  # asleep, as it was to be afterwards
    if by_push and "stranger" not in world.faults:  # it leaves what was paused so
        world.violate("frozen: a push has left it so, and nobody says why")
    elif "type: skyctl" not in detail:
        world.violate("frozen: it does not serve, and nobody says what to type")


def _after_all(world: World, state: FleetState) -> None:
    if world.is_down():
        return
    doubts = in_doubt(state)
    for engine in world.engines:
        row = state.server(world.name_of(engine))
        if row.quarantine:
            world.violate("quarantined: it stays so after a push of whole files")
        elif row.name in doubts:
            world.violate("records: it stays in doubt after all that can be typed")
        elif not engine.serving:
            world.violate("frozen: it does not serve after all that can be typed")

"""A hundred schedules of each kind of fleet; `python -m benchmarks.simulation` plays many."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.checkpoints import staging
from skyctl.http.transport import Request
from skyctl.launch.base import ChildProcess
from tests.simulation import reinserted, seams
from tests.simulation.network import PUSHING
from tests.simulation.supervised import SimManaged
from tests.simulation.world import KINDS, Schedule, World, play, traits

FIRST, SCHEDULES = 5_000, 100
FOUND_BY = {
    "01 a recovery and a new push exclude each other one way only": 160_000_031,
    "02 a verb is carried out during a push": 158,
    "16 the end of a push cannot be recorded": 46,
    "19 a failed write ends a healthy server": 17,
    "20 an update begins in a server that runs": 291,
    "21 a server that was thawed while it was loaded is left so": 160_000_066,
    "22 a second attempt builds on what the first left": 145,
    "27 a server that sleeps is resumed": 106,
    "28 a forked child keeps its parent's locks": 381,
    "29 a record belongs to a place in the list": 25,
    "37 what servers copied out of a trainer's memory is compared with nothing": 70,
    "38 discarded weights are woken": 328,
    "39 a push takes servers that sleep for awake": 300,
}


def test_a_simulated_process_is_a_child_process() -> None:
    wanted = {name for name in vars(ChildProcess) if not name.startswith("_")}
    assert "connection_lost" in wanted
    assert wanted <= set(dir(SimManaged))


@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_violates_anything(kind: str, tmp_path: Path) -> None:
    with seams.installed():
        schedules = [Schedule(seed, kind) for seed in range(FIRST, FIRST + SCHEDULES)]
        ended = [play(schedule, tmp_path) for schedule in schedules]
    assert {one.seed: one.violations for one in ended if one.violations} == {}
    assert sum(one.succeeded for one in ended) > SCHEDULES / 4  # else nothing was tried
    frozen = [one.excused == 0 for one in ended if one.frozen]
    assert sum(frozen) >= 0.9 * len(frozen)


def test_a_probe_of_a_supervisor_that_pushes_is_no_look_of_its_push(tmp_path: Path) -> None:
    with seams.installed():
        world = World(Schedule(0, only=frozenset()), tmp_path)
        [engine, *_], pusher = world.engines, world.kernel.spawn("supervisor", None)
        engine.start(world.kernel.spawn("server", None))
        engine.loading_by = pusher
        looks = []
        for pushing in (False, True):
            for path in ("/metrics", "/is_paused"):
                world.loop.run_until(world.loop.now + 1.0)
                began = world.loop.now
                pusher.context.run(PUSHING.set, pushing)
                call = world.network.call(Request("GET", engine.url, path, {}, None), 9.0)
                world.loop.create_task(call, context=pusher.context.copy())
                world.loop.run_until(began + 5.0)
                looks.append(engine.looked_at > began)
    assert looks == [False, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_without_faults_every_push_succeeds(kind: str, tmp_path: Path) -> None:
    with seams.installed():
        ended = [play(Schedule(seed, kind, only=frozenset()), tmp_path) for seed in range(20)]
    assert [one.violations for one in ended] == [[]] * 20
    assert [one.succeeded for one in ended] == [one.pushes for one in ended]


@pytest.mark.parametrize("kind", KINDS)
def test_servers_copy_out_of_the_memory_of_a_trainer_without_faults(
    kind: str, tmp_path: Path
) -> None:
    seeds = [seed for seed in range(50) if "gpu" in traits(seed)]
    schedules = [Schedule(seed, kind, only=traits(seed)) for seed in seeds]
    with seams.installed():
        ended = [play(schedule, tmp_path, tracing=True) for schedule in schedules]
    assert [one.violations for one in ended] == [[]] * len(seeds)
    assert [one.succeeded for one in ended] == [one.pushes for one in ended]
    assert sum(one.live for one in ended) > len(seeds)
    copied = [any("copies of" in line for line in one.trace) for one in ended]
    assert sum(copied) > len(seeds) / 2  # in others their ranks disagree at once


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_goes_the_same_way_each_time(kind: str, tmp_path: Path) -> None:
    with seams.installed():
        first = [play(Schedule(seed, kind), tmp_path).digest for seed in range(10)]
        again = [play(Schedule(seed, kind), tmp_path).digest for seed in range(10)]
    assert again == first


def test_a_schedule_sweeps_no_memory_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []
    list_directory = staging._list
    monkeypatch.setattr(
        staging, "_list", lambda directory: listed.append(directory) or list_directory(directory)
    )
    with seams.installed():
        play(Schedule(0, "supervised"), tmp_path)
    assert listed and all(tmp_path in directory.parents for directory in listed), listed


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_defect_that_is_put_back_is_found(name: str, tmp_path: Path) -> None:
    """Soon after a seed that found it: what changes the dice may move it."""
    defect, first = reinserted.DEFECTS[name], FOUND_BY[name]
    with seams.installed():
        for seed in range(first, first + 1000):
            with seams.replaced(defect.patches):
                found = play(defect.schedule(seed), tmp_path).violations
            if found and not play(defect.schedule(seed), tmp_path).violations:
                return
    pytest.fail(f"{name}: not found")

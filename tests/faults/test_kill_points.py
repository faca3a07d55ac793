"""SIGKILL at named points: a sample of what `python -m benchmarks.kill_points` does in full."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.kill_points import KINDS
from skyctl import kill_points
from tests.faults.killing.attached import attached_fleet
from tests.faults.killing.cycle import Came, Dice
from tests.faults.killing.lives import Lives, lives
from tests.faults.killing.supervised import SupervisedFleet, supervised_fleet

GUARDED = ("push.pause.done", "push.update.sent", "push.published")


def told(cames: list[Came]) -> list[str]:
    return [f"{came.point}/{came.seed}: {wrong}" for came in cames for wrong in came.violations]


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_push_from_a_command_may_die_anywhere(tmp_path: Path, overwrites: bool) -> None:
    """Also when all checkpoints come from one directory, which is written over at once."""
    # seed 0 recovers by the guardian, which costs a cold start: for a few points only
    points = KINDS["attached"][::3] if overwrites else KINDS["attached"]
    dice = [Dice.thrown(point, 0 if point in GUARDED else 7) for point in points]

    async def cycles() -> list[Came]:
        async with attached_fleet(tmp_path, overwrites=overwrites) as fleet:
            return [await fleet.cycle(replace(one, again=True)) for one in dice]

    cames = asyncio.run(cycles())
    assert told(cames) == []
    # a late kill may miss its process, the more so on a busy machine
    assert sum(came.killed for came in cames) > len(cames) / 2
    guarded = [came for came in cames if came.guardian and came.killed]
    assert guarded and all(came.detected_s is not None for came in guarded)


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedFleet]:
    with supervised_fleet(tmp_path_factory.mktemp("supervised")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def overwriting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedFleet]:
    with supervised_fleet(tmp_path_factory.mktemp("overwriting"), overwrites=True) as fleet:
        yield fleet


@pytest.mark.parametrize("point", ["push.update.sent", "push.trial.done", "push.part.done"])
def test_what_cannot_have_its_files_any_more_waits_for_the_next_push(
    overwriting: SupervisedFleet, point: str
) -> None:
    came = overwriting.cycle(replace(Dice.thrown(point, 7), again=True))
    assert came.violations == []
    assert came.killed


@pytest.mark.parametrize(
    "point",
    ["push.begun", "push.pause.call", "push.update.call", "push.record", "adopt.done",
     "recover.begin", "sender.filled", "push.drain.done", "push.trial.done",
     "push.woken", "push.awake", "sync.asked", "sync.begun"],
)  # fmt: skip
def test_a_supervisor_may_die_anywhere_and_the_next_command_revives_it(
    supervised: SupervisedFleet, point: str
) -> None:
    came = supervised.cycle(Dice.thrown(point, 7))
    assert came.violations == []
    assert came.killed


def test_the_guardian_revives_a_supervisor_that_died_in_a_push(supervised: SupervisedFleet) -> None:
    came = supervised.cycle(Dice.thrown("push.update.sent", 0))
    assert came.guardian and came.killed
    assert came.violations == []
    assert came.detected_s is not None


@pytest.fixture(scope="module")
def short_lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    with lives(tmp_path_factory.mktemp("lives")) as fleet:
        yield fleet


@pytest.mark.parametrize("seed", [0, 1, 2])  # what is typed next: up, recover, down
@pytest.mark.parametrize("point", ["server.spawned", "router.intended", "down.begin"])
def test_a_fleet_whose_start_or_end_was_cut_short_leaves_nothing(
    short_lives: Lives, point: str, seed: int
) -> None:
    came = short_lives.cycle(Dice.thrown(point, seed))
    assert came.violations == []
    assert came.killed


def started_in(home: Path) -> list[psutil.Process]:
    """What runs with this state directory."""
    processes = psutil.process_iter(["environ"])
    return [p for p in processes if (p.info["environ"] or {}).get("SKYCTL_HOME") == str(home)]


def test_a_sweep_that_is_terminated_takes_its_fleets_down(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out.json"
    options = ["--only", "supervised", "--log", str(log), "--out", str(out)]
    sweep = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kill_points", *options],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 60.0
        while not log.with_name("supervised-log").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        [home] = tmp_path.glob("kill-points-*/home")
        assert started_in(home)
    finally:
        sweep.terminate()
        code = sweep.wait(60)
    assert code == 0 and json.loads(out.read_text())["cycles"] >= 1
    deadline = time.monotonic() + 5.0
    while started_in(home) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert started_in(home) == []


def test_the_sweep_needs_nothing_but_what_skyctl_itself_needs() -> None:
    code = (
        "import importlib, sys; sys.modules |= dict.fromkeys(('pytest', 'torch', 'vllm'));"
        "[importlib.import_module('tests.faults.killing.' + name)"
        " for name in ('attached', 'supervised', 'lives')];"
        "import benchmarks.kill_points, tests.stub.server"
    )
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, check=False, cwd=Path(__file__).parents[2]).returncode == 0


def test_an_unset_variable_kills_nobody_and_an_unknown_point_is_refused() -> None:
    run = [sys.executable, "-c", "import skyctl.kill_points as k; k.reached('push.begun')"]
    env = {**os.environ, "SKYCTL_KILL_AT": ""}
    assert subprocess.run(run, env=env, check=False).returncode == 0
    killed = {**env, "SKYCTL_KILL_AT": "push.begun"}
    assert subprocess.run(run, env=killed, check=False).returncode == -9
    with pytest.raises(ValueError, match=r"no point 'push\.nowhere'"):
        kill_points._parsed("push.nowhere:2")


def test_every_named_point_is_in_the_code_once_or_more() -> None:
    package = Path(kill_points.__file__).parent
    code = "\n".join(p.read_text() for p in package.rglob("*.py") if p.name != "kill_points.py")
    named = set(re.findall(r'"([a-z.]+)"', code))  # a few are told to `reached` by a table
    # servers and the router share theirs
    shared = re.findall(r'reached\(f"\{self\.role\}\.([a-z]+)"\)', code)
    named |= {f"{role}.{moment}" for role in ("server", "router") for moment in shared}
    assert [point for point in kill_points.POINTS if point not in named] == []

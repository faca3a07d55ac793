"""The processes that play schedules are bounded, and a schedule that ends one is reported."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import simulation_workers
from benchmarks.simulation_workers import Order, play_all
from tests.simulation import loop, seams
from tests.simulation.world import Ended, Schedule, World, play

DIES, LOOPS, BLOCKS_SIGNALS, RAISES, WAITS = range(1, 6)


def play_badly(seed: int, home: Path) -> Ended:
    if seed == DIES:
        os._exit(3)
    if seed == BLOCKS_SIGNALS:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    while seed in (LOOPS, BLOCKS_SIGNALS):
        pass
    if seed == WAITS:  # as one whose processor is another program's
        select.select([], [], [], 0.3)
    if seed == RAISES:
        raise LookupError(seed)
    return Ended(seed, [], 0, 0, ())


def test_a_schedule_that_does_not_end_is_a_violation_and_the_others_are_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulation_workers, "GRACE_S", 5.0)
    orders = [Order("first", play_badly, range(7), 0.1), Order("second", play_badly, [9], 0.1)]
    ended = {ended.seed: (label, ended.violations) for label, ended in play_all(iter(orders), 1)}
    assert ended == {
        0: ("first", []),
        DIES: ("first", ["dies: the process that played it ended"]),
        LOOPS: ("first", ["hangs: it takes longer than 0.1 s (test_workers.py, play_badly)"]),
        BLOCKS_SIGNALS: ("first", ["hangs: 5.1 s, without a signal"]),
        RAISES: ("first", ["runner: LookupError(4)"]),
        WAITS: ("first", []),
        6: ("first", []),
        9: ("second", []),
    }


@pytest.mark.parametrize("options", [["--reinserted"], ["--schedules", "9999"]])
def test_a_run_that_is_ended_leaves_no_directory(tmp_path: Path, options: list[str]) -> None:
    code = (
        "import pathlib, sys; from benchmarks import simulation, simulation_workers as workers; "
        "workers.MEMORY = pathlib.Path(sys.argv.pop(1)); raise SystemExit(simulation.main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), *options, "--processes", "1"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while not any(tmp_path.rglob("*/*")):  # it plays
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        process.wait(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_no_order_is_given_out_after_its_time() -> None:
    orders = iter([Order("first", play_badly, [0])])
    assert list(play_all(orders, 1, until=time.monotonic() - 1)) == []


def test_a_schedule_that_goes_on_for_ever_in_virtual_time_is_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train(world: World, name: str) -> None:
        asyncio.get_running_loop().call_soon(again)

    def again() -> None:
        asyncio.get_running_loop().call_soon(again)

    monkeypatch.setattr(loop, "STEPS", 20_000)
    with seams.installed(), seams.replaced({"tests.simulation.people._train": train}):
        ended = play(Schedule(1), tmp_path)
    assert ended.violations == ["hangs: it has not ended after 20000 steps"]

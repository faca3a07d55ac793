"""Whoever dies in the middle of a push, the fleet ends healthy at one version."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.gpu.conftest import need_gpus
from tests.gpu.devices import free_mib
from tests.gpu.faulty import FaultyFleet

SENDER_POINTS = {
    "ipc": ("sender.open", "sender.opened", "sender.filled", "sender.filled:9", "sender.release:5"),
    "nccl": ("sender.opened", "sender.filled", "sender.join", "sender.filled:9", "sender.release"),
}
NUMBERS = range(5)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_sender_that_is_killed(faulty_fleet: FaultyFleet, number: int) -> None:
    faulty_fleet.end_idle_sender()
    free = free_mib()
    point = SENDER_POINTS[faulty_fleet.transport][number]
    faulty_fleet.ticket.write_text(point)
    began = time.monotonic()
    layout = "auto" if number > 2 else "checkpoint"
    done = faulty_fleet.push("b" if number % 2 else "a", expect=None, layout=layout)
    assert not faulty_fleet.ticket.exists(), f"nobody came to {point}: {done.stderr}"
    version = faulty_fleet.assert_healthy(free)
    print(f"{point}: exit {done.returncode}, at {version} in {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_fails_in_the_update(faulty_fleet: FaultyFleet, number: int) -> None:
    faulty_fleet.end_idle_sender()
    free = free_mib()
    processes = faulty_fleet.server_processes()
    current = faulty_fleet.server()["weight_version"]
    began = time.monotonic()
    pushing, stopped = faulty_fleet.push_until_update("a" if current == "b" else "b")
    for process in processes:
        os.kill(process.pid, number)
    for sender in stopped:
        with suppress(psutil.NoSuchProcess):  # the push was quicker to end it
            sender.resume()
    try:
        _, errors = pushing.communicate(timeout=200)
        version = faulty_fleet.assert_healthy(free)
        print(f"exit {pushing.returncode}, at {version} in {time.monotonic() - began:.1f} s")
        if pushing.returncode == 0:
            assert version != current, errors
    finally:
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


def test_a_server_that_died_since_the_last_push(faulty_fleet: FaultyFleet) -> None:
    die_between_pushes(faulty_fleet)


def test_one_of_two_servers_that_died_since_the_last_push(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """The other one is still in the group of before."""
    need_gpus(3)
    fleet = FaultyFleet(tmp_path, "nccl", checkpoints, replicas=2)
    try:
        fleet.up()
        die_between_pushes(fleet)
    finally:
        fleet.run("down", expect=None, timeout_s=120)


def die_between_pushes(fleet: FaultyFleet) -> None:
    """The sender of the last push lives on; the server's restart makes its group useless."""
    fleet.end_idle_sender()
    free = free_mib()
    fleet.push("b")
    fleet.push("a")  # with the group that the first one formed
    processes = fleet.server_processes()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it ended with its parent
            process.kill()
    fleet.wait_for_another_than(processes[0].pid)
    fleet.push("b")
    fleet.push("a")
    assert fleet.assert_healthy(free) == "a"

"""Whoever dies in the middle of a push, the fleet ends healthy at one version."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil
import pytest

from tests.gpu.devices import free_mib
from tests.gpu.faulty import FaultyFleet

SENDER_POINTS = {
    "ipc": ("sender.open", "sender.opened", "sender.filled", "sender.filled:9", "sender.release:5"),
    "nccl": ("sender.opened", "sender.filled", "sender.join", "sender.filled:9", "sender.release"),
}
NUMBERS = range(5)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_sender_that_is_killed(faulty_fleet: FaultyFleet, number: int) -> None:
    free = free_mib()
    point = SENDER_POINTS[faulty_fleet.transport][number]
    faulty_fleet.end_idle_sender()
    faulty_fleet.ticket.write_text(point)
    began = time.monotonic()
    done = faulty_fleet.push("b" if number % 2 else "a", expect=None)
    assert not faulty_fleet.ticket.exists(), f"nobody came to {point}: {done.stderr}"
    version = faulty_fleet.assert_healthy(free)
    print(f"{point}: exit {done.returncode}, at {version} in {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_fails_in_the_update(faulty_fleet: FaultyFleet, number: int) -> None:
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

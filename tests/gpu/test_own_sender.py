"""vLLM's own trainer engines send over NCCL within `Fleet.update`; the trainer may be killed.

    pytest tests/gpu/test_own_sender.py -s

Two GPUs: the first has the server, the second the trainer; with three, two have servers. vLLM 0.32.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gpu.conftest import need_gpus
from tests.gpu.devices import available, free_mib
from tests.gpu.faulty import HEALTHY_TIMEOUT_S, FaultyFleet

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
_DYING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {examples!r})
import own_sender

def dying(sent):
    for number, one in enumerate(sent):
        if number == {after}:
            os.kill(os.getpid(), signal.SIGKILL)
        yield one

class Dying(own_sender.Weights):
    def iter_full(self):
        return dying(super().iter_full())

    __iter__ = iter_full

changes = own_sender.changes
own_sender.Weights = Dying
own_sender.changes = lambda old, new: dying(changes(old, new))
own_sender.main()
"""


class TrainedFleet(FaultyFleet):
    """Trainers run on the GPU behind the servers'."""

    def train(
        self, name: str, *options: str, dies_after: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A trainer that sends this checkpoint; killed by itself after so many tensors."""
        examples = ROOT / "examples"
        run = [str(examples / "own_sender.py")]
        if dies_after is not None:
            run = ["-c", _DYING.format(examples=str(examples), after=dies_after)]
        gpu = str(available()[len(self.data("urls")["servers"])])
        return subprocess.run(
            [sys.executable, *run, *options, str(self.checkpoints[name]), name],
            cwd=self.directory,
            env={**self.env, "CUDA_VISIBLE_DEVICES": gpu},
            text=True,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def trained(self, name: str, *options: str) -> None:
        done = self.train(name, *options)
        assert done.returncode == 0, done.stderr[-4000:]
        print(done.stdout.strip())
        assert self.answer() == self.answers[name]
        assert self.server()["weight_version"] == name
        assert self.data("status")["health"] == "healthy"
        verified = self.data("weights", "verify")
        assert verified["agree"] is True, verified


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]
) -> Iterator[TrainedFleet]:
    need_gpus(2)
    replicas = min(len(available()) - 1, 2)
    root = tmp_path_factory.mktemp("own")
    # skyctl's own sender comes first, and has learned what is answered
    with up(TrainedFleet(root, "nccl", checkpoints, replicas=replicas)) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def sparse_fleet(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]
) -> Iterator[TrainedFleet]:
    """Takes single elements; skyctl itself pushes by disk there."""
    need_gpus(2)
    root = tmp_path_factory.mktemp("sparse")
    with up(TrainedFleet(root, "disk", checkpoints, backend="sparse_nccl")) as fleet:
        yield fleet


@contextmanager
def up(fleet: TrainedFleet) -> Iterator[TrainedFleet]:
    try:
        fleet.up()
        yield fleet
    finally:
        fleet.run("down", expect=None, timeout_s=120)


def test_a_trainer_and_skyctl_send_in_turn(fleet: TrainedFleet) -> None:
    fleet.trained("b")
    fleet.push("a")
    assert fleet.answer() == fleet.answers["a"]
    fleet.trained("b", "--keep")
    fleet.trained("a")


def test_memory_is_as_before_after_ten_updates(fleet: TrainedFleet) -> None:
    fleet.trained("b")
    before = free_mib()[0]
    for name in "ab" * 5:
        fleet.trained(name)
    assert free_mib()[0] >= before - 256


@pytest.mark.parametrize("after", [0, 40])
def test_a_trainer_that_is_killed_half_way(fleet: TrainedFleet, after: int) -> None:
    """Servers wait in a collective that never ends: they are started again, on the last push."""
    fleet.push("a")
    free = free_mib()
    done = fleet.train("b", dies_after=after)
    assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
    assert fleet.assert_healthy(free) == "a"
    fleet.trained("b")


def test_a_server_that_restarts_waits_for_the_next_update(fleet: TrainedFleet) -> None:
    """No file has what the trainer sent."""
    fleet.push("a")
    fleet.trained("b")
    killed = fleet.server()["pid"]
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + HEALTHY_TIMEOUT_S
    while (again := fleet.server())["state"] != "quarantined" or again["pid"] in (killed, None):
        assert time.monotonic() < deadline, again
        time.sleep(0.5)
    assert "no file has it" in str(again)
    fleet.trained("a")


def test_elements_that_differ_make_the_weights_those_of_the_checkpoint(
    sparse_fleet: TrainedFleet,
) -> None:
    a, b = (str(path) for path in sparse_fleet.checkpoints.values())
    sparse_fleet.trained("b", "--since", a)
    sparse_fleet.trained("a", "--since", b, "--keep")


def test_a_trainer_that_is_killed_among_its_changes(sparse_fleet: TrainedFleet) -> None:
    """Some tensors are new by then, in place: no server may serve them."""
    a = str(sparse_fleet.checkpoints["a"])
    sparse_fleet.push("a")
    free = free_mib()
    done = sparse_fleet.train("b", "--since", a, dies_after=40)
    assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
    assert sparse_fleet.assert_healthy(free) == "a"
    sparse_fleet.trained("b", "--since", a)

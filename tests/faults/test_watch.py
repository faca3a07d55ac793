"""`sync-weights --watch` beside a training run that writes, on a fleet of stubs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stub_fleet import ROOT, StubFleet
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

# two checkpoints in small pieces, as a trainer writes them, and one that is renamed when it is done
WRITER = """
import sys, time
from pathlib import Path
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
runs = Path(sys.argv[1])
for step in (1, 2):
    made = write_checkpoint(runs.parent / f"made-{step}", tiny_tensors(step), shards=2)
    path = runs / f"checkpoint-{step}"
    path.mkdir()
    for source in sorted(made.iterdir()):
        data = source.read_bytes()
        with (path / source.name).open("wb", buffering=0) as file:
            for at in range(0, len(data), 1 + len(data) // 3):
                file.write(data[at : at + 1 + len(data) // 3])
                time.sleep(0.2)
    print(step, flush=True)
    sys.stdin.readline()
write_checkpoint(runs / "tmp-checkpoint-3", tiny_tensors(3)).rename(runs / "checkpoint-3")
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path)
    fleet.write(extra="weight_transfer: {transport: disk}")
    (tmp_path / "runs").mkdir()
    fleet.run("up")
    yield fleet
    fleet.run("down")


class Watch:
    """The command, which prints a line for each push."""

    def __init__(self, fleet: StubFleet, *options: str) -> None:
        self.process = fleet.start("sync-weights", "--watch", "runs", "--json", *options)

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        envelope: dict[str, Any] = json.loads(self.process.stdout.readline())
        return envelope

    def pushed(self) -> str:
        envelope = self.line()
        assert envelope["ok"], envelope
        return str(envelope["data"]["job"]["result"]["version"]).partition("@")[0]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 0
        assert self.process.stderr is not None and self.process.stderr.read() == ""


def test_each_checkpoint_of_a_run_is_pushed_once_it_is_whole(fleet: StubFleet) -> None:
    watch = Watch(fleet)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(fleet.directory / "runs")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        for step in (1, 2):
            assert watch.pushed() == f"checkpoint-{step}"
            writer.stdin.write("\n")
            writer.stdin.flush()
        assert watch.pushed() == "checkpoint-3"
    watch.end()
    write_checkpoint(fleet.directory / "runs" / "checkpoint-4", tiny_tensors(4))
    watch = Watch(fleet, "--keep")  # it knows from the history what was pushed
    assert watch.pushed() == "checkpoint-4"
    write_checkpoint(fleet.directory / "runs" / "checkpoint-5", tiny_tensors(5))
    assert watch.pushed() == "checkpoint-5"
    watch.end()
    pushes = fleet.json("weights", "history")["data"]["pushes"]
    assert [push["version"].partition("@")[0] for push in pushes] == [
        f"checkpoint-{step}" for step in (5, 4, 3, 2, 1)
    ]


def test_a_refused_checkpoint_is_named_and_the_watch_goes_on(fleet: StubFleet) -> None:
    runs = fleet.directory / "runs"
    tensors = tiny_tensors(2)
    name, (dtype, shape, data) = next(iter(tensors.items()))
    tensors[name] = (dtype, shape, b"\xff" * len(data))  # NaN
    write_checkpoint(runs / "checkpoint-2", tensors)
    watch = Watch(fleet)
    refused = watch.line()
    assert not refused["ok"]
    assert refused["error"]["message"].startswith("checkpoint-2 is skipped: ")
    write_checkpoint(runs / "checkpoint-3", tiny_tensors(3))
    assert watch.pushed() == "checkpoint-3"
    watch.end()


def test_ctrl_c_in_a_push_leaves_it_to_the_supervisor_and_says_so(fleet: StubFleet) -> None:
    fleet.run("down")
    fleet.write(
        extra="weight_transfer: {transport: disk}",
        faults='{"/collective_rpc": {"kind": "delay", "seconds": 2}}',
    )
    fleet.run("up")
    write_checkpoint(fleet.directory / "runs" / "checkpoint-1", tiny_tensors(1))
    process = fleet.start("sync-weights", "--watch", "runs")
    assert process.stderr is not None
    while "update" not in (line := process.stderr.readline()):
        assert line, "it ended"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "push-1 goes on: skyctl jobs wait push-1; or undo it: skyctl jobs cancel" in stderr
    fleet.run("jobs", "wait", "push-1")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--watch nowhere", "nowhere is not a directory"),
        ("--watch runs step", "--watch pushes what it finds"),
        ("--watch runs --fleet https://gpu7:1", "works on the fleet's own machine"),
    ],
)
def test_a_watch_that_cannot_begin_is_refused(tmp_path: Path, typed: str, message: str) -> None:
    fleet = StubFleet(tmp_path)
    fleet.write()
    (tmp_path / "runs").mkdir()
    assert message in fleet.run("sync-weights", *typed.split(), expect=2).stderr
    down = fleet.run("sync-weights", "--watch", "runs", expect=4)
    assert "fleet stubs is not running" in down.stderr

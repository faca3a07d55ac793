"""What `generate` says while nothing is answered, and what it leaves of its output file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl import output_mode
from skyctl.cli import generate
from skyctl.cli.generate import explained, results_file, why_requests_wait
from skyctl.core.diagnosis import assess
from skyctl.core.status import FleetStatus, ReplicaStatus
from skyctl.errors import UsageError
from skyctl.states import ReplicaState
from skyctl.store.state import ServerRow


@pytest.fixture(autouse=True)
def _notes_are_printed() -> None:
    output_mode.configure(command="generate", json=False)  # an earlier test may have chosen --json


class Fleet:
    """A service of one server in this state."""

    def __init__(self, state: str, *, paused: bool = False, job: str | None = None) -> None:
        replica = ReplicaStatus("f-0", ReplicaState(state), "http://h:1")
        health, reasons = assess([replica], None, pushing=job is not None)
        self._status = FleetStatus("f", health, (replica,), None, reasons, job=job)
        self._rows = (ServerRow("f-0", paused=paused),)
        self.asked = 0
        self.enough = asyncio.Event()

    async def status(self) -> FleetStatus:
        self.asked += 1
        if self.asked == 5:
            self.enough.set()
        return self._status

    async def weights(self) -> Any:
        return SimpleNamespace(servers=self._rows)


@pytest.mark.parametrize(
    ("state", "more", "text"),
    [
        ("ready", {}, ""),
        ("paused", {"paused": True}, "the fleet is paused: requests wait (by skyctl); type: "),
        ("paused", {}, "the fleet is paused: requests wait (not by skyctl); type: skyctl resume"),
        ("asleep", {}, "the fleet is asleep: requests are refused; type: skyctl wake"),
        ("updating", {"job": "push-7"}, "push-7 has the servers; follow it: skyctl jobs wait push"),
        ("starting", {}, "f-0 is starting"),
        ("quarantined", {}, "f-0 is quarantined; type: skyctl recover"),
    ],
)
async def test_a_fleet_that_does_not_answer_says_why_and_what_to_type(
    state: str, more: dict[str, Any], text: str
) -> None:
    cause = await why_requests_wait(Fleet(state, **more))  # type: ignore[arg-type]
    assert cause.startswith(f"no answer yet: {text}" if text else "") and bool(cause) == bool(text)


@pytest.mark.parametrize(("finished", "notes"), [(0, 1), (1, 0)])
async def test_it_is_said_once_while_nothing_is_finished(
    finished: int,
    notes: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(generate, "EXPLAIN_AFTER_S", 0.0)
    fleet, answers = Fleet("paused", paused=True), 0

    def count() -> int:
        nonlocal answers
        answers += finished
        if answers == 5:
            fleet.enough.set()
        return answers

    async with explained(fleet, count):  # type: ignore[arg-type]
        await fleet.enough.wait()
    out, err = capsys.readouterr()
    assert out == "" and err.count("no answer yet: the fleet is paused") == notes


def test_results_appear_under_their_name_once_they_are_complete(tmp_path: Path) -> None:
    path, link = tmp_path / "answers.jsonl", tmp_path / "link.jsonl"
    path.write_text("earlier\n")
    path.chmod(0o600)
    link.symlink_to(path)
    with results_file(link) as sink:
        assert sink is not None
        sink.write("new\n")
        sink.flush()
        assert path.read_text() == "earlier\n"
    assert link.is_symlink() and path.read_text() == "new\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [path, link]


@pytest.mark.parametrize("answered", ["", "first\n"])
def test_ctrl_c_leaves_no_empty_file_and_loses_no_result(
    answered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt), results_file(path) as sink:
        assert sink is not None
        sink.write(answered)
        raise KeyboardInterrupt
    assert not path.exists()
    partial = tmp_path / "answers.jsonl.partial"
    assert (partial.read_text() if partial.exists() else "") == answered
    assert partial.exists() == bool(answered)
    assert (f"results until then: {partial}" in capsys.readouterr().err) == bool(answered)


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with results_file(pipe) as sink:
            assert sink is not None
            sink.write("x\n")
        assert os.read(reader, 9) == b"x\n" and list(tmp_path.iterdir()) == [pipe]
    finally:
        os.close(reader)


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"), results_file(tmp_path / "none/x"):
        pass
    with results_file(None) as sink:
        assert sink is None

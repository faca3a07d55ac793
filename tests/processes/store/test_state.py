"""A state file that several processes use, some of which are killed."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyctl.errors import ConflictError
from skyctl.store.identity import identify, own_identity
from skyctl.store.locks import Locks
from skyctl.store.state import FleetState


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fleet" / "state.sqlite"


_WRITER = """
import sys
from pathlib import Path
from skyctl.store.journal import JobEvent
from skyctl.store.state import FleetState
state = FleetState(Path(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    number += 1
    state.update_server(f"s-{number % 7}", weight_version=str(number))
    state.journal.add_events(state.journal.begin("push", {}).id, JobEvent.server("s", "paused"))
"""


def test_a_writer_killed_at_any_moment_leaves_a_readable_file(path: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE
        )
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            deadline = time.monotonic() + 60
            with FleetState(path) as reader:
                before = len(reader.journal.jobs(10_000))
                while len(reader.journal.jobs(10_000)) < before + 5:
                    assert time.monotonic() < deadline
        finally:
            writer.kill()
            writer.communicate()
        warnings: list[str] = []
        with FleetState(path, warn=warnings.append) as state:
            assert len(state.journal.jobs(10_000)) >= before + 5
        assert warnings == []


def _contend(path: Path, barrier: object, wins: object) -> None:
    with FleetState(path) as state:
        barrier.wait()  # type: ignore[attr-defined]
        try:
            lock = state.locks.take("turn", f"process {os.getpid()}")
            wins.put("won")  # type: ignore[attr-defined]
            barrier.wait()  # type: ignore[attr-defined]
            lock.release()
        except ConflictError:
            wins.put("lost")  # type: ignore[attr-defined]
            barrier.wait()  # type: ignore[attr-defined]


def test_of_processes_racing_for_a_lock_exactly_one_wins(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, wins = context.Barrier(6), context.Queue()
    racers = [context.Process(target=_contend, args=(path, barrier, wins)) for _ in range(6)]
    for racer in racers:
        racer.start()
    results = sorted(wins.get(timeout=20) for _ in racers)
    for racer in racers:
        racer.join(20)
    assert results == ["lost"] * 5 + ["won"]


def test_what_is_written_beside_a_second_connection_of_one_process_is_not_lost(path: Path) -> None:
    """A raw descriptor of the file, closed, would drop the first one's locks: see `_create`."""
    look = (
        "import sys; from pathlib import Path; from skyctl.store.state import FleetState\n"
        "with FleetState(Path(sys.argv[1])) as state: print(state.get('key'))\n"
    )

    def seen_by_another() -> str:
        done = subprocess.run(
            [sys.executable, "-c", look, path], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    with FleetState(path) as state:
        FleetState(path).close()
        assert seen_by_another() == "None"
        state.set("key", "value")
        assert seen_by_another() == "value"


_HOLD = """
import sys; from pathlib import Path; from skyctl.store.locks import Locks
lock = Locks(Path(sys.argv[1])).take("turn", "push-1", shared=sys.argv[2] == "shared")
print("held", flush=True); input(); lock.release()
"""


def _holding(directory: Path, how: str) -> subprocess.Popen[bytes]:
    """A process that has the lock until it reads a line."""
    directory.mkdir(exist_ok=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, directory, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


@pytest.mark.parametrize("how", ["exclusive", "shared"])
def test_a_lock_of_another_process_names_it_and_dies_with_it(path: Path, how: str) -> None:
    holder = _holding(path.parent, how)
    locks = Locks(path.parent)
    [found] = locks.holders("turn")
    assert found.pid == holder.pid and found.activity == "push-1"
    with pytest.raises(ConflictError, match=rf"\(pid {holder.pid}, for "):
        locks.take("turn", "another")
    if how == "shared":
        locks.take("turn", "beside it", shared=True).release()
    holder.kill()
    holder.communicate()
    following = locks.take("turn", "the next")
    assert following.after_death
    following.forget_dead()
    following.release()
    assert locks.holders("turn") == [] and not locks.take("turn", "another").after_death


@pytest.mark.parametrize("first", ["ends", "ends last", "dies"])
def test_a_death_is_told_from_an_end_where_a_lock_is_shared(path: Path, first: str) -> None:
    """The file names one of several; who comes beside him is after nobody's death."""
    holder = _holding(path.parent, "shared")
    locks = Locks(path.parent)
    beside = [locks.take("turn", "beside", shared=True) for _ in range(2)]
    assert not any(lock.after_death for lock in beside)

    def release() -> None:
        for lock in beside:
            lock.release()

    if first == "ends last":
        release()
    if first == "dies":
        holder.kill()
    holder.communicate(b"\n")
    release()
    for shared in (True, False):
        following = locks.take("turn", "the next", shared=shared)
        assert following.after_death is (first == "dies")
        following.release()


def test_a_process_with_any_name_has_a_create_time(tmp_path: Path) -> None:
    program = tmp_path / ") 1 2 (x"
    program.symlink_to(Path("/bin/sleep").resolve())
    process = subprocess.Popen([program, "60"])
    try:
        own, found = own_identity(), identify(process.pid)
        assert found is not None and found.alive()
        assert found.create_time >= own.create_time
    finally:
        process.kill()
        process.wait()
    assert identify(process.pid) is None


def test_a_job_of_a_dead_process_is_closed_as_interrupted(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from skyctl.store.state import FleetState\n"
        "s = FleetState(Path(sys.argv[1])); j = s.journal.begin('push', {'checkpoint': 'c'})\n"
        "from skyctl.store.journal import JobEvent\n"
        "s.journal.add_events(j.id, JobEvent.stage('update'), JobEvent.server('a-0', 'updating'))"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    with FleetState(path) as state:
        [orphan] = state.journal.interrupt_orphans()
        assert orphan.stage == "update" and orphan.servers["a-0"]["state"] == "updating"
        job = state.journal.job("push-1")
        assert job.state == "interrupted" and job.error is not None
        assert "stage update" in job.error["message"]
        assert state.journal.interrupt_orphans() == []

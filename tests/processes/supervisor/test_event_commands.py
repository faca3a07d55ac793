"""Commands that the supervisor runs on events: what they are given, and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from skyctl.fleetfile.load import parse_fleet
from skyctl.states import FleetEvent
from skyctl.store.state import FleetState
from skyctl.supervisor.event_commands import EventCommands

T = TypeVar("T")


@asynccontextmanager
async def commands(
    directory: Path, command: str, *, timeout_s: float = 30.0, state: Path | None = None
) -> AsyncIterator[FleetState]:
    """A state whose events run `command` in `directory` when a push has succeeded."""
    text = f"name: a\nmodel: m\non_event: {{push_succeeded: {json.dumps(command)}}}\n"
    config = parse_fleet(text, Path("fleet.yaml"), {}).config
    plan = SimpleNamespace(config=config, base_dir=directory)
    with FleetState((state or directory) / "state.sqlite") as opened:
        running = SimpleNamespace(plan=plan, state=opened)
        runner = EventCommands(running, timeout_s=timeout_s)  # type: ignore[arg-type]
        opened.on_event = runner.enqueue
        task = asyncio.create_task(runner.run())
        try:
            yield opened
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(look: Callable[[], T]) -> T:
    """What `look` returns, once it is something."""
    while not (seen := look()):  # noqa: ASYNC110 - files and processes announce nothing
        await asyncio.sleep(0.02)
    return seen


async def until_read(path: Path) -> str:
    """The file's text, once it has a whole line."""

    def text() -> str:
        written = path.read_text() if path.is_file() else ""
        return written if written.endswith("\n") else ""

    return await until(text)


async def until_reported(state: FleetState) -> str:
    return await until(
        lambda: "\n".join(e.message for e in state.events() if e.subject == "on_event")
    )


async def until_ended(pid: int) -> None:
    def ended() -> bool:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            return True
        return status.rpartition(")")[2].split()[0] == "Z"

    await until(ended)


async def test_a_command_gets_its_event_in_the_files_directory_and_others_get_none(
    tmp_path: Path,
) -> None:
    async with commands(tmp_path, "cat >> seen") as state:
        state.add_event("fleet", "push-1 failed", FleetEvent.PUSH_FAILED)
        state.add_event("fleet", "push-2: done", FleetEvent.PUSH_SUCCEEDED, job="push-2")
        state.add_event("fleet", "a line")
        event = json.loads(await until_read(tmp_path / "seen"))
    assert event.pop("at") > 0
    assert event == {
        "fleet": "a",
        "event": "push_succeeded",
        "subject": "fleet",
        "message": "push-2: done",
        "job": "push-2",
    }


async def test_a_command_that_fails_is_an_event_and_the_next_one_runs(tmp_path: Path) -> None:
    command = "cat > seen; echo no such channel >&2; exit 3"
    async with commands(tmp_path, command) as state:
        state.add_event("fleet", "one", FleetEvent.PUSH_SUCCEEDED)
        told = await until_reported(state)
        (tmp_path / "seen").unlink()
        state.add_event("fleet", "two", FleetEvent.PUSH_SUCCEEDED)
        assert json.loads(await until_read(tmp_path / "seen"))["message"] == "two"
    assert told == "the command of push_succeeded: exit code 3: no such channel"


async def test_a_command_that_cannot_be_started_is_an_event(tmp_path: Path) -> None:
    async with commands(tmp_path / "gone", "true", state=tmp_path) as state:
        state.add_event("fleet", "one", FleetEvent.PUSH_SUCCEEDED)
        assert "cannot be started: No such file" in await until_reported(state)


async def test_a_command_that_does_not_read_its_event_has_not_failed(tmp_path: Path) -> None:
    async with commands(tmp_path, "echo ran >> seen") as state:
        for number in range(3):
            state.add_event("fleet", "x" * 100_000, FleetEvent.PUSH_SUCCEEDED, number=number)
        await until_read(tmp_path / "seen")
        await until(lambda: (tmp_path / "seen").read_text() == "ran\n" * 3)
        assert not [event for event in state.events() if event.subject == "on_event"]


async def test_a_command_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    command = "sleep 1000 & echo $! > pid; wait"
    async with commands(tmp_path, command, timeout_s=1.0) as state:
        state.add_event("fleet", "one", FleetEvent.PUSH_SUCCEEDED)
        pid = int(await until_read(tmp_path / "pid"))
        assert await until_reported(state) == "the command of push_succeeded: ended after 1 s"
    await until_ended(pid)


async def test_the_end_of_the_supervisor_ends_its_command(tmp_path: Path) -> None:
    async with commands(tmp_path, "sleep 1000 & echo $! > pid; wait") as state:
        state.add_event("fleet", "one", FleetEvent.PUSH_SUCCEEDED)
        pid = int(await until_read(tmp_path / "pid"))
    await until_ended(pid)


async def test_events_that_wait_too_long_are_counted_and_hold_nothing_up(tmp_path: Path) -> None:
    async with commands(tmp_path, "sleep 1000") as state:
        for _ in range(103):
            state.add_event("fleet", "one", FleetEvent.PUSH_SUCCEEDED)
        assert "skipped: 100 others wait" in await until_reported(state)

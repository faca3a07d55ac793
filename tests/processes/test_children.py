"""How children start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyctl.children import started
from tests.pids import gone


async def test_a_process_that_is_cancelled_while_it_starts_ends_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, go_on = asyncio.get_running_loop(), asyncio.Event()
    connect = loop.connect_read_pipe

    async def later(*arguments: Any) -> Any:
        await go_on.wait()
        return await connect(*arguments)

    monkeypatch.setattr(loop, "connect_read_pipe", later)
    command = "sleep 1000 & echo $! >pid.new; mv pid.new pid; wait"
    starting = asyncio.create_task(
        started(
            asyncio.create_subprocess_shell(
                command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, start_new_session=True
            ),
            session=True,
        )
    )
    while not (tmp_path / "pid").exists():  # noqa: ASYNC110 - a shell announces nothing
        await asyncio.sleep(0.02)
    starting.cancel()
    go_on.set()
    await asyncio.wait({starting}, timeout=20)
    assert starting.cancelled()
    assert gone(int((tmp_path / "pid").read_text()), within_s=20)

"""What is in the logs of processes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.unit.supervisor.fleets import eventually


def has_line(log: Path) -> bool:
    return log.exists() and log.read_text().endswith("\n")


async def first_line(log: Path) -> str:
    await eventually(lambda: has_line(log))
    return await asyncio.to_thread(lambda: log.read_text().splitlines()[0])


def numbers(*paths: Path) -> list[int]:
    """Of whole lines: a file may begin and end in the middle of one."""
    return [
        int(number)
        for path in paths
        for number in re.findall(r"^line (\d+)\n", path.read_text(), re.MULTILINE)
    ]

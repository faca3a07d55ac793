"""Shared memory that a stopped process leaves behind."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.launch.local.process import ManagedProcess
from tests.unit.launch.logs import first_line

HOLDER = """
import mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
held = mmap.mmap(file, 4096)
print("mapped", flush=True)
time.sleep(600)
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/vllm_dist_test{os.getpid()}-tp:0-[0-1]-cpushm_0")
    yield path
    path.unlink(missing_ok=True)


def there(*paths: Path) -> list[Path]:
    return [path for path in paths if path.exists()]


@pytest.mark.parametrize("crashed", [False, True])
async def test_a_process_that_is_stopped_leaves_no_segment(
    tmp_path: Path, segment: Path, crashed: bool
) -> None:
    other = segment.with_name(segment.name.replace("test", "other"))
    argv = [sys.executable, "-c", HOLDER, str(segment)]
    process = ManagedProcess.spawn(argv, {}, tmp_path / "log", secrets.token_hex(8))
    assert await first_line(tmp_path / "log") == "mapped"
    with other.open("wb") as file:
        file.truncate(4096)
    try:
        if crashed:
            process.record_segments()
            assert process.pid is not None
            os.kill(process.pid, 9)
            await process.exited.wait()
        await process.stop(0.2)
        assert there(segment, other) == [other]
    finally:
        other.unlink()

"""Logs of a process that goes on writing, and of a disk that is full."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from skyctl.launch.local.rotation import rotate
from tests.unit.launch.logs import numbers
from tests.unit.store.disks import fill, mounted

_WRITER = """
import itertools, os, sys
for number in itertools.count():
    enough = os.path.exists(sys.argv[1])
    print("line", number, flush=True)
    if enough:
        break
print(number, file=sys.stderr)
"""


def test_a_log_is_rotated_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    enough = tmp_path.with_name("enough")
    with log.open("ab") as opened:
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, enough], stdout=opened, stderr=subprocess.PIPE
        )
    rotations = 0
    while rotations < 5:
        assert writer.poll() is None
        rotations += rotate(log, 20_000, keep=2)
        time.sleep(0.001)
    enough.touch()
    _, last = writer.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2"]
    paths = [tmp_path / name for name in ("a.log.2", "a.log.1", "a.log")]
    assert "\0" not in paths[2].read_text()  # the writer appends: no hole where it was
    found = numbers(*paths)
    assert found == sorted(found) and found[-1] == int(last)
    # lines may fall between copy and truncation; none is there twice
    assert len(set(found)) == len(found)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*.log.*"))


def test_a_log_on_a_full_disk_is_emptied_without_a_copy(tmp_path: Path) -> None:
    with mounted(tmp_path / "small") as directory:
        log = directory / "a.log"
        log.write_bytes(b"x" * 100_000)
        fill(directory)
        assert rotate(log, 50_000, keep=2)
        assert log.stat().st_size == 0
        assert [path.name for path in directory.glob("a.log.*")] == []

"""What a killed trainer leaves in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.checkpoints.staging import sweep
from tests.unit.push.checkpoints import names_below

HOLD = """
import sys
from pathlib import Path
from skyctl.checkpoints.staging import staged
with staged(Path(sys.argv[1]), needed_bytes=1, memory_root=Path(sys.argv[2])) as live:
    (live / "model.safetensors").write_bytes(b"weights")
    print(live, flush=True)
    sys.stdin.read()
"""

CYCLES = """
import sys
from pathlib import Path
from skyctl.checkpoints.staging import staged, sweep
home, memory = map(Path, sys.argv[1:])
sys.stdin.read()  # until all have made their imports
for _ in range(300):
    with staged(home, needed_bytes=1, memory_root=memory) as live:
        (live / "model.safetensors").write_bytes(b"weights")
        sweep(home, (), memory_root=memory)
        assert (live / "model.safetensors").read_bytes() == b"weights"
    sweep(home, (), memory_root=memory)
"""


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Stands in for /dev/shm."""
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def test_a_killed_trainer_leaves_nothing_after_the_next_sweep(tmp_path: Path, memory: Path) -> None:
    home = tmp_path / "weights"
    trainer = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home), str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    live = Path(trainer.stdout.readline().strip())
    sweep(home, (), memory_root=memory)
    assert (live / "model.safetensors").exists(), "swept while its writer lived"
    trainer.kill()
    trainer.communicate(timeout=30)
    sweep(home, (), memory_root=memory)
    assert names_below(home) == [] and names_below(memory) == []


def test_fleets_of_a_user_write_and_sweep_side_by_side(tmp_path: Path, memory: Path) -> None:
    fleets = [
        subprocess.Popen(
            [sys.executable, "-c", CYCLES, str(tmp_path / f"weights-{number}"), str(memory)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for fleet in fleets:
        assert fleet.stdin is not None
        fleet.stdin.close()
        fleet.stdin = None
    errors = [fleet.communicate(timeout=60)[1] for fleet in fleets]
    assert errors == [""] * len(fleets)
    assert names_below(memory) == []

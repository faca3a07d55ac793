"""A GPU that servers and the sender share, with little room left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyctl.launch.local.devices import free_gpu_memory
from tests.gpu.conftest import need_gpus
from tests.gpu.devices import available
from tests.gpu.faulty import FaultyFleet

MIB = 1 << 20
CHUNK_SIZE = "192MiB"
_BALLAST = """
import sys, torch
torch.zeros(1, device="cuda")
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def only_free(gpu: int, free_bytes: int) -> Iterator[None]:
    """Take what is free on a GPU, but for these bytes."""
    with subprocess.Popen(
        [sys.executable, "-c", _BALLAST, str(free_bytes)],
        env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline().strip() == "taken"
        yield
        process.stdin.close()


def chosen(fleet: FaultyFleet) -> dict[str, Any]:
    """How a push of "b" would be staged, as a dry run has it."""
    plan = fleet.data("sync-weights", str(fleet.checkpoints["b"]), "--dry-run")["job"]["result"]
    (one,) = [one for one in plan["plan"]["forecasts"] if one["chosen"]]
    return {**one, "whole": plan["plan"]["total_bytes"]}


def test_a_first_push_leaves_servers_the_room_that_they_need(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """The whole checkpoint would fit beside the server, but not with what it takes to load it."""
    need_gpus(1)
    (gpu, *_) = available()
    fleet = FaultyFleet(tmp_path, "ipc", checkpoints, chunk_size=CHUNK_SIZE, warm=False)
    try:
        fleet.run("up", timeout_s=420)
        roomy = chosen(fleet)
        assert roomy["stage"] == "gpu"
        context = roomy["sender_gpu_bytes"] - roomy["whole"]
        needs = roomy["worker_gpu_bytes"]
        room = int(roomy["whole"] / 0.9 + needs / 2)
        assert room - roomy["whole"] < needs
        with only_free(gpu, room + context):
            assert chosen(fleet)["stage"] == "stream"
            before = fleet.answer()
            fleet.push("b")
            pushed = fleet.answer()
            assert pushed != before
            left = free_gpu_memory()[gpu] // MIB
        print(f"free {(room + context) // MIB} MiB, {left} after the push; needs {needs // MIB}")
        fleet.push("a")
        assert fleet.answer() == before
        assert chosen(fleet)["stage"] == "gpu"
        fleet.push("b")
        assert fleet.answer() == pushed
    finally:
        fleet.run("down", expect=None, timeout_s=120)

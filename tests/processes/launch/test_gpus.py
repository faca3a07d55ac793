"""GPU use as nvidia-smi tells it."""

from __future__ import annotations

import sys

import pytest

from skyctl.launch.local.devices import GpuUsage, read_nvidia_smi


def answering(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


def test_every_gpu_is_read_with_its_utilisation_and_memory() -> None:
    found = read_nvidia_smi(command=answering("0, 97, 61000, 81559\n1, [N/A], 12, 81559"))
    assert found == {
        0: GpuUsage(0, 0.97, 61000 * 1024**2, 81559 * 1024**2),
        1: GpuUsage(1, None, 12 * 1024**2, 81559 * 1024**2),
    }


@pytest.mark.parametrize(
    "command", [["no-such-program-anywhere"], answering("0, 1, 2, 3", code=9), answering("x")]
)
def test_no_usable_answer_means_no_gpus(command: list[str]) -> None:
    assert read_nvidia_smi(command=command) == {}


def test_a_driver_that_hangs_costs_no_more_than_the_deadline() -> None:
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert read_nvidia_smi(timeout_s=0.2, command=hanging) == {}

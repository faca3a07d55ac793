"""Reading nvidia-smi's answer, CUDA_VISIBLE_DEVICES, and the CPU topology."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from skyctl.launch.base import Gpu
from skyctl.launch.local.devices import (
    discover_cpus,
    discover_gpus,
    interface_of,
    visible_gpus,
)

GPUS = [Gpu(0, "GPU-aa11", "A", 1), Gpu(1, "GPU-bb22", "A", 1)]


def answering(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


def test_gpus_are_read_in_index_order() -> None:
    text = "1, GPU-b, NVIDIA H100 80GB HBM3, 81559\n0, GPU-a, GH200, odd name, [N/A]"
    assert discover_gpus(command=answering(text)) == [
        Gpu(0, "GPU-a", "GH200,odd name", 0),
        Gpu(1, "GPU-b", "NVIDIA H100 80GB HBM3", 81559 * 1024**2),
    ]


@pytest.mark.parametrize(
    "command",
    [["no-such-program-anywhere"], answering("0, GPU-a, H100, 5", code=9), answering("No devices")],
)
def test_no_usable_answer_means_no_gpus(command: list[str]) -> None:
    assert discover_gpus(command=command) == []


def test_a_driver_that_hangs_means_no_gpus() -> None:
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert discover_gpus(timeout_s=0.2, command=hanging) == []


@pytest.mark.parametrize(
    ("listed", "indices"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("GPU-aa", [0]),
        ("", []),
        ("MIG-x", []),
        ("-1", []),
        (" 0 ,1", [0, 1]),
    ],
)
def test_an_inherited_selection_is_respected(listed: str | None, indices: list[int]) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [gpu.index for gpu in visible_gpus(GPUS, environ)] == indices


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs CPU affinity")
def test_hardware_threads_of_a_core_are_recognised(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    folder = tmp_path / f"cpu{allowed[0]}/topology"
    folder.mkdir(parents=True)
    (folder / "thread_siblings_list").write_text("77-78\n")
    cpus = discover_cpus(topology=tmp_path)
    assert [cpu.id for cpu in cpus] == allowed
    assert cpus[0].core == 77
    assert all(cpu.core == cpu.id for cpu in cpus[1:])  # unknown topology: a core each


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_an_interface_is_found_by_its_address_or_its_network(address: str) -> None:
    assert interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["2001:db8::7", "a name", ""])
def test_what_no_interface_has_is_of_none(address: str) -> None:
    assert interface_of(address) == ""

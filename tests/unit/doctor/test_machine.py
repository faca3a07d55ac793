"""The machine's checks, each with facts on both sides of its limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.doctor.machine import (
    UNLIMITED,
    GpuFacts,
    MachineFacts,
    Needs,
    check_machine,
)
from skyctl.launch.local.devices import available_memory

GIB = 1024**3
SOUND = MachineFacts(
    gpus=(GpuFacts(0, "NVIDIA H100", 80 * GIB, 0), GpuFacts(1, "NVIDIA H100", 80 * GIB, 0)),
    driver="580.65.06",
    packages={"vllm": "0.32.0", "torch": "2.11.0", "nvidia-nccl-cu13": "2.28.9"},
    infiniband=True,
    shm_size=16 * GIB,
    memory_available=100 * GIB,
    memory_lock=UNLIMITED,
    open_files=65_536,
    open_files_hard=65_536,
    state_root="/home/u/.local/state/skyctl",
    state_free=50 * GIB,
)
CUDA = Needs(cuda=True, largest_world_size=2)


def findings(needs: Needs = CUDA, **changes: Any) -> list[tuple[str, str]]:
    """(severity, check) of everything that is not ok."""
    findings = check_machine(replace(SOUND, **changes), needs)
    assert all(finding.section == "machine" for finding in findings)
    assert all(finding.fix for finding in findings if finding.severity != "ok")
    return [(f.severity.value, f.check) for f in findings if f.severity != "ok"]


def test_a_sound_machine_has_nothing_to_fix_and_says_what_it_has() -> None:
    assert findings() == []
    messages = [finding.message for finding in check_machine(SOUND, CUDA)]
    assert "2 × NVIDIA H100 (80.0 GiB)" in messages
    assert "driver 580.65.06, CUDA 13" in messages
    assert "vllm 0.32.0, torch 2.11.0" in messages


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpus": ()}, [("error", "gpus")]),
        ({"gpus": (GpuFacts(3, "A", GIB, 0, ecc_errors=2),)}, [("error", "gpus")]),
        ({"driver": "570.10"}, [("error", "driver")]),
        ({"driver": "[N/A]"}, [("warning", "driver")]),
        ({"packages": {"vllm": "0.32.0"}}, [("warning", "nccl")]),
        ({"shm_size": 64 * 1024**2}, [("error", "shared-memory")]),
        ({"shm_size": GIB - 1}, [("warning", "shared-memory")]),
        ({"memory_lock": 8 * 1024**2}, [("warning", "memory-lock")]),
        ({"memory_lock": 8 * 1024**2, "infiniband": False}, []),
        ({"open_files": 1024}, [("warning", "open-files")]),
        ({"open_files": 1024, "open_files_hard": 1024}, [("warning", "open-files")]),
        ({"state_free": 1024}, [("error", "disk-space")]),
        ({"environment": {"HTTP_PROXY": "http://p"}}, [("warning", "proxy")]),
        (
            {"environment": {"all_proxy": "http://p", "no_proxy": "10.0.0.1"}},
            [("warning", "proxy")],
        ),
        ({"environment": {"HTTP_PROXY": "http://p", "NO_PROXY": "127.0.0.1"}}, []),
        ({"environment": {"HTTPS_PROXY": "http://p", "HTTP_PROXY": ""}}, []),
        ({"shm_size": None, "memory_lock": None, "open_files": None, "state_free": None}, []),
    ],
)
def test_each_fault_is_found_and_only_that(
    changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert findings(**changes) == expected


def test_checks_that_the_fleet_does_not_need_are_left_out() -> None:
    assert findings(Needs(cuda=False), gpus=(), driver=None) == []
    assert findings(Needs(cuda=True), shm_size=64 * 1024**2) == [("warning", "shared-memory")]
    assert findings(Needs(cuda=True, router=False), open_files=1024) == []


def test_cuda_12_runs_on_an_older_driver() -> None:
    packages = {"vllm": "0.26.0", "nvidia-nccl-cu12": "2.27"}
    assert findings(driver="550.1", packages=packages) == []
    both = {**packages, "nvidia-nccl-cu13": "2.28"}
    assert findings(packages=both) == [("warning", "nccl")]


def test_clients_of_servers_elsewhere_need_them_in_no_proxy() -> None:
    needs = Needs(cuda=False, hosts=("10.0.0.5", "127.0.0.1"))
    environment = {"HTTP_PROXY": "http://p", "NO_PROXY": "a.b,127.0.0.1"}
    facts = replace(SOUND, environment=environment)
    (finding,) = [f for f in check_machine(facts, needs) if f.check == "proxy"]
    assert "NO_PROXY does not have 10.0.0.5: clients" in finding.message
    assert finding.fix == "export NO_PROXY=a.b,127.0.0.1,10.0.0.5 no_proxy=a.b,127.0.0.1,10.0.0.5"


def test_a_machine_without_vllm_is_told_so_only_where_no_fleet_file_says_it() -> None:
    assert findings(Needs(), packages={}) == [("warning", "packages")]
    assert findings(Needs(cuda=False), packages={}) == []


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [("max", 10, 0, 900), ("500", 100, 0, 400), ("500", 450, 100, 150), ("9999", 0, 0, 900)],
)
def test_a_containers_limit_bounds_the_memory(
    tmp_path: Path, limit: str, used: int, cached: int, expected: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 2 kB\nMemAvailable: 900 kB\n")
    for name, value in (("max", limit), ("current", used)):
        scaled = value if value == "max" else int(value) * 1024
        (tmp_path / f"memory.{name}").write_text(f"{scaled}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached * 1024}\n")
    assert available_memory(meminfo, tmp_path) == expected * 1024

"""The fleet file's checks: a plan against a machine and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyctl.core.check import Problem
from skyctl.core.planner import plan_fleet
from skyctl.doctor.check_line import CheckLine
from skyctl.doctor.fleet_file import FilePlan, ModelFacts, check_fleet_file
from skyctl.doctor.machine import GpuFacts, MachineFacts
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.base import Gpu

GIB = 1024**3
GPUS = [Gpu(index, f"GPU-{index}", "H100", 80 * GIB) for index in range(2)]
FACTS = MachineFacts(
    gpus=tuple(GpuFacts(gpu.index, gpu.name, gpu.memory_bytes, 0) for gpu in GPUS),
    memory_available=64 * GIB,
)
MODEL = ModelFacts(16 * GIB, "model.embed_tokens.weight", GIB)
TINY = ModelFacts(1024**2, "lm_head.weight", 1024)


def findings(
    facts: MachineFacts = FACTS,
    model: ModelFacts | None = MODEL,
    problems: tuple[Problem, ...] = (),
    running: bool = False,
    **config: Any,
) -> list[CheckLine]:
    """What is found in a fleet file on a machine with two GPUs (none with `device: cpu`)."""
    fleet = FleetConfig.model_validate({"name": "f", "model": "m", "replicas": 2, **config})
    gpus = [] if config.get("device") == "cpu" else GPUS
    ports = iter(range(20_000, 20_100))
    plan = plan_fleet(fleet, Path(), gpus=gpus, next_port=lambda: next(ports), environ={})
    checked = check_fleet_file(FilePlan(plan, problems, model, running), facts)
    assert all(finding.section == "fleet-file" for finding in checked)
    assert all(finding.fix for finding in checked if finding.severity != "ok")
    return checked


def wrong(given: list[CheckLine]) -> list[tuple[str, str]]:
    return [(f.severity.value, f.check) for f in given if f.severity != "ok"]


def test_a_good_file_has_nothing_to_fix() -> None:
    checked = findings()
    assert wrong(checked) == []
    assert checked[0].message == "2 replicas of m on cuda"
    assert any("grow to 1.0 GiB for model.embed_tokens.weight" in f.message for f in checked)


def test_problems_that_up_would_refuse_are_errors_with_their_hints() -> None:
    [error] = [f for f in findings(problems=(Problem("port 1 is taken", "stop it"),)) if f.fix]
    assert (error.severity.value, error.message, error.fix) == (
        "error",
        "port 1 is taken",
        "stop it",
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"router": {"request_timeout_s": 200}}, ["advice", "router-patience"]),
        ({"router": {"request_timeout_s": 310}, "control_timeout_s": 100}, ["router-patience"]),
        ({"router": {"enabled": False}}, []),
        ({"router": {"host": "0.0.0.0"}}, ["advice"]),
        ({"host": "0.0.0.0", "weight_transfer": {"transport": "nccl"}}, ["advice"]),
        ({"host": "0.0.0.0"}, ["advice", "public-pickle"]),
        ({"ports": [20_001]}, ["advice"]),
    ],
)
def test_settings_that_are_not_meant_are_found(config: dict[str, Any], expected: list[str]) -> None:
    assert [check for _, check in wrong(findings(**config))] == expected


def test_servers_that_unpickle_on_a_public_address_are_an_error() -> None:
    assert ("error", "public-pickle") in wrong(findings(host="0.0.0.0"))


def test_memory_for_a_push_is_counted_with_a_chunk_per_cpu_worker() -> None:
    on_gpus = MachineFacts(gpus=FACTS.gpus, memory_available=2 * GIB)
    assert wrong(findings(on_gpus)) == []  # two chunks of the largest tensor's size
    assert ("error", "staging-memory") in wrong(findings(on_gpus, device="cpu"))  # four
    disk = {"weight_transfer": {"transport": "disk"}}
    assert ("error", "staging-memory") not in wrong(findings(on_gpus, device="cpu", **disk))


def test_cpu_servers_that_do_not_fit_into_memory_are_found_before_they_start() -> None:
    facts = MachineFacts(memory_available=30 * GIB)
    assert wrong(findings(facts, device="cpu")) == [("warning", "server-memory")]
    assert wrong(findings(facts, device="cpu", running=True)) == []
    assert wrong(findings(facts, device="cpu", model=TINY)) == []
    for large_cache in (
        {"env": {"VLLM_CPU_KVCACHE_SPACE": "40"}},
        {"args": {"kv-cache-memory-bytes": 40 * GIB}},
    ):
        assert wrong(findings(facts, device="cpu", model=TINY, **large_cache)) != []


def test_weights_that_do_not_fit_on_a_gpu_are_an_error() -> None:
    large = ModelFacts(100 * GIB, "x", 1)
    assert ("error", "gpu-memory") in wrong(findings(model=large))
    split = {"replicas": 1, "tensor_parallel_size": 2}
    assert wrong(findings(model=large, **split)) == []
    little = {"args": {"gpu-memory-utilization": 0.3}, **split}
    assert ("error", "gpu-memory") in wrong(findings(model=large, **little))


@pytest.mark.parametrize(
    ("engine", "share"), [("vllm", "gpu-memory-utilization"), ("sglang", "mem-fraction-static")]
)
@pytest.mark.parametrize("value", ["most", "nan", "inf", "1e999"])
def test_a_share_or_a_cache_that_is_no_number_is_left_to_the_server(
    engine: str, share: str, value: str
) -> None:
    given = {"engine": engine, "args": {share: value}, "env": {"VLLM_CPU_KVCACHE_SPACE": value}}
    assert ("error", "gpu-memory") in wrong(findings(model=ModelFacts(100 * GIB, "x", 1), **given))
    assert wrong(findings(model=TINY, device="cpu", **given)) == []


def test_gpus_that_somebody_else_uses_are_found_unless_it_is_this_fleet() -> None:
    busy = MachineFacts(gpus=(GpuFacts(0, "H100", 80 * GIB, 60 * GIB),), memory_available=64 * GIB)
    checked = findings(busy)
    assert wrong(checked) == [("warning", "gpus-in-use")]
    assert any("GPU 0 (f-0) has 60.0 GiB of 80.0 GiB in use" in f.message for f in checked)
    assert wrong(findings(busy, running=True)) == []
    fixes = [finding.fix for finding in findings(busy, sleep_group="pair")]
    assert any("`skyctl up` puts the fleet of sleep_group pair that" in fix for fix in fixes)


def test_a_model_that_is_not_on_this_disk_is_not_judged() -> None:
    assert wrong(findings(MachineFacts(memory_available=1), model=None)) == []

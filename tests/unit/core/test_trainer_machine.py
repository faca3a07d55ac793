"""A trainer on another machine: its GPUs, and what the machine is asked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from skyctl.core import check_machines as checking
from skyctl.core.plan import FleetPlan
from skyctl.core.tinker import MODULES, TinkerSettings
from skyctl.launch.base import Node
from tests.unit.core.machines import places, plan


def planned(device: str, shared: str = "/shared", **gpus: int) -> FleetPlan:
    alone = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "nodes_per_replica": 1}
    tinker = {"machine": "me@b", "device": device, "storage": "/shared/runs"}
    return plan(
        gpus or {"a": 1, "b": 2},
        lora={"max_rank": 32},
        shared_dir=shared,
        tinker=tinker,
        replicas=2,
        **alone,
    )


def test_servers_on_its_machine_leave_it_its_gpu() -> None:
    found = planned("cuda:0")
    assert [places(server) for server in found.servers] == [[("a", (0,))], [("b", (1,))]]
    assert found.tinker is not None
    settings = TinkerSettings.of_argument(found.tinker.argv[-1])
    assert settings.node == found.servers[1].node


def test_servers_of_a_trainer_that_takes_a_whole_machine_are_on_the_gpus_of_the_others() -> None:
    found = planned("cuda:0", a=2, b=1)
    assert [places(server) for server in found.servers] == [[("a", (0,))], [("a", (1,))]]


def test_its_machine_is_asked_for_the_trainers_packages_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: dict[str, set[str]] = {}

    def answers(nodes: Sequence[Node], questions: Sequence[dict[str, Any]]) -> list[Any]:
        for node, question in zip(nodes, questions, strict=True):
            needs[node.target] = {*question["modules"]} & {*MODULES}
        gpus = [{"index": 0}, {"index": 1}]
        nothing: dict[str, Any] = {"missing": [], "absent": [], "taken": {}, "versions": {}}
        return [{**nothing, "gpus": gpus} for _ in nodes]

    monkeypatch.setattr(checking, "answers", answers)
    problems = [m for m, _ in checking.check_machines(planned("cuda:4", str(tmp_path)), ())]
    assert "me@b has no GPU 4" in problems and "me@a has no GPU 4" not in problems
    assert needs["me@b"] == {*MODULES} and needs["me@a"] != {*MODULES}

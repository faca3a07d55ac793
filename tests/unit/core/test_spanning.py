"""A replica that runs on several machines: what is planned for each of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from skyctl.core import check_machines as checking
from skyctl.core.check import check_plan
from skyctl.core.planning import living, ports_of, servers_of
from skyctl.errors import UsageError
from skyctl.launch.base import Node
from skyctl.store.credentials import AT_SPAWN
from skyctl.supervisor.wire import spec_hash
from tests.unit.core.machines import places, plan, value_of


def test_each_machine_has_its_share_of_the_gpus() -> None:
    planned = plan({"a": 4, "b": 2, "c": 2, "d": 2}, replicas=2)
    assert [places(server) for server in planned.servers] == [
        [("a", (0, 1)), ("b", (0, 1))],
        [("c", (0, 1)), ("d", (0, 1))],
    ]
    assert [server.world_size for server in planned.servers] == [4, 4]


def test_machines_without_room_are_passed_over() -> None:
    planned = plan({"a": 1, "b": 2, "c": 4}, replicas=1)
    assert places(planned.servers[0]) == [("b", (0, 1)), ("c", (0, 1))]
    groups = [{"name": "one", "nodes_per_replica": 1, "pipeline_parallel_size": 1}, {"count": 1}]
    planned = plan({"a": 4, "b": 2}, replicas=groups)
    assert [places(server) for server in planned.servers] == [
        [("a", (0, 1))],
        [("a", (2, 3)), ("b", (0, 1))],
    ]


def test_the_parts_differ_in_what_they_must() -> None:
    (server,) = plan({"a": 2, "b": 2}, replicas=1).servers
    (follower,) = server.followers
    assert server.host == value_of(server.argv, "--master-addr") == "10.0.0.97"
    for argv, rank in ((server.argv, "0"), (follower.argv, "1")):
        assert value_of(argv, "--nnodes") == "2"
        assert value_of(argv, "--node-rank") == rank
        assert value_of(argv, "--master-port") == str(server.master_port)
        assert value_of(argv, "--pipeline-parallel-size") == "2"
    assert value_of(follower.argv, "-m") == "skyctl.engines.vllm.inside.headless"
    for flag in ("--host", "--port", "--middleware"):
        assert flag in server.argv and flag not in follower.argv
    assert (server.env["VLLM_HOST_IP"], follower.env["VLLM_HOST_IP"]) == ("10.0.0.97", "10.0.0.98")
    assert server.env["CUDA_VISIBLE_DEVICES"] == follower.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert server.env["GLOO_SOCKET_IFNAME"] == follower.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert AT_SPAWN in server.env.values() and AT_SPAWN not in follower.env.values()
    own = plan({"a": 2, "b": 2}, replicas=1, env={"GLOO_SOCKET_IFNAME": "ib0"}).servers[0]
    assert own.followers[0].env["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_server_on_one_machine_is_planned_as_before() -> None:
    alone = {"nodes_per_replica": 1, "pipeline_parallel_size": 1}
    (server,) = plan({"a": 2, "b": 2}, replicas=1, **alone).servers
    assert (server.followers, server.master_port, server.machines) == ((), 0, "me@a")
    assert "--nnodes" not in server.argv and "VLLM_HOST_IP" not in server.env


def test_what_runs_keeps_its_master_port_and_any_part_that_moves_is_a_change() -> None:
    first = plan({"a": 2, "b": 2}, replicas=1)
    ports = ports_of(first)
    assert servers_of(ports) == {"f-0"} and ports["f-0-master"] == first.servers[0].master_port
    again = plan({"a": 2, "b": 2}, ports, replicas=1)
    assert spec_hash(again.servers[0]) == spec_hash(first.servers[0])
    moved = plan({"a": 2, "c": 2}, ports, replicas=1)
    assert moved.servers[0].argv == first.servers[0].argv
    assert spec_hash(moved.servers[0]) != spec_hash(first.servers[0])
    assert living(ports, []) == {}


def test_all_machines_and_commands_are_named() -> None:
    told = plan({"a": 2, "b": 2}, replicas=1).to_json()["servers"][0]
    assert told["node"] == "me@a, me@b"
    assert [one["node"] for one in told["followers"]] == ["me@b"]


def test_too_few_gpus_are_told_of_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "answers", lambda nodes, _: [UsageError("not asked")] * 2)
    planned = replace(plan({"a": 2, "b": 1}, replicas=1), python=sys.executable)
    problems = [one.message for one in check_plan(planned)]
    assert "f-0 on me@b: not enough GPUs: it needs 2, and 1 of them can be had" in problems


def test_every_machine_is_asked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, dict[str, Any]] = {}

    def answers(nodes: list[Node], questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        asked.update({node.target: told for node, told in zip(nodes, questions, strict=True)})
        facts = {"versions": {}, "missing": [], "absent": [], "taken": {}, "gpus": []}
        return [facts for _ in nodes]

    monkeypatch.setattr(checking, "answers", answers)
    planned = plan({"a": 2, "b": 2}, replicas=1)
    found = [message for message, _ in checking.check_machines(planned, ())]
    assert found == [f"me@{name} has no GPU {index}" for name in "ab" for index in (0, 1)]
    server = planned.servers[0]
    assert asked["me@a"]["listening"] == [server.port, server.master_port]
    assert asked["me@b"]["listening"] == []


def test_another_executor_is_refused() -> None:
    with pytest.raises(UsageError, match="does not go with `nodes_per_replica`"):
        plan({"a": 2, "b": 2}, replicas=1, args={"distributed-executor-backend": "ray"})


def test_an_engine_that_cannot_is_refused() -> None:
    with pytest.raises(UsageError, match="SGLang servers have no parts on several machines"):
        plan({"a": 2, "b": 2}, replicas=1, engine="sglang", router={"enabled": False})

"""Where the sender of an NCCL push gets its GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyctl.errors import PreflightError
from skyctl.http.target import ServerTarget
from skyctl.launch.base import Gpu, Node, RayCluster
from skyctl.push import machine_facts
from skyctl.push.machine_facts import free_gpu
from skyctl.push.request import PushServer

A, B = (Node(name, f"10.0.0.{number}", "python", (), 60.0) for number, name in enumerate("ab"))


def on(node: Node | None, *gpus: int) -> PushServer:
    return PushServer(ServerTarget("demo-0", "http://10.0.0.7:8000"), gpus=gpus, node=node)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The machines that were asked. Each has GPUs 0 and 1, and this one has GPU 0."""
    found: list[str] = []

    async def ask(node: Node, *_: Any) -> dict[str, Any]:
        found.append(node.target)
        return {"gpus": [{"index": 0}, {"index": 1}]}

    monkeypatch.setattr(machine_facts, "_gpus_by_node", {})
    monkeypatch.setattr("skyctl.launch.remote.session.ask", ask)
    monkeypatch.setattr(machine_facts, "_gpus_of_this_machine", lambda: (0,))
    return found


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([on(A, 0)], (A, 1)),
        ([on(A, 0, 1), on(B, 1)], (B, 0)),
        ([on(A, 0, 1)], (None, 0)),
    ],
    ids=["beside the servers", "beside the others", "on this machine"],
)
async def test_a_gpu_that_no_server_uses(
    asked: list[str], servers: list[PushServer], expected: tuple[Node | None, int]
) -> None:
    assert await free_gpu(servers) == expected
    once = list(asked)
    assert await free_gpu(servers) == expected
    assert asked == once


async def test_ray_chooses_a_gpu_of_its_cluster(asked: list[str]) -> None:
    by_ray = replace(A, ray=RayCluster("10.0.0.1:6379", resource="GPU"))
    assert await free_gpu([on(by_ray, 0, 1)]) == (by_ray.with_a_gpu, 0)
    assert asked == []


async def test_without_a_free_gpu_a_push_is_refused(asked: list[str]) -> None:
    for servers in ([on(A, 0, 1), on(None, 0)], [on(A, 1), on(A, 0), on(None, 0)]):
        with pytest.raises(PreflightError, match="all are taken"):
            await free_gpu(servers)
    with pytest.raises(PreflightError, match="all are taken"):
        await free_gpu([on(None, 0)])


async def test_a_driver_that_did_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [[], [Gpu(3, "GPU-3", "H200", 1)]]
    monkeypatch.setattr(machine_facts, "_gpus_by_node", {})
    monkeypatch.setattr(machine_facts, "discover_gpus", lambda: answers.pop(0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(PreflightError, match="nvidia-smi names none"):
        await free_gpu([on(None, 0)])
    assert await free_gpu([on(None, 0)]) == await free_gpu([on(None, 0)]) == (None, 3)

"""Shares of the traffic by the real commands, and load balancers in front."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.stub_fleet import ROUTER, StubFleet, free_ports, routed_fleet
from tests.pids import kill
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

needs_router = pytest.mark.skipif(not ROUTER.exists(), reason="vllm-router is not installed")


@pytest.fixture
def killed_at(tmp_path: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path)
    extra = "auth: none\nrouter: {policy: round_robin}\nweight_transfer: {transport: shm}"
    fleet.write(replicas=2, extra=extra)
    write_checkpoint(tmp_path / "model")
    write_checkpoint(tmp_path / "one", tiny_tensors(50))
    write_checkpoint(tmp_path / "two", tiny_tensors(90))
    yield fleet
    fleet.environ = {}
    fleet.run("down")


START = ("canary", "start", "two", "--share", "20%", "--weight-version", "step-2")


@pytest.mark.parametrize(
    ("point", "serves"),
    [
        ("canary.recorded", False),
        ("push.drain.done:1", False),
        ("push.update.sent:1", False),
        ("push.published:1", False),
        ("push.part.done:1", False),
        ("push.ended:2", True),
    ],
)
def test_a_supervisor_that_dies_leaves_a_canary_or_none(
    killed_at: StubFleet, point: str, serves: bool
) -> None:
    fleet = killed_at
    fleet.environ = {"SKYCTL_KILL_AT": point}
    fleet.run("up", "--timeout", "30")
    fleet.environ = {}
    if point == "push.ended:2":
        fleet.run("sync-weights", "one", "--weight-version", "step-1")
    fleet.run(*START, expect=None)
    fleet.run("wait", "--for", "ready", "--timeout", "30")
    status = fleet.json("status")["data"]
    assert status["health"] == "healthy"
    held = {row["name"]: row["weight_version"] for row in status["replicas"]}
    if serves:
        assert held == {"stubs-0": "step-2", "stubs-1": "step-1"}
        assert status["canary"]["stage"] == "serving"
        fleet.run("canary", "rollback")
        held = {name: row["weight_version"] for name, row in fleet.replicas().items()}
        assert set(held.values()) == {"step-1"}
    else:
        assert set(held.values()) == {None}
        assert status["canary"] is None
    fleet.run("sync-weights", "one")  # nothing is in its way


def test_load_balancers_see_whether_to_send_requests(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    fleet = StubFleet(tmp_path)
    listens = f"supervisor: {{listen: '127.0.0.1:{port}', tls: false}}"
    fleet.write(replicas=1, extra=f"auth: none\n{listens}")

    def ready() -> tuple[int, Any]:
        answer = httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False)
        return answer.status_code, answer.json()["reason"]

    try:
        fleet.run("up", "--timeout", "30")
        assert ready() == (200, "")
        shown = fleet.run("drain")
        assert "not ready: drained" in shown.stdout
        assert ready() == (503, "drained")
        fleet.run("generate", "hi", "--max-tokens", "2")  # what arrives is answered
        status = fleet.json("status")["data"]
        assert (status["health"], status["reasons"][0]["hint"]) == ("healthy", "skyctl drain --off")
        kill(status["supervisor_pid"])
        fleet.run("wait", "--for", "ready", "--timeout", "30")  # another one takes over
        assert ready() == (503, "drained")
        fleet.run("drain", "--off")
        assert ready() == (200, "")
        fleet.run("sleep")
        assert ready() == (503, "no server takes requests")
    finally:
        fleet.run("down")


@pytest.mark.real
@needs_router
@pytest.mark.parametrize(("replicas", "share", "requests"), [(3, 10, 2000), (2, 33, 600)])
def test_the_real_router_gives_a_canary_its_share_of_many_requests(
    tmp_path: Path, replicas: int, share: int, requests: int
) -> None:
    """The router takes turns: two per cent of the canary's share are four requests, or nearly."""
    fleet = routed_fleet(tmp_path, "auth: none\nrouter: {policy: round_robin}", replicas)
    write_checkpoint(tmp_path / "model")
    for name, scale in (("one", 50), ("two", 90)):
        write_checkpoint(tmp_path / name, tiny_tensors(scale))
    try:
        fleet.run("up", "--timeout", "60")
        fleet.run("sync-weights", "one", "--weight-version", "step-1")
        fleet.run("canary", "start", "two", "--share", f"{share}%", "--weight-version", "step-2")
        urls = fleet.json("urls")["data"]
        named = asyncio.run(versions_of_answers(urls["router"], urls["model"], requests))
        assert set(named) == {"step-1", "step-2"}  # each answer names one
        assert abs(named["step-2"] / requests - share / 100) < 0.02 * share / 100
        canary, others = fleet.json("canary", "status")["data"]["versions"]
        assert (canary["version"], canary["requests"]) == ("step-2", named["step-2"])
        assert (others["version"], others["requests"]) == ("step-1", named["step-1"])
        assert fleet.run("doctor").returncode == 0
        fleet.run("canary", "promote")
        named = asyncio.run(versions_of_answers(urls["router"], urls["model"], 50))
        assert set(named) == {"step-2"}
    finally:
        fleet.run("down")


async def versions_of_answers(url: str, model: str, requests: int) -> Counter[str]:
    """How many answers named each version, by 16 clients."""
    named: Counter[str] = Counter()
    body = {"model": model, "prompt": "ab", "max_tokens": 1}
    left = iter(range(requests))

    async def client(http: httpx.AsyncClient) -> None:
        for _ in left:
            answer = await http.post(f"{url}/v1/completions", json=body)
            begin, end = (answer.headers[f"x-weight-version-{at}"] for at in ("begin", "end"))
            assert (answer.status_code, begin) == (200, end)
            named[begin] += 1

    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(16)))
    return named

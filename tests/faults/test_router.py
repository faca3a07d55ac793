"""RouterClient and generation against the real vllm-router in front of stub servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyctl.engines.vllm.router import RouterClient
from skyctl.errors import DeadlineExceeded, ServerError, ServerUnreachable
from skyctl.generate.prompts import GenerationRequest
from skyctl.generate.requests import Endpoint, GenerationClient
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from tests.faults.stub_fleet import (
    ROUTER,
    free_ports,
    routed_fleet,
)
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.running import running

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not ROUTER.exists(), reason="vllm-router is not installed"),
]


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    async with ControlClient() as control:
        yield control


@asynccontextmanager
async def routing(targets: list[ServerTarget], *arguments: str) -> AsyncIterator[str]:
    """The real router over `targets`, ready; yields its URL."""
    port, metrics_port = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        str(ROUTER),
        *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *arguments,
        *("--worker-urls", *(target.url for target in targets)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with ControlClient() as control, asyncio.timeout(30):
            while not await is_up(control, url):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)
        yield url
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def is_up(client: ControlClient, url: str) -> bool:
    try:
        await client.text(ServerTarget("router", url), "/readiness", timeout_s=10.0)
    except ServerError:
        return False
    return True


async def test_workers_leave_and_join_and_the_list_is_the_proof(client: ControlClient) -> None:
    async with running([StubServer(), StubServer()]) as targets, routing(targets) as url:
        router = RouterClient(client, url + "/")
        first, second = (target.url for target in targets)
        assert sorted(await router.workers()) == sorted([first, second])
        await router.remove_worker(first)
        assert await router.workers() == [second]
        await router.remove_worker(first)
        await router.remove_worker("http://127.0.0.1:9")
        await router.add_worker(first + "/")
        await router.add_worker(first)
        assert sorted(await router.workers()) == sorted([first, second])


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_not_asked_for_servers(tmp_path: Path, variable: str) -> None:
    fleet = routed_fleet(tmp_path, "", replicas=1)
    fleet.environ = {variable: "http://127.0.0.1:9"}
    try:
        fleet.run("up", "--timeout", "30")
        fleet.run("generate", "hi", "--max-tokens", "2")
        doctor = fleet.run("doctor")
        assert f"{variable} is set, and NO_PROXY does not have 127.0.0.1" in doctor.stdout
    finally:
        fleet.run("down")


def test_power_of_two_serves_with_one_server_and_chooses_among_those_that_join(
    tmp_path: Path,
) -> None:
    fleet = routed_fleet(tmp_path, "router: {policy: power_of_two}", replicas=1)
    try:
        fleet.run("up", "--timeout", "30")
        fleet.run("generate", "hi", "--max-tokens", "2")
        router = fleet.json("status")["data"]["router"]
        assert (router["state"], router["workers"], router["restarts"]) == ("ready", 1, 0)
        fleet.run("scale", "2")
        after = fleet.json("status")["data"]["router"]
        assert (after["workers"], after["pid"]) == (2, router["pid"])
    finally:
        fleet.run("down")


async def test_freezes_with_many_requests_in_flight_refuse_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the router see a failure that would open its circuit breaker for a minute."""
    from benchmarks import thaw

    for name in ("PAUSE_S", "WATCHED_S", "READ_INTERVAL_S"):  # how long servers idle, nobody asks
        monkeypatch.setattr(thaw, name, 1.0)
    options = SimpleNamespace(in_flight=100, rounds=1, jobs=1)
    cases = [
        ("", "no freeze"),
        *((mode, how) for mode in ("abort", "wait") for how in ("push", "pause")),
    ]
    with thaw.stubs(tmp_path) as served:
        results = [await thaw.measured(*served, case, options) for case in cases]
    router = results[-1]["router"]
    assert (router["errors"], router["retries"]) == (0, 0)
    assert [result["refused"] for result in results] == [0] * 5
    aborted = next(result for result in results if result["case"] == "pause --mode abort")
    assert aborted["answers"]["200, aborted"]
    assert router["requests"] > 500


async def test_adding_a_dead_worker_ends_at_our_deadline(client: ControlClient) -> None:
    async with running([StubServer()]) as targets, routing(targets) as url:
        (dead,) = free_ports(1)
        router = RouterClient(client, url, timeout_s=1.0)
        with pytest.raises(DeadlineExceeded):
            await router.add_worker(f"http://127.0.0.1:{dead}")
        assert await router.workers() == [targets[0].url]


async def test_a_router_that_is_gone_is_unreachable(client: ControlClient) -> None:
    (port,) = free_ports(1)
    with pytest.raises(ServerUnreachable, match="router: GET"):
        await RouterClient(client, f"http://127.0.0.1:{port}").workers()


async def test_requests_cut_by_a_dying_worker_end_with_the_undisturbed_tokens() -> None:
    cut = Fault("cut", pieces=10, calls=(1, 3))
    stubs = [StubServer(faults={"/v1/completions": cut}), StubServer()]
    requests = [
        GenerationRequest(f"r{n}", {"max_tokens": 40, "temperature": 0.0}, prompt=f"prompt {n}")
        for n in range(8)
    ]
    async with running(stubs) as targets, routing(targets) as url:
        async with GenerationClient(Endpoint(targets[1].url, "stub")) as straight:
            undisturbed = [await straight.generate_one(request) for request in requests]
        async with GenerationClient(Endpoint(url, "stub")) as client:
            results = [r async for r in client.generate_many(requests, concurrency=4)]
    assert [r.token_ids for r in results] == [r.token_ids for r in undisturbed]
    assert [r.text for r in results] == [r.text for r in undisturbed]
    assert all(len(r.token_ids) == 40 and not r.error for r in results)
    assert sum(r.retries for r in results) >= 2


async def test_the_session_id_reaches_the_worker_and_keeps_it() -> None:
    stubs = [StubServer(), StubServer()]
    async with running(stubs) as targets:
        sticky = routing(targets, "--policy", "consistent_hash")
        async with sticky as url, GenerationClient(Endpoint(url, "stub")) as client:
            for n in range(6):
                body = {"max_tokens": 2}
                request = GenerationRequest(f"r{n}", body, f"prompt {n}", session_id="user-7")
                assert not (await client.generate_one(request)).error
    calls = [stub.asgi.calls["/v1/completions"] for stub in stubs]
    assert sorted(calls) == [0, 6]


async def test_control_calls_are_never_sent_through_the_router() -> None:
    """What the design forbids, and why: the router drops the query of a path it does not know."""
    stub = StubServer()
    async with running([stub]) as targets, routing(targets) as url, ControlClient() as client:
        target = ServerTarget("router", url)
        await client.call(target, "POST", "/pause", params={"mode": "keep"})
    assert stub.engine.log == ["pause abort"]

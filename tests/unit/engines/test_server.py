"""VLLMServer over versions that have a route and versions that do not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from skyctl.engines.base import Refusal
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ServerError, ServerUnreachable
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport
from tests.stub.state import StubEngine
from tests.stub.through_httpx import ThroughHttpx


def connect(stub: StubServer) -> tuple[ControlClient, VLLMServer]:
    transport = StubTransport([stub])
    client = ControlClient(transport=transport)
    return client, VLLMServer(client, transport.targets[0])


async def test_a_version_without_weight_routes_is_none_and_no_error() -> None:
    client, server = connect(StubServer(StubEngine(version="0.26.0")))
    async with client:
        assert await server.version() == "0.26.0"
        assert await server.weight_version() is None
        assert await server.set_weight_version("step-1") is False
        assert await server.weight_checksums() is None


async def test_an_error_of_a_weight_route_is_not_taken_for_its_absence() -> None:
    fault = Fault("status", status=500)
    client, server = connect(
        StubServer(faults=dict.fromkeys(["/weight_info", "/update_weight_version"], fault))
    )
    async with client:
        with pytest.raises(ServerError, match="injected fault"):
            await server.weight_version()
        with pytest.raises(ServerError, match="injected fault"):
            await server.set_weight_version("step-1")


async def test_a_whole_push_reaches_the_server_stage_by_stage() -> None:
    stub = StubServer()
    before = stub.engine.digest
    client, server = connect(stub)
    async with client:
        await server.init_weight_transfer({"packed": True})
        await server.start_weight_update()
        await server.update_weights({"names": ["a"]})
        await server.update_weights({"names": ["b"]})
        await server.finish_weight_update("step-3")
        assert await server.weight_version() == "step-3"
        answers = await server.collective_rpc("skyctl_weight_digest")
    assert stub.engine.log == ["init", "start", "update", "update", "finish"]
    assert stub.engine.update_infos == [{"names": ["a"]}, {"names": ["b"]}]
    assert [answer["digest"] for answer in answers] == [stub.engine.digest] != [before]


@pytest.mark.usefixtures("vllm")
async def test_what_workers_say_is_what_vllms_route_was_given() -> None:
    from fastapi import FastAPI
    from vllm.entrypoints.serve.dev.rpc.api_router import attach_router

    said: list[Any] = [False, True, None, ["a"], {"b": False}, "", "why not"]

    async def rpc(**_: Any) -> list[Any]:
        return said

    app = FastAPI()
    attach_router(app)
    app.state.engine_client = SimpleNamespace(collective_rpc=rpc)
    transport = ThroughHttpx(httpx.ASGITransport(app))
    async with ControlClient(transport=transport) as client:
        server = VLLMServer(client, ServerTarget("demo-0", "http://demo-0"))
        assert await server.collective_rpc("skyctl_layout_arrived") == said


async def test_a_server_is_asked_with_the_parameters_vllm_knows() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.raw_path.decode()}")
        return httpx.Response(200, json={"world_size": 2, "status": "awake"})

    async with ControlClient(transport=ThroughHttpx(httpx.MockTransport(answer))) as client:
        server = VLLMServer(client, ServerTarget("demo-0", "http://demo-0"))
        await server.pause("keep", clear_cache=False)
        await server.sleep(2, "wait")
        assert await server.wake() is True
        assert await server.wake(["weights", "kv_cache"]) is True
        assert await server.ranks() == (2, 2)
    assert seen == [
        "POST /pause?mode=keep&clear_cache=false",
        "POST /sleep?level=2&mode=wait",
        "POST /wake_up",
        "POST /wake_up?tags=weights&tags=kv_cache",
        "GET /get_world_size?include_dp=true",
        "GET /get_world_size?include_dp=false",
    ]


@pytest.mark.parametrize("asleep", [True, False])
async def test_an_older_server_does_not_say_what_is_awake_and_is_asked(asleep: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/wake_up":
            return httpx.Response(200)
        return httpx.Response(200, json={"is_sleeping": asleep})

    async with ControlClient(transport=ThroughHttpx(httpx.MockTransport(answer))) as client:
        server = VLLMServer(client, ServerTarget("demo-0", "http://demo-0"))
        assert await server.wake(["kv_cache"]) is not asleep
        assert await server.wake() is True


@pytest.mark.parametrize("body", [[], {"something": "else"}])
async def test_an_answer_of_another_shape_is_a_server_error(body: object) -> None:
    transport = ThroughHttpx(httpx.MockTransport(lambda _: httpx.Response(200, json=body)))
    async with ControlClient(transport=transport) as client:
        server = VLLMServer(client, ServerTarget("demo-0", "http://demo-0"))
        with pytest.raises(ServerError, match=r"demo-0: http://demo-0/is_paused"):
            await server.is_paused()


async def test_only_the_metrics_that_are_read_are_asked_for() -> None:
    stub = StubServer()
    stub.engine.generation_tokens = 7
    client, server = connect(stub)
    async with client:
        metrics = await server.metrics()
    assert (metrics.generation_tokens, metrics.sleep_level) == (7, 0)
    assert stub.asgi.calls == {"/metrics/": 1}


@pytest.mark.parametrize("status", [200, 307, 404])
async def test_a_server_that_cannot_select_metrics_is_asked_for_the_whole_page(status: int) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics/":
            return httpx.Response(status)
        return httpx.Response(200, text='vllm:num_requests_running{engine="0"} 3.0\n')

    async with ControlClient(transport=ThroughHttpx(httpx.MockTransport(answer))) as client:
        server = VLLMServer(client, ServerTarget("s", "http://s"))
        assert (await server.metrics()).running == 3


async def test_a_server_that_does_not_answer_is_not_asked_twice_for_metrics() -> None:
    asked = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        raise httpx.ConnectError("refused")

    async with ControlClient(transport=ThroughHttpx(httpx.MockTransport(refuse))) as client:
        with pytest.raises(ServerUnreachable):
            await VLLMServer(client, ServerTarget("s", "http://s")).metrics()
    assert asked == ["/metrics/"]


@pytest.mark.parametrize("requests", [0, 1])
async def test_all_that_was_computed_with_other_weights_is_dropped(requests: int) -> None:
    stub = StubServer(StubEngine(requests=requests))
    client, server = connect(stub)
    async with client:
        await server.reset_caches()
    assert stub.engine.cached == set()


async def test_kv_blocks_that_a_connector_keeps_are_an_error() -> None:
    client, server = connect(StubServer(StubEngine(connector_fails=True)))
    async with client:
        with pytest.raises(ServerError, match="KV blocks of other weights are still cached"):
            await server.reset_caches()


async def test_a_version_without_encoder_caches_has_none_to_drop() -> None:
    stub = StubServer(faults={"/reset_encoder_cache": Fault("status", status=404)})
    client, server = connect(stub)
    async with client:
        await server.reset_caches()


async def test_an_encoder_cache_that_is_not_dropped_is_an_error() -> None:
    stub = StubServer(faults={"/reset_encoder_cache": Fault("status")})
    client, server = connect(stub)
    async with client:
        with pytest.raises(ServerError, match="injected fault"):
            await server.reset_caches()


def data_parallel(*ranks: int) -> httpx.MockTransport:
    """A server of two data-parallel ranks with one worker each, of which these leave answers."""
    nonces: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/get_world_size":
            everywhere = request.url.params["include_dp"] == "true"
            return httpx.Response(200, json={"world_size": 2 if everywhere else 1})
        body = json.loads(request.content)
        nonces.append(body["kwargs"]["nonce"])
        if body["method"] == "skyctl_leave_answer":
            assert body["kwargs"]["method"] == "skyctl_weight_digest"
            assert body["kwargs"]["kwargs"] == {"rows": []}
            return httpx.Response(200, json={"results": [None]})
        assert len(set(nonces)) == 1
        left = [{"rank": [rank, 0], "answer": {"digest": f"of {rank}"}} for rank in ranks]
        return httpx.Response(200, json={"results": [left]})

    return httpx.MockTransport(answer)


async def test_workers_of_every_data_parallel_rank_answer() -> None:
    async with ControlClient(transport=ThroughHttpx(data_parallel(1, 0))) as client:
        server = VLLMServer(client, ServerTarget("demo-0", "http://demo-0"))
        answers = await server.ask_workers("skyctl_weight_digest", {"rows": []})
    assert [answer["digest"] for answer in answers] == ["of 0", "of 1"]


@pytest.mark.parametrize(("ranks", "missing"), [((0,), 1), ((1,), 0), ((), 0)])
async def test_a_data_parallel_rank_without_an_answer_is_named(
    ranks: tuple[int, ...], missing: int
) -> None:
    async with ControlClient(transport=ThroughHttpx(data_parallel(*ranks))) as client:
        server = VLLMServer(client, ServerTarget("demo-0", "http://demo-0"))
        with pytest.raises(ServerError, match=f"demo-0: could not look at rank {missing}"):
            await server.ask_workers("skyctl_weight_digest", {"rows": []})


async def test_a_worker_of_a_single_rank_without_an_answer_is_an_error() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"world_size": 2, "results": [{"digest": "aa"}]})

    async with ControlClient(transport=ThroughHttpx(httpx.MockTransport(answer))) as client:
        server = VLLMServer(client, ServerTarget("demo-0", "http://demo-0"))
        with pytest.raises(
            ServerError, match="could not look at rank 0: no answer of its worker 1"
        ):
            await server.ask_workers("skyctl_weight_digest")


async def test_a_server_without_control_routes_says_how_to_start_it() -> None:
    answer = httpx.MockTransport(lambda _: httpx.Response(404, json={"detail": "Not Found"}))
    async with ControlClient(transport=ThroughHttpx(answer)) as client:
        with pytest.raises(ServerError) as caught:
            await VLLMServer(client, ServerTarget("demo-0", "http://far")).is_paused()
    assert "VLLM_SERVER_DEV_MODE" in caught.value.hint
    assert "it has no such route; vLLM needs VLLM_SERVER_DEV_MODE=1" in caught.value.message
    assert caught.value.status == 404


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("Call to collective_rpc method failed: Method 'm' is not implemented", Refusal.NO_METHOD),
        ("Worker failed with error ''CPUWorker' object has no attribute 'm''", Refusal.NO_METHOD),
        ("Method 'other' is not implemented", ""),
        ("finish_weight_update called without a matching start", Refusal.NO_SESSION),
        ("weight transfer is not configured", Refusal.NO_TRANSFER),
        ("Model reloading with load_format dummy", Refusal.CANNOT_RELOAD),
        ("CUDA out of memory", ""),
    ],
)
async def test_what_an_error_means_is_said_by_its_refusal(text: str, refusal: str) -> None:
    answer = httpx.MockTransport(lambda _: httpx.Response(500, json={"error": {"message": text}}))
    async with ControlClient(transport=ThroughHttpx(answer)) as client:
        with pytest.raises(ServerError) as caught:
            await VLLMServer(client, ServerTarget("demo-0", "http://far")).collective_rpc("m")
    assert caught.value.refusal == refusal

"""VLLMServer over versions that have a route and versions that do not."""

from __future__ import annotations

import httpx
import pytest

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
        assert await server.world_size(include_dp=False) == 2
    assert seen == [
        "POST /pause?mode=keep&clear_cache=false",
        "POST /sleep?level=2&mode=wait",
        "POST /wake_up",
        "POST /wake_up?tags=weights&tags=kv_cache",
        "GET /get_world_size?include_dp=false",
    ]


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

"""SGLang's command line, keys and keeper. The rest: tests/integration/test_engine_contract.py,
tests/faults/test_sglang_states.py and test_sglang_fleet.py."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient, MockTransport, Response

import skyctl.engines.sglang.inside.serve as serve
from skyctl.core import actions
from skyctl.core.requests import Pause, Resume, Sleep
from skyctl.doctor import examine
from skyctl.engines.base import Refusal
from skyctl.engines.guarding import ALONE
from skyctl.engines.inside.guard import Guard, is_data
from skyctl.engines.sglang.engine import SGLANG, dialect_for
from skyctl.engines.sglang.inside import keeper
from skyctl.engines.sglang.inside.serve import WithToken
from skyctl.engines.sglang.server import SGLangServer
from skyctl.errors import ServerError, UsageError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.store.credentials import AT_SPAWN
from tests.faults.attached_fleet import attached_fleet
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport
from tests.stub.sglang import GROUPS, SGLangEngine, SGLangStub, StubGroup, _Request
from tests.stub.state import digest_of_checkpoint
from tests.stub.through_httpx import ThroughHttpx
from tests.tiny import make_tiny_checkpoint
from tests.unit.core.plans import PYTHON, gpus, plan

IPC: dict[str, Any] = {"weight_transfer": {"transport": "ipc"}}
NCCL: dict[str, Any] = {"weight_transfer": {"transport": "nccl"}}


def test_a_gpu_server_gets_exactly_this_command_and_environment() -> None:
    planned = plan(
        engine="sglang",
        machine_gpus=gpus(2),
        tensor_parallel_size=2,
        args={"mem_fraction_static": 0.5, "enable-weights-cpu-backup": False},
    )
    (server,) = planned.servers
    assert server.argv == (
        PYTHON, "-m", "skyctl.engines.sglang.inside.serve",
        "--model", "org/model", "--served-model-name", "org/model",
        "--host", "127.0.0.1", "--port", "20000", "--tp-size", "2",
        "--enable-metrics", "--enable-memory-saver", "--revision", "main",
        "--mem-fraction-static", "0.5",
    )  # fmt: skip
    assert server.env == {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SKYCTL_API_KEY": AT_SPAWN,
        "SKYCTL_CONTROL_TOKEN": AT_SPAWN,
    }
    assert server.backend == "" and planned.router is not None
    assert "vllm_router.launch_router" in planned.router.argv


def test_an_interpreter_without_skyctl_runs_the_file() -> None:
    (server,) = plan(engine="sglang", device="cpu", python="/opt/sgl/bin/python").servers
    assert server.argv[:2] == ("/opt/sgl/bin/python", serve.__file__)
    assert server.env["PYTHONPATH"] == str(ALONE)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "cpu", "weight_transfer": {"transport": "ipc"}}, "on GPUs by ipc or nccl"),
        ({"device": "cpu", **NCCL}, "on GPUs by ipc or nccl"),
        ({**NCCL, "pipeline_parallel_size": 2}, "pipeline stages cannot be told apart"),
        ({**IPC, "args": {"quantization": "fp8"}}, "no tensors for quantized parameters"),
        ({**IPC, "pipeline_parallel_size": 2}, "pipeline stages cannot be told apart"),
        ({"lora": {}, "data_parallel_size": 2}, "one pipeline stage and one data-parallel copy"),
        ({"lora": {}, "pipeline_parallel_size": 2}, "one pipeline stage and one data-parallel"),
        ({"args": {"max-loaded-loras": 2}}, "lora.max_adapters"),
        ({**IPC, "data_parallel_size": 2}, "data-parallel servers take no tensors"),
        ({"args": {"fastapi-root-path": "/below"}}, "asks its servers at the root"),
        ({"args": {"hicache_storage_backend": "file"}}, "outlive the weights"),
        ({"auth": "none", "api_key_env": "THE_KEY"}, "nothing would ask for the key"),
    ],
)
def test_what_skyctl_does_not_do_with_sglang_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        plan(engine="sglang", machine_gpus=gpus(2), environ={"THE_KEY": "k"}, **settings)


@pytest.mark.parametrize("settings", [IPC, NCCL])
def test_servers_take_tensors_on_gpus_where_that_is_asked_for(settings: dict[str, Any]) -> None:
    (server,) = plan(engine="sglang", machine_gpus=gpus(2), **settings).servers
    assert server.backend == settings["weight_transfer"]["transport"]
    assert "skyctl" in SGLANG.modules("cuda", False, server.backend, False)


def test_the_api_key_opens_inference_and_nothing_that_changes_a_server() -> None:
    for path in ("/generate", "/v1/completions", "/model_info", "/metrics"):
        assert is_data(path, serve.ROUTES)
    control = (keeper.PAUSE, keeper.FROM_DISK, keeper.STATE, keeper.LOAD, keeper.UNLOAD)
    for path in (*control, "/flush_cache", "/abort_request"):
        assert not is_data(path, serve.ROUTES)


async def test_one_that_has_just_started_is_closed_to_users_while_the_file_is_there(
    tmp_path: Path,
) -> None:
    stub, token, key = SGLangStub(), "t" * 32, "k" * 32
    held = tmp_path / "held"
    held.touch()
    stub.asgi = Guard(  # type: ignore[assignment] # what every request meets first
        stub.app,
        environ={
            "SKYCTL_CONTROL_TOKEN": token,
            "SKYCTL_API_KEY": key,
            "SKYCTL_HELD_WHILE": str(held),
        },
        routes=serve.ROUTES,
    )
    client = ControlClient(transport=StubTransport([stub]))
    body = {"prompt": "a", "max_tokens": 1}

    async def status(bearer: str) -> int | None:
        target = ServerTarget("s-0", "http://stub-0", bearer, "sglang")
        try:
            await SGLangServer(client, target).complete(body)
        except ServerError as error:
            return error.status
        return 200

    assert (await status(key), await status(token)) == (503, 200)
    held.unlink()
    assert (await status(key), await status("other")) == (200, 401)


async def test_the_keeper_tells_its_state_behind_either_of_sglangs_own_keys() -> None:
    stub = SGLangStub(SGLangEngine(cpu_backup=True), keys=("k", "a"))
    client = ControlClient(transport=StubTransport([stub]))
    target = ServerTarget("s-0", "http://stub-0", "a", "sglang", "k")
    server = SGLangServer(client, target)
    await server.sleep()
    assert await server.is_sleeping() and stub.engine.released
    for other in (None, "a", "x"):
        with pytest.raises(ServerError) as caught:
            await SGLangServer(client, replace(target, inference_key=other)).is_sleeping()
        assert caught.value.status == 401


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
async def test_sessions_of_updates_are_asked_for_behind_either_of_sglangs_own_keys(
    version: str,
) -> None:
    """Before 0.5.21 there is no such route, for which its key check wants the users' key."""
    stub = SGLangStub(SGLangEngine(version=version), keeper=False, keys=("users", "admins"))
    client = ControlClient(transport=StubTransport([stub]))
    target = ServerTarget("s-0", "http://stub-0", "admins", "sglang", "users")
    server = SGLangServer(client, target)
    await server.start_weight_update()
    await server.finish_weight_update()
    for key, refusal in (("users", Refusal.NO_SESSION), ("x", "")):
        with pytest.raises(ServerError) as caught:
            wrong = replace(target, api_key="admins" if refusal else "x", inference_key=key)
            await SGLangServer(client, wrong).finish_weight_update()
        assert caught.value.refusal == refusal


@pytest.mark.parametrize("keeper", [True, False], ids=["ours", "listed"])
async def test_several_that_ask_at_once_are_all_answered(keeper: bool) -> None:
    """The health check asks while a push does."""
    stub = SGLangStub(keeper=keeper)
    client = ControlClient(transport=StubTransport([stub]))
    server = SGLangServer(client, ServerTarget("s-0", "http://stub-0", None, "sglang"))

    async def ask(pause: int) -> None:
        for _ in range(20):
            await (server.started_with() if pause % 2 or not keeper else server.is_sleeping())
            for _ in range(pause):
                await asyncio.sleep(0)

    await asyncio.gather(*map(ask, range(3)))


async def test_listed_servers_with_both_keys_take_the_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (str(make_tiny_checkpoint(tmp_path / n, seed=i)) for i, n in enumerate("ab"))
    monkeypatch.setenv("THE_KEY", "k")
    monkeypatch.setenv("THE_ADMIN_KEY", "a")
    monkeypatch.setattr(SGLangServer, "probe_s", 0.05)
    stubs = [SGLangStub(SGLangEngine(model=a), keeper=False, keys=("k", "a")) for _ in range(2)]
    settings = {"api_key_env": "THE_KEY", "control_token_env": "THE_ADMIN_KEY"}
    async with attached_fleet(tmp_path, monkeypatch, stubs, engine="sglang", **settings) as fleet:
        assert all(one.ok for one in await fleet.control(Pause(mode="keep")))
        assert {row.state for row in (await fleet.status()).replicas} == {"paused"}
        assert all(one.ok for one in await fleet.control(Resume()))
        job = await fleet.wait_job(await fleet.start_push(PushRequest(b, weight_version="2")))
        assert job.state == "succeeded", job
        assert job.result and job.result["notes"] == [
            "far-0, far-1: nothing was compared with the checkpoint's bytes"
        ]
        assert {stub.engine.digest for stub in stubs} == {SGLangEngine(model=b).digest}
        assert {stub.engine.weight_version for stub in stubs} == {"2"}
        asleep = await fleet.control(Sleep())
        assert all("does not say what memory it has released" in one.detail for one in asleep)
        found = {one.check: one.message for one in await examine(fleet.ref)}
        assert found["vllm-versions"] == "every server runs SGLang 0.5.14"
        assert "require a token" in found["control-tokens"]
    assert not any(stub.engine.dead or stub.engine.is_pause for stub in stubs)


@pytest.mark.parametrize("root", ["", "/below"])
@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (keeper.RESUME, {"tags": ["weights", "weights"]}, "twice"),
        (keeper.RELEASE, {"tags": ["cuda_graph", "cuda_graph"]}, "twice"),
        ("/get_weights_by_name", {"name": "lm_head.weight"}, "the weights are released"),
        ("/weights_checker", {"action": "checksum"}, "the weights are released"),
    ],
)
async def test_the_keeper_refuses_what_a_server_that_sleeps_would_end_of(
    path: str, body: dict[str, Any], why: str, root: str
) -> None:
    engine = SGLangEngine(cpu_backup=True)
    server = ASGITransport(SGLangStub(engine).asgi, root_path=root)
    async with AsyncClient(transport=server, base_url=f"http://stub{root}") as client:
        assert (await client.post(keeper.PAUSE, json={})).status_code == 200
        sleep = await client.post(keeper.RELEASE, json={"tags": ["weights", "kv_cache"]})
        assert sleep.status_code == 200
        refused = await client.post(path, json=body)
    assert (refused.status_code, why in refused.json()["message"]) == (409, True)
    assert not engine.dead


GROUP = {"rank_offset": 1, "world_size": 2, "master_address": "127.0.0.1"}


@pytest.mark.parametrize(
    ("path", "body", "paused", "why"),
    [
        (keeper.INIT_GROUP, {"group_name": "ours"}, True, "must be new"),
        (keeper.INIT_GROUP, {"group_name": ""}, True, "must be new"),
        (keeper.INIT_GROUP, {"group_name": "other", "master_port": 1}, True, "no sender listens"),
        (keeper.INIT_GROUP, {"group_name": "other"}, True, "no sender listens"),
        (keeper.DESTROY_GROUP, {"group_name": "other"}, True, "there is no group other"),
        (keeper.FROM_GROUP, {"group_name": "other"}, True, "there is no group other"),
        (keeper.FROM_GROUP, {"group_name": "ours"}, False, "pause first"),
    ],
)
async def test_the_keeper_refuses_what_would_end_a_server_or_hang_it_in_a_group(
    path: str, body: dict[str, Any], paused: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SGLangEngine()
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        monkeypatch.setitem(GROUPS, port, StubGroup(2))
        server = ASGITransport(SGLangStub(engine).asgi)
        async with AsyncClient(transport=server, base_url="http://stub") as client:
            made = {**GROUP, "group_name": "ours", "master_port": port, "backend": "nccl"}
            assert (await client.post(keeper.INIT_GROUP, json=made)).status_code == 200
            if paused:
                await client.post(keeper.PAUSE, json={"mode": "in_place"})
            refused = await client.post(path, json={**GROUP, **body})
            assert (await client.get(keeper.STATE)).json()["groups"] == ["ours"]
            left = await client.post(keeper.DESTROY_GROUP, json={"group_name": "ours"})
            assert left.status_code == 200 and not engine.groups
    assert (refused.status_code, why in refused.json()["message"]) == (409, True)
    assert not (engine.dead or engine.hung)


async def test_a_server_that_stores_kv_elsewhere_is_not_reloaded() -> None:
    stub = SGLangStub(SGLangEngine(hicache_storage_backend="file"))
    target = ServerTarget("s-0", "http://stub-0", engine="sglang")
    server = SGLangServer(ControlClient(transport=StubTransport([stub])), target)
    with pytest.raises(ServerError, match="HiCache's file"):
        await server.prepare_reload()
    assert stub.engine.log == []


async def test_a_server_without_metrics_says_how_to_start_it() -> None:
    stub = SGLangStub(faults={"/metrics": Fault("status", status=404)})
    target = ServerTarget("s-0", "http://stub-0", engine="sglang")
    server = SGLangServer(ControlClient(transport=StubTransport([stub])), target)
    with pytest.raises(ServerError, match="runs without --enable-metrics") as caught:
        await server.metrics()
    assert caught.value.hint == "start it with --enable-metrics"


async def test_a_server_that_lists_no_model_does_not_say_how_long_its_context_is() -> None:
    transport = ThroughHttpx(MockTransport(lambda request: Response(200, json={"data": []})))
    target = ServerTarget("s-0", "http://stub-0", engine="sglang")
    assert await SGLangServer(ControlClient(transport=transport), target).longest_context() is None


async def test_a_wait_whose_flush_fails_leaves_a_server_as_it_was() -> None:
    stub = SGLangStub(faults={"/flush_cache": Fault("status", status=500)})
    target = ServerTarget("s-0", "http://stub-0", engine="sglang")
    client = ControlClient(transport=StubTransport([stub]))
    (outcome,) = await actions.pause(client, [target], mode="wait", timeout_s=5.0)
    assert outcome.status == "failed" and not stub.engine.is_pause


async def test_a_pause_that_is_given_up_leaves_a_server_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "_ABORT_TIMEOUT_S", 0.05)
    stub = SGLangStub(SGLangEngine(cpu_backup=True))
    stub.engine.requests.append(_Request())  # ends for nobody
    target = ServerTarget("s-0", "http://stub-0", engine="sglang")
    server = SGLangServer(ControlClient(transport=StubTransport([stub])), target)
    with pytest.raises(ServerError, match="not all ended") as caught:
        await asyncio.wait_for(server.pause("abort"), 5)
    assert caught.value.status == 504
    assert not stub.engine.is_pause
    with pytest.raises(ServerError, match="requests run or are held"):
        await server.sleep(mode="keep")
    assert not stub.engine.is_pause
    await server.pause("keep")
    with pytest.raises(ServerError):
        await server.sleep(mode="keep")
    assert stub.engine.is_pause  # as it was before


async def test_a_pause_that_is_cut_off_is_reported_as_what_the_server_then_is() -> None:
    """Paused from the start of an abort on, whether or not what runs has ended: whoever is told
    that records it."""
    stub = SGLangStub()
    stub.engine.requests.append(_Request())  # ends for nobody
    target = ServerTarget("s-0", "http://stub-0", engine="sglang")
    client = ControlClient(transport=StubTransport([stub]))
    (outcome,) = await actions.pause(client, [target], timeout_s=0.1)
    assert (outcome.ok, outcome.detail.partition(";")[0]) == (True, "paused")
    assert stub.engine.is_pause


@pytest.mark.parametrize("path", [keeper.PAUSE, keeper.CONTINUE])
async def test_a_call_whose_sender_has_gone_before_its_turn_changes_nothing(path: str) -> None:
    """It has read the state since, and recorded it."""
    engine, sent = SGLangEngine(), []
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        sent.append(message)

    engine.is_pause = before = path == keeper.CONTINUE
    await SGLangStub(engine).asgi(scope, gone, send)
    assert (engine.is_pause, engine.log, sent) == (before, [], [])


@pytest.mark.parametrize("version", ["0.5.14", "0.5.20", "0.5.21", "0.5.23"])
def test_releases_that_were_read_come_without_a_note(version: str) -> None:
    assert dialect_for(version).note == ""


@pytest.mark.parametrize("version", ["0.5.13", "0.5.24", "0.6.0rc1", "", "main"])
def test_releases_that_were_not_read_come_with_a_note(version: str) -> None:
    assert "is treated as 0.5.23" in dialect_for(version).note


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
async def test_a_session_that_a_sender_left_open_is_closed(version: str) -> None:
    """Its weights are not as the engine computes with them."""
    stub = SGLangStub(SGLangEngine(version=version, session=version == "0.5.23"))
    if stub.engine.session:
        await server_of(stub).finish_weight_update()
    assert not stub.engine.session
    with pytest.raises(ServerError) as caught:
        await server_of(stub).finish_weight_update()
    assert caught.value.refusal == Refusal.NO_SESSION


async def test_a_session_that_a_sender_left_open_is_closed_by_the_next() -> None:
    stub = SGLangStub(SGLangEngine(version="0.5.23", session=True))
    server = server_of(stub)
    await server.pause("keep")
    await server.start_weight_update()
    assert stub.engine.session
    await server.finish_weight_update()
    assert not stub.engine.session
    await server.resume()


async def test_a_newer_server_drops_the_prefix_cache_while_it_holds_requests() -> None:
    engine = SGLangEngine(version="0.5.23", cached={"old"}, requests=[_Request(kv="old")])
    server = server_of(SGLangStub(engine))
    await server.pause("keep")
    await server.prepare_reload()
    assert not engine.cached and engine.requests == [_Request(kv="")]
    older = SGLangEngine(version="0.5.20", cached={"old"}, requests=[_Request(kv="old")])
    server = server_of(SGLangStub(older))
    await server.pause("keep")
    with pytest.raises(ServerError, match="drops no cached KV"):
        await server.prepare_reload()


async def test_a_flush_counts_only_where_no_data_parallel_rank_has_requests() -> None:
    engine = SGLangEngine(dp_size=2, cached={"old"}, requests=[_Request(kv="old", rank=1)])
    server = server_of(SGLangStub(engine))
    await server.pause("keep")
    with pytest.raises(ServerError, match="drops no cached KV"):
        await server.prepare_reload()
    engine.requests.clear()
    await server.prepare_reload()
    assert not engine.cached


async def test_data_parallel_servers_are_pushed_to_by_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,) = plan(engine="sglang", machine_gpus=gpus(2), data_parallel_size=2).servers
    assert server.argv[server.argv.index("--dp-size") + 1] == "2"
    assert server.backend == ""
    assert server.gpus == (0, 1)
    a, b = (str(make_tiny_checkpoint(tmp_path / n, seed=i)) for i, n in enumerate("ab"))
    stub = SGLangStub(SGLangEngine(model=a, dp_size=2))
    async with attached_fleet(tmp_path, monkeypatch, [stub], engine="sglang") as fleet:
        job = await fleet.wait_job(await fleet.start_push(PushRequest(b)))
    assert job.state == "succeeded", job
    assert stub.engine.digest == digest_of_checkpoint(b)


def server_of(stub: SGLangStub) -> SGLangServer:
    target = ServerTarget("s-0", "http://stub-0", engine="sglang")
    return SGLangServer(ControlClient(transport=StubTransport([stub])), target)


def test_only_questions_to_the_server_itself_carry_the_token() -> None:
    sent: list[tuple[str, dict[str, Any]]] = []
    module = SimpleNamespace(
        get=lambda url, **how: sent.append((url, how)),
        post=lambda url, **how: sent.append((url, how)),
        exceptions="its own",
    )
    requests = WithToken(module, "http://127.0.0.1:300", "t")
    requests.get("http://127.0.0.1:300/model_info", headers={}, timeout=5)
    requests.post("http://127.0.0.1:300/generate", json={}, headers={})
    requests.get("http://127.0.0.1:3001/info", headers={})
    assert requests.exceptions == "its own"
    own = {"Authorization": "Bearer t"}
    assert sent == [
        ("http://127.0.0.1:300/model_info", {"headers": own, "timeout": 5}),
        ("http://127.0.0.1:300/generate", {"headers": own, "json": {}}),
        ("http://127.0.0.1:3001/info", {"headers": {}}),
    ]


@pytest.mark.parametrize("roles", [0, 1, 2], ids=["mapping", "list", "with a draft"])
@pytest.mark.parametrize("missing", ["tp", "pp", "dp", "all"])
async def test_checksums_in_which_a_rank_is_missing_prove_nothing(missing: str, roles: int) -> None:
    at = {
        f"{kind}_{word}": int(word == "size")
        for kind in ("tp", "pp", "dp")
        for word in ("rank", "size")
    }
    info = [at] * roles if roles else at  # since 0.5.21 one for each model of the rank
    ranks: list[dict[str, Any]] = [{"checksums": {"w": "1"}, "parallelism_info": info}]
    facts = {"ranks": ranks, "dp_size": 1}
    answer = MockTransport(lambda _: Response(200, json=facts))
    client = ControlClient(transport=ThroughHttpx(answer))

    def server() -> SGLangServer:
        return SGLangServer(client, ServerTarget("s-0", "http://stub-0", engine="sglang"))

    assert await server().weight_checksums() == {"tp0.pp0.w": "1"}
    if missing == "all":
        ranks.clear()
    elif missing == "dp":
        facts["dp_size"] = 2  # of the server; a rank gives that of attention
    else:
        at[f"{missing}_size"] = 2
    assert await server().weight_checksums() is None


async def test_a_push_that_could_verify_the_first_stage_alone_is_refused_before_it_touches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (str(make_tiny_checkpoint(tmp_path / n, seed=i)) for i, n in enumerate("ab"))
    stub = SGLangStub(SGLangEngine(model=a, pp_size=2))
    async with attached_fleet(tmp_path, monkeypatch, [stub], engine="sglang") as fleet:
        job = await fleet.wait_job(await fleet.start_push(PushRequest(b)))
        assert job.error and "has no way to digest" in job.error["message"]
        assert job.error["hint"] == "push with --no-verify"
        assert stub.engine.log == []
        job = await fleet.wait_job(await fleet.start_push(PushRequest(b, verify=False)))
        assert job.state == "succeeded", job

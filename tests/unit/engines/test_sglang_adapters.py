"""LoRA adapters on stub SGLang servers behind the keeper, and what is refused before it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyctl.adapters import change
from skyctl.adapters.fleet import AdapterFleet
from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.engines.sglang.adapters import TARGETS, adapter_fit, config_problem
from skyctl.engines.sglang.inside import adapters as inside
from skyctl.engines.sglang.server import SGLangServer
from skyctl.errors import PreflightError, ServerError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.store.state import FleetState
from tests.faults.attached_fleet import attached_fleet
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport
from tests.stub.sglang import SGLangEngine, SGLangStub
from tests.stub.state import digest_of_checkpoint
from tests.tiny import make_tiny_checkpoint
from tests.unit.adapters.files import lora, make_adapter
from tests.unit.core.plans import gpus, plan

LAYER = "base_model.model.model.layers.0"


class Fleet:
    """Two stub servers, and two adapters on disk."""

    def __init__(self, directory: Path, state: FleetState) -> None:
        self.directory = directory
        self.stubs = [SGLangStub(SGLangEngine(lora=TARGETS)) for _ in range(2)]
        for number, value in ((1, 0.1), (2, 0.2)):
            self.adapter(f"v{number}", "mlp.down_proj", value=value)
        self._state = state
        self.connect()

    def connect(self) -> None:
        self.client = ControlClient(transport=StubTransport(self.stubs))
        targets = [ServerTarget(f"s-{i}", f"http://stub-{i}", engine="sglang") for i in range(2)]
        self.servers = [SGLangServer(self.client, target, 5.0) for target in targets]
        self.fleet = AdapterFleet(
            name="f",
            state=self._state,
            client=self.client,
            targets=lambda: (targets, {}),
            directory=self.directory / "state" / "adapters",
            timeout_s=5.0,
            reserved=["stub"],
        )

    def adapter(self, name: str, *modules: str, value: float = 0.1, **config: Any) -> None:
        tensors: dict[str, Any] = {}
        for module in modules:
            tensors |= lora(f"{LAYER}.{module}")
        listed = [module.rpartition(".")[2] for module in modules]
        make_adapter(
            self.directory / name, tensors, value=value, **{"target_modules": listed, **config}
        )

    async def load(self, version: str, new: bool | None = None) -> None:
        directory = str(self.directory / version)
        await change.load(self.fleet, LoadAdapter(name="x", directory=directory, new=new))

    async def unload(self) -> None:
        await change.unload(self.fleet, UnloadAdapter(name="x"))

    async def text(self, model: str, number: int = 0, tokens: int = 8) -> str:
        body = {"model": model, "prompt": "hello", "max_tokens": tokens}
        answer = await self.servers[number].complete(body)
        return str(answer["choices"][0]["text"])

    def in_schedulers(self) -> list[list[str]]:
        """The versions that each scheduler has."""
        return [sorted(a.name for a in stub.engine.adapters.values()) for stub in self.stubs]

    async def until_dropped(self, *versions: str) -> None:
        await until(lambda: self.in_schedulers() == [list(versions)] * 2)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - stubs have no event for it
            await asyncio.sleep(0.001)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(inside, "_LOOK_S", 0.01)
    with FleetState(tmp_path / "state.sqlite") as state:
        yield Fleet(tmp_path, state)


async def test_a_name_moves_under_requests_which_finish_with_what_they_began_with(
    fleet: Fleet,
) -> None:
    await fleet.load("v1")
    first, base = await fleet.text("x"), await fleet.text("stub")
    gates = [stub.gate for stub in fleet.stubs]
    for gate in gates:
        gate.hold()
    running = [asyncio.create_task(fleet.text("x", number)) for number in range(2)]
    for gate in gates:
        gate.grant(3)
    await until(lambda: [stub.engine.generation_tokens for stub in fleet.stubs] == [19, 3])
    await fleet.load("v2")
    later = asyncio.create_task(fleet.text("x"))
    await asyncio.sleep(0.1)  # many looks
    assert fleet.in_schedulers() == [["x@1", "x@2"]] * 2
    for gate in gates:
        gate.grant(100)
    second = await later
    assert await asyncio.gather(*running) == [first, first]
    assert len({first, second, base}) == 3
    await fleet.until_dropped("x@2")
    assert await fleet.servers[0].models() == ["stub", "x"]


async def test_an_unloaded_adapter_is_neither_served_nor_loaded_again(fleet: Fleet) -> None:
    await fleet.load("v1")
    await fleet.unload()
    with pytest.raises(ServerError, match="does not exist") as caught:
        await fleet.text("x")
    assert caught.value.status == 404
    for name in ("x", "x@1"):
        body = {"input_ids": [1], "lora_path": name, "sampling_params": {"max_new_tokens": 1}}
        with pytest.raises(ServerError, match="never been loaded"):
            await fleet.client.call(fleet.servers[0].target, "POST", "/generate", json=body)
    await fleet.until_dropped()


@pytest.mark.parametrize("model", ["stub", "default", ""])
async def test_the_model_itself_keeps_its_names(fleet: Fleet, model: str) -> None:
    base = await fleet.text("stub")
    await fleet.load("v1")
    fleet.stubs[0].engine.served_model_name = "/directory/of/an/update"
    assert await fleet.text(model) == base != await fleet.text("x")
    assert await fleet.text("stub:x") == await fleet.text("x")
    with pytest.raises(ServerError, match="does not exist"):
        await fleet.text("other:x")
    with pytest.raises(ServerError, match="no LoRA adapters: send chats or completions"):
        body = {"model": "x", "input": "hello"}
        await fleet.client.call(fleet.servers[0].target, "POST", "/v1/responses", json=body)


async def test_a_change_that_fails_after_it_was_named_gives_the_name_back(fleet: Fleet) -> None:
    await fleet.load("v1")
    first = await fleet.text("x")
    fleet.stubs[1].asgi.faults[inside.LOAD] = Fault("status", calls=(2,))
    fleet.stubs[1].asgi.calls.clear()
    with pytest.raises(SkyctlError):
        await fleet.load("v2")
    assert [await fleet.text("x", number) for number in range(2)] == [first, first]
    await fleet.until_dropped("x@1")


async def test_names_change_while_requests_are_held_in_a_pause(fleet: Fleet) -> None:
    await fleet.load("v1")
    for stub in fleet.stubs:
        stub.gate.hold()
    held = asyncio.create_task(fleet.text("x"))
    await until(lambda: bool(fleet.stubs[0].engine.requests))
    await asyncio.gather(*(server.pause("keep") for server in fleet.servers))
    await fleet.load("v2")
    await fleet.unload()
    await asyncio.sleep(0.1)  # many looks
    assert fleet.in_schedulers()[0] == ["x@1", "x@2"]
    for stub in fleet.stubs:
        stub.gate.grant(100)
    await asyncio.gather(*(server.resume() for server in fleet.servers))
    assert len(await held) == 8
    await fleet.until_dropped()


@pytest.mark.parametrize(
    ("keeper", "targets", "message"),
    [
        (False, TARGETS, "runs without skyctl's keeper; let skyctl start it"),
        (True, None, "was not started to take LoRA adapters; start it with --enable-lora"),
    ],
)
async def test_a_server_that_cannot_give_names_is_refused_before_it_is_sent_anything(
    fleet: Fleet, keeper: bool, targets: Sequence[str] | None, message: str
) -> None:
    fleet.stubs[1] = SGLangStub(SGLangEngine(lora=targets), keeper=keeper)
    fleet.connect()
    with pytest.raises(SkyctlError, match=message):
        await fleet.load("v1")
    assert fleet.in_schedulers() == [[], []]
    assert not any(stub.asgi.calls[inside.LOAD] for stub in fleet.stubs)


async def test_an_adapter_that_would_end_the_scheduler_is_refused(fleet: Fleet) -> None:
    fleet.adapter("up", "mlp.up_proj")
    with pytest.raises(PreflightError, match="does not read up_proj without gate_proj"):
        await fleet.load("up")
    assert fleet.in_schedulers() == [[], []]
    # what it is refused for
    await fleet.servers[0].load_adapter("up", str(fleet.directory / "up"))
    with pytest.raises(SkyctlError):
        await fleet.text("up")
    assert "up_proj" in fleet.stubs[0].engine.dead


@pytest.mark.parametrize(
    ("modules", "config", "unread", "unapplied"),
    [
        (("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj"), {}, [], 0),
        (("mlp.gate_proj", "mlp.down_proj"), {}, [], 0),
        (("self_attn.q_proj",), {}, ["q_proj without v_proj"], 0),
        (("self_attn.k_proj",), {}, ["k_proj without q_proj", "k_proj without v_proj"], 0),
        (("mlp.down_proj",), {"use_rslora": True}, ["use_rslora"], 0),
        (("mlp.down_proj",), {"rank_pattern": {"down_proj": 2}}, ["rank_pattern"], 0),
        (("mlp.down_proj",), {"target_modules": "m.*"}, ["target_modules that are a pattern"], 0),
        (("mlp.down_proj",), {"target_modules": ["lm_head"]}, ["lm_head (target_modules)"], 0),
        (("mixer.in_proj",), {}, [], 1),
    ],
)  # fmt: skip
def test_what_sglang_would_not_read_of_an_adapter(
    modules: Sequence[str], config: dict[str, Any], unread: list[str], unapplied: int
) -> None:
    names = [f"{LAYER}.{module}.lora_A.weight" for module in modules]
    found = adapter_fit(config, names, TARGETS)
    assert (found["unread"], len(found["unapplied"])) == (unread, unapplied)
    outside = ["base_model.model.lm_head.lora_A.weight"]
    assert adapter_fit({}, outside, TARGETS)["unapplied"] == outside


def test_the_fleet_files_limits_become_sglangs_arguments() -> None:
    lora_section = {"max_adapters": 2, "max_rank": 8}
    (server,) = plan(engine="sglang", machine_gpus=gpus(1), lora=lora_section).servers
    begin = server.argv.index("--enable-lora")
    assert server.argv[begin : begin + 6] == (
        "--enable-lora", "--max-lora-rank", "8", "--max-loras-per-batch", "3",
        "--lora-target-modules",
    )  # fmt: skip
    assert server.argv[begin + 6 : begin + 13] == TARGETS


QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("settings", "config", "problem"),
    [
        ({}, {"num_experts": 0, "text_config": {"num_experts_per_tok": 2}}, ""),
        ({}, {"num_experts": 8}, "for the experts"),
        ({}, {"num_local_experts": 8}, "for the experts"),
        ({}, {"text_config": {"n_routed_experts": 8}}, "for the experts"),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, {"num_experts": 8}, ""),
        ({"lora-target-modules": "all"}, {"num_experts": 8}, "for the experts"),
        ({}, QUANTIZED, "scales"),
        ({"quantization": "fp8"}, {}, "scales"),
        ({"lora_target_modules": ["q_proj"]}, {"text_config": QUANTIZED}, "scales"),
        ({"model_path": "org/tiny"}, None, "hf download org/tiny config.json"),
    ],
)  # fmt: skip
def test_a_server_with_adapters_takes_no_pushes_that_sglang_would_load_in_part(
    settings: dict[str, Any], config: dict[str, Any] | None, problem: str
) -> None:
    defaults = {"enable_lora": True, "quantization": None, "lora_target_modules": list(TARGETS)}
    message = config_problem({**defaults, **settings}, config)
    assert problem in message and bool(message) == bool(problem)
    assert not config_problem({**defaults, **settings, "enable_lora": False}, config)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("directory", {"num_experts": 8}, "for the experts of its model"),
        ("hub", {"num_experts": 8}, "for the experts of its model"),
        ("hub", QUANTIZED, "but not their scales"),
        ("hub", None, "hf download org/tiny config.json"),
        ("hub", {}, ""),
    ],
)
async def test_pushes_are_refused_by_the_config_of_what_servers_with_adapters_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    config: dict[str, Any] | None,
    message: str,
) -> None:
    a, b = (make_tiny_checkpoint(tmp_path / name, seed=i) for i, name in enumerate("ab"))
    configure(a, config or {})
    name = in_hub(tmp_path, monkeypatch, a, "main", config is not None) if model == "hub" else a
    digest = digest_of_checkpoint(str(a))
    stub = SGLangStub(SGLangEngine(model=str(name), digest=digest, lora=TARGETS))
    async with attached_fleet(tmp_path, monkeypatch, [stub], engine="sglang") as fleet:
        job = await fleet.wait_job(await fleet.start_push(PushRequest(str(b))))
    if message:
        assert job.error and message in job.error["message"], job
        assert stub.engine.log == []
    else:
        assert job.state == "succeeded", job


def test_the_plan_warns_of_a_model_whose_pushes_will_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings(**config: Any) -> str:
        return " ".join(plan(engine="sglang", machine_gpus=gpus(1), **config).warnings)

    checkpoint = make_tiny_checkpoint(tmp_path / "a", seed=0)
    configure(checkpoint, {"num_experts": 8})
    lora = {"max_adapters": 2, "max_rank": 8}
    hub: dict[str, Any] = {
        "model": in_hub(tmp_path, monkeypatch, checkpoint, "v1", True),
        "args": {"revision": "v1"},
    }
    for model in ({"model": str(checkpoint)}, hub):
        assert "for the experts of its model" in warnings(lora=lora, **model)
        assert "will be refused" not in warnings(**model)
    assert "will be refused" not in warnings(lora=lora, model="org/unknown")


def configure(checkpoint: Path, config: dict[str, Any]) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **config}))


def in_hub(
    directory: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, revision: str, cached: bool
) -> str:
    """The checkpoint's name on the hub, whose local cache has it if `cached`."""
    repository = directory / "hub/models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    if cached:
        (repository / "refs" / revision).write_text("c0ffee")
        (repository / "snapshots").mkdir()
        (repository / "snapshots/c0ffee").symlink_to(checkpoint)
    monkeypatch.setenv("HF_HUB_CACHE", str(directory / "hub"))
    return "org/tiny"

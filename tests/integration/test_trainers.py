"""Trainers' own clients, untouched, at the fleet URL of two real servers and the real router."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import skyctl
from skyctl.launch.local.host import free_port
from tests.integration.conftest import NEEDS
from tests.integration.endpoints import PROMPTS
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, bearer, greedy
from tests.pages import block
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.real, pytest.mark.beside]
REPOSITORY = Path(__file__).parents[2]
STEPS = 12
"""Of the GRPO run: half a minute."""
_FLEET = """
name: trained
model: ./a
device: cpu
replicas: 2
env: {{PYTHONPATH: {repository}}}
args:
  max-model-len: 2048
  enforce-eager: true
  max-num-seqs: 16
  num-gpu-blocks-override: 512
  enable-scale-out: true
  max-logprobs: -1
  worker-extension-cls: tests.integration.files_backend.FilesExtension
router: {{policy: round_robin}}
weight_transfer: {{backend: files}}
trainer: {{port: {port}}}
"""


class Trained(FleetCli):
    """Checkpoints `a`, which the servers are started with, and `b`."""

    port: int

    @property
    def url(self) -> str:
        """As `skyctl urls --format trainer` has it once a shell has read the token."""
        line = self.run("urls", "--format", "trainer").stdout
        assert line.startswith("export SKYCTL_FLEET_URL=")
        return f"http://trainer:{self.control_token}@127.0.0.1:{self.port}"

    def tokens(self) -> list[list[int]]:
        """What each server generates."""
        urls = self.data("urls")
        return [
            greedy(url, urls["model"], PROMPTS[0], key=self.key) for url in urls["servers"].values()
        ]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs the cpu extra ({', '.join(missing)} not installed)")
    root: Path = tmp_path_factory.mktemp("trained")
    fleet = Trained(root / "trained", root / "home")
    fleet.directory.mkdir()
    fleet.port = free_port("127.0.0.1")
    for name, seed in (("a", 1), ("b", 2)):
        make_tiny_checkpoint(fleet.directory / name, seed=seed)
    text = _FLEET.format(repository=REPOSITORY, port=fleet.port)
    (fleet.directory / "fleet.yaml").write_text(text)
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        fleet.run("down", expect=None)


def test_vllms_own_client_and_engine_update_the_whole_fleet(fleet: Trained) -> None:
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from tests.integration.files_backend import FilesTrainer, FilesTrainerInit

    before = fleet.tokens()
    client = HTTPVLLMWeightSyncClient(fleet.url)
    trainer = FilesTrainer.trainer_init(FilesTrainerInit(rank=0), client=client)
    trainer.send("step-1", fleet.directory / "b")
    after = fleet.tokens()
    assert after[0] == after[1] != before[0] == before[1]
    weights = fleet.data("weights")
    assert weights["version"] == "step-1"
    assert fleet.data("weights", "verify")["agree"] is True
    trainer.send("step-2", fleet.directory / "a")
    assert fleet.tokens() == before, "those of a server that was started on it"
    with pytest.raises(Exception, match="409"):
        client.finish_weight_update("step-3")


def test_the_pages_lines_for_vllms_client_run(
    fleet: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine that a CPU can run in place of NCCL's."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from tests.integration.files_backend import FilesTrainer, FilesTrainerInit

    monkeypatch.setenv("SKYCTL_FLEET_URL", fleet.url)
    names: dict[str, Any] = {
        "os": os,
        "HTTPVLLMWeightSyncClient": HTTPVLLMWeightSyncClient,
        "NCCLTrainerWeightTransferEngine": FilesTrainer,
        "init_info": FilesTrainerInit(rank=0),
        "source": fleet.directory / "b",
    }
    before = fleet.tokens()
    exec(block("trainers.md", "### vLLM's own client", "python"), names)
    assert fleet.tokens() != before
    assert fleet.data("weights")["version"].startswith("push-")
    fleet.run("sync-weights", "a")
    console = block("trainers.md", "## A trainer with its own sender", "console")
    (line,) = [line for line in console.splitlines() if "own_sender" not in line]
    assert line.startswith("$ skyctl ")
    servers = fleet.data(*line.split()[2:-1])["servers"]
    assert [server["rank_offset"] for server in servers] == [1, 2]


def test_the_pages_rollout_trains_with_trl(
    fleet: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="needs TRL")
    from tests.integration.grpo import VLLMClient, trainer_of

    monkeypatch.chdir(tmp_path)  # the page writes `latest` there
    monkeypatch.setenv("SKYCTL_HOME", str(fleet.home))
    names = {
        "asyncio": asyncio,
        "fleet": skyctl.Fleet.load(fleet.directory / "fleet.yaml"),
        "client": VLLMClient(base_url=fleet.url),
    }
    exec(block("trainers.md", "### TRL", "python"), names)
    trainer_of(fleet.directory / "a", tmp_path / "out", 2, names["rollout"]).train()
    assert fleet.data("weights")["version"] == "step-1"
    assert fleet.data("weights", "verify")["agree"] is True
    fleet.run("sync-weights", "a")


async def test_real_servers_answer_with_the_demanded_version_or_not_at_all(fleet: Trained) -> None:
    """Over updates; compared with what each checkpoint generates."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    from tests.integration.files_backend import FilesTrainer, FilesTrainerInit

    urls, key = fleet.data("urls"), fleet.key
    trainer = FilesTrainer.trainer_init(
        FilesTrainerInit(rank=0), client=HTTPVLLMWeightSyncClient(fleet.url)
    )
    made = {}
    for label, name in (("x-b", "b"), ("x-a", "a")):
        await asyncio.to_thread(trainer.send, label, fleet.directory / name)
        made[label] = (await asyncio.to_thread(fleet.tokens))[0]
    statuses: list[int] = []
    done = asyncio.Event()

    async def asks(client: httpx.AsyncClient, number: int) -> None:
        while not done.is_set():
            label = ("x-a", "x-b")[len(statuses) % 2]
            demand = {"x-weight-version-exact": label} if number % 2 else {}
            body = {"model": urls["model"], "prompt": PROMPTS[0], "max_tokens": 24,
                    "temperature": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
            answer = await client.post(
                f"{urls['router']}/v1/completions", json=body, headers={**bearer(key), **demand}
            )
            statuses.append(answer.status_code)
            if answer.status_code == 409 and demand:
                continue
            assert answer.status_code == 200, answer.text
            begin, end = (answer.headers[f"x-weight-version-{part}"] for part in ("begin", "end"))
            assert not demand or begin == end == label
            if begin == end:
                assert answer.json()["choices"][0]["token_ids"] == made[end]

    async with (
        httpx.AsyncClient(trust_env=False, timeout=120) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(8):
            tasks.create_task(asks(client, number))
        for label, name in (("x-b", "b"), ("x-a", "a"), ("x-b", "b"), ("x-a", "a")):
            await asyncio.sleep(2)
            await asyncio.to_thread(trainer.send, label, fleet.directory / name)
        done.set()
    assert {200, 409} == set(statuses)
    print(f"{len(statuses)} requests, {statuses.count(409)} refused")


def test_trls_client_generates_and_its_control_calls_reach_the_fleet(fleet: Trained) -> None:
    """Its weight sync needs a GPU: TRL refuses any other device by itself."""
    pytest.importorskip("trl", reason="needs TRL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions of vLLM that it does not know
        client_module = pytest.importorskip("trl.generation.vllm_client", exc_type=ImportError)
        client = client_module.VLLMClient(base_url=fleet.url)
    answers = client.generate(PROMPTS, n=2, max_tokens=8, temperature=1.0)
    assert len(answers["completion_ids"]) == 2 * len(PROMPTS)
    for ids, logprobs in zip(answers["completion_ids"], answers["logprobs"], strict=True):
        assert 0 < len(ids) == len(logprobs) <= 8
    assert client.get_world_size() == 2
    assert client.get_server_info()["weight_transfer_config"]["backend"] == "files"
    client.reset_prefix_cache()
    with pytest.raises(NotImplementedError, match="CUDA device"):
        client.init_communicator(device="cpu")
    with pytest.raises(Exception, match="409"), client.weight_update():
        assert all(row["state"] == "updating" for row in fleet.data("status")["replicas"])
    assert fleet.run("wait", "--timeout", "60").returncode == 0


def test_a_grpo_run_of_trl_raises_its_reward(fleet: Trained, tmp_path: Path) -> None:
    """Its trainer, client and hook are untouched; the answers are those after a push of files."""
    pytest.importorskip("trl", reason="needs TRL")
    from tests.integration.grpo import train

    trained = Path(shutil.copytree(fleet.directory / "a", fleet.directory / "trained"))
    rewards, labels = train(fleet.url, trained, tmp_path, steps=STEPS)
    print([round(reward, 2) for reward in rewards])
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[-3:]) > statistics.mean(rewards[:3]) + 0.15
    assert labels == [f"grpo-{step}" for step in range(STEPS + 1)]
    assert fleet.data("weights")["version"] == labels[-1]
    assert fleet.data("weights", "verify")["agree"] is True
    jobs = [job for job in fleet.data("jobs")["jobs"] if job["state"] == "succeeded"]
    assert len(jobs) > STEPS, "each update is a push that was verified"
    after = fleet.tokens()
    assert after[0] == after[1]
    fleet.run("sync-weights", str(trained), "--weight-version", "from-file")
    assert fleet.tokens() == after, "those of the checkpoint that TRL trained"


def skyrl_client(fleet: Trained, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SkyRL's own, which has the fleet URL for its proxy and its only server."""
    if importlib.util.find_spec("skyrl") is None:
        pytest.skip("needs SkyRL")
    import typing

    import typing_extensions

    # its modules are written for Python 3.12; on 3.11 Pydantic wants this one
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )
    from transformers import AutoTokenizer

    return RemoteInferenceClient(
        proxy_url=fleet.url,
        server_urls=[fleet.url],
        model_name=fleet.data("urls")["model"],
        data_parallel_size=1,
        tokenizer=AutoTokenizer.from_pretrained(fleet.directory / "a"),
    )


async def test_skyrls_client_at_the_fleet_url(
    fleet: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = skyrl_client(fleet, monkeypatch)
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    batch = {"prompt_token_ids": PROMPTS, "sampling_params": params, "session_ids": [*"abcd"]}
    async with client as skyrl:
        before = await skyrl.generate(batch)
        assert [len(ids) for ids in before["response_ids"]] == [8] * len(PROMPTS)
        await skyrl.pause("keep")
        waiting = asyncio.create_task(skyrl.generate(batch))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        assert {row["state"] for row in fleet.data("status")["replicas"]} == {"paused"}
        await skyrl.resume()
        assert (await waiting)["response_ids"] == before["response_ids"]
        await skyrl.reset_prefix_cache()
        total, _ = await skyrl.get_world_size()
        assert total == 2


async def test_skyrls_sender_updates_the_whole_fleet(
    fleet: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its strategy, sender and client are untouched; the files go where its vLLM calls NCCL."""
    client = skyrl_client(fleet, monkeypatch)
    pytest.importorskip("ray", reason="SkyRL's weight sync imports Ray")
    import torch.distributed as dist
    from safetensors.torch import load_file
    from skyrl.backends.skyrl_train.weight_sync import WeightChunk
    from skyrl.backends.skyrl_train.weight_sync.broadcast_strategy import BroadcastTransferStrategy
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    tensors = load_file(fleet.directory / "b" / "model.safetensors")
    names, sent = list(tensors), list[str]()

    def send(iterator: Iterator[tuple[str, Any]], trainer_args: dict[str, Any]) -> None:
        sent.extend(name for name, _ in iterator)

    # static methods of the vLLM that SkyRL is written for; later ones have none
    monkeypatch.setattr(NCCLWeightTransferEngine, "trainer_init", dict, raising=False)
    monkeypatch.setattr(NCCLWeightTransferEngine, "trainer_send_weights", send, raising=False)
    metadata = {"names": names, "path": str(fleet.directory / "b" / "model.safetensors")}
    before = await asyncio.to_thread(fleet.tokens)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        async with client as skyrl:
            world_size, _ = await skyrl.get_world_size()
            settings = SimpleNamespace(run_engines_locally=False)
            info = BroadcastTransferStrategy.create_init_info(settings, world_size)
            assert info.world_size == 3
            sender = BroadcastTransferStrategy.create_sender(info, skyrl)
            await skyrl.init_weight_update_communicator(info)
            await skyrl.pause_generation()
            values = list(tensors.values())
            shapes = [list(value.shape) for value in values]
            chunk = WeightChunk(names, ["float32"] * len(names), shapes, values)
            await sender.send_chunks([chunk], metadata)
            await skyrl.resume_generation()
    finally:
        dist.destroy_process_group()
    assert sent == names
    await asyncio.to_thread(assert_updated, fleet, before)


def test_trls_async_grpo_sender_updates_the_whole_fleet(
    fleet: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender and client are untouched; the files go where they call NCCL."""
    pytest.importorskip("trl", reason="needs TRL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is experimental
        module = pytest.importorskip(
            "trl.experimental.async_grpo.weight_transfer", exc_type=ImportError
        )
    from accelerate import PartialState
    from safetensors.torch import load_file

    PartialState()  # as a trainer makes it: TRL's log needs it
    file = fleet.directory / "b" / "model.safetensors"
    tensors = load_file(file)
    sent: list[str] = []
    monkeypatch.setattr(module, "open_trainer_endpoint", dict)

    def send(iterator: Iterator[tuple[str, Any]], **_: Any) -> None:
        sent.extend(name for name, _ in iterator)

    monkeypatch.setattr(module, "packed_nccl_broadcast_producer", send)
    dtypes = ["float32"] * len(tensors)
    info = {"names": list(tensors), "dtype_names": dtypes, "path": str(file)}
    client = module.VLLMClient(fleet.url)
    assert client.get_max_model_len() == 2048
    trainer = module.WeightTransferClient(client, info)
    before = fleet.tokens()
    trainer.init_weight_transfer()
    trainer.pause()
    trainer.send_weights(iter(tensors.items()))
    trainer.resume()
    assert sent == list(tensors)
    assert_updated(fleet, before)


def assert_updated(fleet: Trained, before: list[list[int]]) -> None:
    """Both serve checkpoint `b`, by an update without a label; then put them back to `a`."""
    after = fleet.tokens()
    assert after[0] == after[1] != before[0]
    assert fleet.data("weights", "verify")["agree"] is True
    assert fleet.data("weights")["version"].startswith("push-")
    fleet.run("sync-weights", "b", "--weight-version", "from-file")
    assert fleet.tokens() == after, "those of the checkpoint"
    fleet.run("sync-weights", "a")

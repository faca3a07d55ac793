"""The unmodified tinker SDK against a real fleet: what was trained is what vLLM samples with."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import needs_vllm
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.tinker_sdk import run_script, service_client

pytest.importorskip("tinker")
from tinker import types

pytestmark = [
    needs_vllm,
    pytest.mark.real,
    pytest.mark.beside,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
BASE = "org/tiny"
EXAMPLES = Path(__file__).parents[2] / "examples"
SENTENCE = "The fleet came up, and every server answered before the kettle had boiled."


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetCli]:
    root = tmp_path_factory.mktemp("tinker")
    found = FleetCli(root / "d", root / "home", {"HF_HUB_OFFLINE": "1"})
    found.directory.mkdir()
    from skyctl.launch.local.host import free_port
    from tests.tiny import make_tiny_checkpoint

    make_tiny_checkpoint(found.directory / "org" / "tiny", seed=1)
    (found.directory / "fleet.yaml").write_text(
        "name: tinker\nmodel: ./org/tiny\nserved_model_name: tiny\nreplicas: 1\n"
        "args: {max-model-len: 256, enforce-eager: true, num-gpu-blocks-override: 512}\n"
        "lora: {max_rank: 16, max_adapters: 2}\n"
        f"tinker: {{base_model: {BASE}, port: {free_port('127.0.0.1')}, max_rank: 16, "
        "full_parameters: true, devices: [cpu, cpu]}\n"  # which shard whole models
    )
    try:
        found.run("up", timeout_s=UP_TIMEOUT_S)
        yield found
    finally:
        found.run("down", expect=None)


@pytest.fixture
def addressed(fleet: FleetCli, monkeypatch: pytest.MonkeyPatch) -> FleetCli:
    """As a terminal is after `eval "$(skyctl urls --format tinker)"`."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(fleet.directory)  # the tokenizer is found here under the model's name
    exports = fleet.run("urls", "--format", "tinker").stdout
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        shown = subprocess.check_output(["sh", "-c", f'{exports}\nprintf %s "${name}"'], text=True)
        monkeypatch.setenv(name, shown)
    return fleet


def test_vllm_samples_what_the_sdk_trained(addressed: FleetCli) -> None:
    fleet = addressed
    with service_client() as client:
        trainer = client.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
        row = trainer.get_tokenizer().encode(SENTENCE)
        base = client.create_sampling_client(base_model=BASE).result()
        before = greedy(base, row[:4])
        assert agrees_with_trainer(base, row[:4], before)

        samplers = []
        for _ in range(3):  # one more than the servers hold adapters
            for _ in range(5):
                forward = trainer.forward_backward([datum(row)], "cross_entropy")
                trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            samplers.append(trainer.save_weights_and_get_sampling_client().result())
        assert forward.result().metrics["loss:sum"] / len(row) < 1
        answers = [greedy(sampler, row[:4]) for sampler in samplers]
        for sampler, answer in zip(samplers, answers, strict=True):
            assert agrees_with_trainer(sampler, row[:4], answer)
        tokens = [tuple(answer.tokens) for answer in (before, *answers)]
        assert len(set(tokens)) > 2
        # the last one's trainer says the same without going through a checkpoint
        full = row[:4] + list(answers[-1].tokens)
        own = trainer.forward([datum(full)], "cross_entropy").result().loss_fn_outputs[0]
        assert list(own["logprobs"].data)[3:] == pytest.approx(answers[-1].logprobs, abs=1e-3)

        # served by a name: as the sampler answers
        saved = trainer.save_weights_for_sampler("final").result().path
        loaded = [adapter["name"] for adapter in fleet.data("adapters")["adapters"]]
        fleet.run("adapters", "unload", loaded[0])  # a sampler's: both places are taken
        fleet.run("adapters", "load", "math", saved)
        prompt = trainer.get_tokenizer().decode(row[:4])
        limits = ("--max-tokens", "20", "--temperature", "0")
        answer = fleet.data("generate", prompt, "--model", "math", *limits)["results"][0]
        assert answer["token_ids"] == list(answers[-1].tokens)
        fleet.run("adapters", "unload", "math")
        fleet.run("tinker", "rm", saved)

        # all of a model's parameters: its weights are pushed, and those of before pushed back
        whole = client.create_lora_training_client(base_model=BASE, rank=0).result()
        for _ in range(5):
            whole.forward_backward([datum(row)], "cross_entropy")
            whole.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        trained = whole.save_weights_and_get_sampling_client().result()
        answer = greedy(trained, row[:4])
        assert agrees_with_trainer(trained, row[:4], answer)
        assert tuple(answer.tokens) not in tokens
        assert [push["ok"] for push in fleet.data("weights")["pushes"]] == [True]
        assert tuple(greedy(samplers[-1], row[:4]).tokens) == tokens[-1]
        assert tuple(greedy(trained, row[:4]).tokens) == tuple(answer.tokens)

        status = fleet.data("status")
        assert (status["health"], status["reasons"]) == ("healthy", [])
        assert status["tinker"]["ranks"] and status["tinker"]["models"] > 0
        os.kill(status["tinker"]["pid"], signal.SIGKILL)
        late = samplers[0].sample(types.ModelInput.from_ints(row[:4]), 1, params(20))
        assert list(late.result(timeout=120).sequences[0].tokens) == list(answers[0].tokens)
        assert list(greedy(base, row[:4]).tokens) == list(before.tokens)
        forward = trainer.forward([datum(full)], "cross_entropy").result(timeout=120)
        assert list(forward.loss_fn_outputs[0]["logprobs"].data) == list(own["logprobs"].data)


def test_a_push_says_that_the_trainer_keeps_its_base(addressed: FleetCli) -> None:
    fleet = addressed
    from tests.tiny import make_tiny_checkpoint

    make_tiny_checkpoint(fleet.directory / "other", seed=2)
    notes = fleet.run("sync-weights", "other").stderr
    assert "goes on training" in notes
    [reason] = fleet.data("status")["reasons"]
    assert reason["message"].startswith("the Tinker API trains") and not reason["fault"]
    fleet.run("sync-weights", "--rollback", "base")
    assert fleet.data("status")["reasons"] == []


def test_a_sample_waits_until_servers_are_awake(addressed: FleetCli) -> None:
    fleet = addressed
    with service_client() as client:
        trainer = client.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
        row = trainer.get_tokenizer().encode(SENTENCE)
        trainer.forward_backward([datum(row)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        loaded = trainer.save_weights_and_get_sampling_client().result()
        before = greedy(loaded, row[:4])
        fleet.run("sleep")
        trainer.forward_backward([datum(row)], "cross_entropy")  # meanwhile
        trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        new = trainer.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(row[:4])
        asked = [sampler.sample(prompt, 1, params(20)) for sampler in (loaded, new)]
        with pytest.raises(FutureTimeout):
            asked[0].result(timeout=40)  # longer than a request is tried again
        assert not asked[1].done()
        fleet.run("wake")
        answers = [future.result(timeout=120).sequences[0] for future in asked]
        assert list(answers[0].tokens) == list(before.tokens)
        assert agrees_with_trainer(new, row[:4], answers[1])


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("tinker_sft.py", (), "The fleet came up"),
        ("tinker_rl.py", ("--rank", "0", "--steps", "2", "--samples", "4"), "reward 0."),
    ],
)
def test_the_examples_run(
    addressed: FleetCli, script: str, options: tuple[str, ...], said: str
) -> None:
    arguments = [BASE, *options, "--plot", "plot.svg"]
    where = addressed.directory
    assert said in run_script(str(EXAMPLES / script), *arguments, cwd=where, timeout_s=240)
    assert (where / "plot.svg").read_text().startswith("<svg")


def datum(tokens: list[int]) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )


def params(tokens: int) -> Any:
    return types.SamplingParams(max_tokens=tokens, temperature=0.0)


def greedy(sampler: Any, prompt: list[int]) -> Any:
    answer = sampler.sample(types.ModelInput.from_ints(prompt), 1, params(20)).result(timeout=120)
    return answer.sequences[0]


def agrees_with_trainer(sampler: Any, prompt: list[int], answer: Any) -> bool:
    """vLLM's tokens are the trainer's most likely ones, its logprobs the trainer's to 1e-3."""
    whole = types.ModelInput.from_ints(prompt + list(answer.tokens))
    scored = sampler.sample(
        whole, 1, params(1), include_prompt_logprobs=True, topk_prompt_logprobs=1
    ).result(timeout=120)
    count = len(prompt)
    best = [top[0][0] for top in scored.topk_prompt_logprobs[count:]]
    assert best == list(answer.tokens)
    assert scored.prompt_logprobs[count:] == pytest.approx(answer.logprobs, abs=1e-3)
    return True

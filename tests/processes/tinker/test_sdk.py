"""The unmodified SDK against the API process and its worker: training, samplers, checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

from tests.processes.tinker.serving import BASE, KEY, ServingProcess  # noqa: E402
from tests.processes.tinker.steps import ADAM, TOKENS, datum, step  # noqa: E402
from tests.tinker_sdk import service_client  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def client(serving: ServingProcess) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("TINKER_TELEMETRY", "0")
    with service_client(base_url=serving.url, api_key=KEY) as found:
        yield found
    patch.undo()


@pytest.fixture
def trainer(client: Any) -> Any:
    return client.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()


def rl_datum(sampled: float = -6.0) -> Any:
    count = len(TOKENS) - 1
    return datum(logprobs=[sampled] * count, advantages=[1.0] * count)


def test_training_lowers_the_loss_and_resumes_to_the_bit(client: Any, trainer: Any) -> None:
    losses = [step(trainer) for _ in range(6)]
    assert losses[-1] < losses[0] / 2
    saved = trainer.save_state("six").result()
    assert saved.path == f"tinker://{trainer.model_id}/weights/six"
    again = client.create_training_client_from_state_with_optimizer(saved.path).result()
    assert [step(again) for _ in range(3)] == [step(trainer) for _ in range(3)]
    weights_only = client.create_training_client_from_state(saved.path).result()
    assert weights_only.get_info().lora_rank == 8
    trainer.load_state_with_optimizer(saved.path).result()
    assert step(trainer) == step(weights_only)  # the weights are the same, the moments are not
    trainer.load_state(saved.path).result()
    with pytest.raises(tinker.RequestFailedError, match="is there already"):
        trainer.save_state("six").result()
    trainer.save_state("six", overwrite=True).result()


def test_the_process_that_trains_is_shown(serving: ServingProcess, trainer: Any) -> None:
    step(trainer)
    worker = serving.get("healthz")["worker"]
    assert worker["ranks"] == [{"pid": pid, "device": "cpu"} for pid in serving.rank_pids()]
    assert worker["fault"] == "" and worker["models"] > 0


def test_a_model_of_rank_0_is_trained_and_sampled_as_a_whole(
    serving: ServingProcess, client: Any
) -> None:
    trainer = client.create_lora_training_client(base_model=BASE, rank=0).result()
    info = trainer.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    losses = [step(trainer) for _ in range(3)]
    assert losses[-1] < losses[0] / 2
    saved = trainer.save_state("three").result().path
    again = client.create_training_client_from_state_with_optimizer(saved).result()
    assert [step(again) for _ in range(2)] == [step(trainer) for _ in range(2)]
    with pytest.raises(tinker.RequestFailedError, match="has rank 0, the model rank 8"):
        eight = client.create_lora_training_client(base_model=BASE, rank=8).result()
        eight.load_state(saved).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sampler.sample(types.ModelInput.from_ints([65]), 1, types.SamplingParams(max_tokens=1)).result()
    asked = serving.sampled()
    assert asked["complete"]["model"] == "served"  # the servers' own weights, not an adapter
    assert (Path(asked["weights"]) / "model.safetensors").exists()
    rest = client.create_rest_client()
    assert rest.get_weights_info_by_tinker_path(saved).result().is_lora is False
    assert rest.get_training_run_by_tinker_path(saved).result().lora_rank is None


def test_eight_tenants_at_once_train_and_sample_as_each_does_alone(
    serving: ServingProcess, client: Any
) -> None:
    params = types.SamplingParams(max_tokens=1)

    def tenant(number: int) -> list[float]:
        make = client.create_lora_training_client
        trainer = make(base_model=BASE, rank=8, seed=number).result()
        mine = [datum([(number + token) % 500 for token in TOKENS])]
        losses = [step(trainer, mine) for _ in range(3)]
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sampler.sample(types.ModelInput.from_ints([65]), 1, params).result()
        return losses

    alone = [tenant(number) for number in range(8)]
    before = len(serving.asked())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tenant, range(8))) == alone
    loaded = [asked["load"] for asked in serving.asked()[before:] if "load" in asked]
    assert len(set(loaded)) == 8


def test_chunks_of_one_call_are_one_step(client: Any, trainer: Any) -> None:
    """The SDK cuts large calls at 1024 data, and sends the first chunk last."""
    other = client.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
    data = [datum([5 + number % 400, 7]) for number in range(1500)]
    result = trainer.forward(data, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 1500
    first = [float(one["logprobs"].data[0]) for one in result.loss_fn_outputs]
    halves = [other.forward(part, "cross_entropy").result() for part in (data[:400], data[400:])]
    apart = [float(o["logprobs"].data[0]) for half in halves for o in half.loss_fn_outputs]
    assert first == pytest.approx(apart, abs=1e-4)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
    ],
)
def test_losses_of_reinforcement_learning(trainer: Any, loss: str, config: Any) -> None:
    forward = trainer.forward_backward([rl_datum()], loss, loss_fn_config=config)
    norm = trainer.optim_step(ADAM).result().metrics["grad_norm"]
    assert norm >= 0
    found = forward.result()
    [output] = found.loss_fn_outputs
    assert len(output["logprobs"].data) == len(output["elementwise_loss"].data) == len(TOKENS) - 1
    assert sum(output["elementwise_loss"].data) == pytest.approx(
        found.metrics["loss:sum"], abs=1e-5
    )
    assert found.metrics["response_length:mean"] == len(TOKENS) - 1
    assert 0 < found.metrics["policy_entropy:mean"] < 6.3  # that of 512 equal tokens


def test_a_custom_loss_runs_in_the_client(trainer: Any) -> None:
    def loss(data: Any, logprobs: Any) -> Any:
        total = -sum(one.sum() for one in logprobs)
        return total, {"mine": float(total)}

    found = trainer.forward_backward_custom([datum()], loss).result()
    assert found.metrics["mine"] > 0
    assert trainer.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_step_whose_gradient_is_incomplete_fails_and_the_next_does_not(trainer: Any) -> None:
    reference = trainer.forward([datum()], "cross_entropy").result().metrics
    good = trainer.forward_backward([datum()], "cross_entropy")
    bad = trainer.forward_backward([datum()], "ppo")
    optim = trainer.optim_step(ADAM)
    assert good.result().metrics == reference
    with pytest.raises(tinker.RequestFailedError, match="needs loss_fn_inputs") as failed:
        bad.result()
    assert failed.value.category is types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="incomplete"):
        optim.result()
    assert trainer.forward([datum()], "cross_entropy").result().metrics == reference
    step(trainer)
    assert trainer.forward([datum()], "cross_entropy").result().metrics != reference


def test_what_is_not_offered_is_refused_with_a_sentence(client: Any, trainer: Any) -> None:
    make = client.create_lora_training_client
    before = float(trainer.forward([datum()], "cross_entropy").result().metrics["loss:sum"])
    for arguments, said in (
        ({"base_model": "org/other"}, "is not served here"),
        ({"base_model": BASE, "rank": 128}, "rank 128 is not offered"),
    ):
        with pytest.raises(tinker.APIStatusError, match=said):
            make(**arguments).result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_training_client_from_state("tinker://x:train:0/weights/none").result()
    for call, said in (
        (lambda: trainer.save_state("../../etc/passwd"), "should match pattern"),
        (lambda: trainer.save_weights_for_sampler("a/b"), "should match pattern"),
        (lambda: trainer.load_state("tinker://x:train:0/weights/none"), "no checkpoint"),
        (lambda: trainer.save_weights_external("../x"), "should match pattern"),
        (lambda: trainer.optim_step(types.DimuonParams(learning_rate=0.1)), "only AdamW"),
        (lambda: trainer.optim_step(types.AdamParams(learning_rate=-1.0)), "makes no sense"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=said) as failed:
            call().result()
        assert failed.value.category is types.RequestErrorCategory.User
    assert step(trainer) == before  # nothing of it was done, and nothing waits for it


def test_a_wrong_key_is_refused(serving: ServingProcess) -> None:
    for key in ("", "tml-" + "1" * 32, "é"):
        answer = httpx.post(
            f"{serving.url}/api/v1/create_session", headers={"X-API-Key": key.encode()}, json={}
        )
        assert answer.status_code == 401
    with pytest.raises(tinker.AuthenticationError, match="API key is wrong"):
        tinker.ServiceClient(base_url=serving.url, api_key="tml-wrong").holder  # noqa: B018


def test_bodies_are_bounded(serving: ServingProcess) -> None:
    import zstandard

    url, headers = f"{serving.url}/api/v1/forward_backward", {"X-API-Key": KEY}
    assert httpx.post(url, headers=headers, content=bytes(1_000_001)).status_code == 413
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    packed = {**headers, "Content-Encoding": "zstd"}
    assert httpx.post(url, headers=packed, content=bomb).status_code == 413
    assert httpx.post(url, headers=packed, content=b"no").status_code == 400
    assert httpx.post(url, headers=headers, content=b"\xff\xff").status_code == 400
    assert httpx.post(url, headers=headers, content=b"").status_code == 400


def test_a_request_that_is_sent_again_is_the_same(serving: ServingProcess, trainer: Any) -> None:
    headers = {"X-API-Key": KEY}
    body = {"model_id": trainer.model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}

    def send(path: str, sent: Any) -> httpx.Response:
        return httpx.post(f"{serving.url}/api/v1/{path}", headers=headers, json=sent)

    first = send("optim_step", body).json()["request_id"]
    assert send("optim_step", body).json()["request_id"] == first
    result = send("retrieve_future", {"request_id": first}).json()
    assert send("optim_step", body).json()["request_id"] == first
    assert send("retrieve_future", {"request_id": first}).json() == result
    other = send("save_weights", {"model_id": trainer.model_id, "seq_id": 1})
    assert other.status_code == 400
    assert "was a optim_step" in other.json()["detail"]
    # what comes out of order waits for its turn
    later = send("optim_step", {**body, "seq_id": 3}).json()["request_id"]
    assert send("optim_step", {**body, "seq_id": 2}).status_code == 200
    assert "metrics" in send("retrieve_future", {"request_id": later}).json()
    assert send("retrieve_future", {"request_id": "no"}).status_code == 404


def test_samplers_ask_the_fleet_with_their_adapter(
    serving: ServingProcess, client: Any, trainer: Any
) -> None:
    prompt = types.ModelInput.from_ints([65, 66])
    params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[3], seed=2**64)
    sampler = trainer.save_weights_and_get_sampling_client()
    answer = sampler.sample(prompt, 2, params).result()
    assert [sequence.tokens for sequence in answer.sequences] == [[65, 66, 67]] * 2
    assert [sequence.logprobs for sequence in answer.sequences] == [[-0.5] * 3] * 2
    assert answer.sequences[0].stop_reason == "length"
    *_, loaded, asked = serving.asked()
    assert loaded["load"] == asked["complete"]["model"]
    assert asked["complete"]["n"] == 1  # greedy: vLLM refuses more
    assert asked["complete"]["stop_token_ids"] == [3]
    assert 0 <= asked["complete"]["seed"] < 2**63
    assert (Path(loaded["directory"]) / "adapter_config.json").exists()

    path = trainer.save_weights_for_sampler("one").result().path
    named = client.create_sampling_client(model_path=path).result()
    copy = pickle.loads(pickle.dumps(named))
    for one in (named, copy):
        logprobs = one.compute_logprobs(prompt).result()
        assert logprobs[0] is None
        assert logprobs[1] == pytest.approx(
            trainer.forward([datum([65, 66])], "cross_entropy")
            .result().loss_fn_outputs[0]["logprobs"].data[0], abs=1e-5
        )  # fmt: skip
    assert named.get_base_model() == BASE
    base = client.create_sampling_client(base_model=BASE).result()
    many = [base.sample(prompt, 1, types.SamplingParams(max_tokens=1)) for _ in range(40)]
    assert all(one.result().sequences[0].tokens == [65] for one in many)
    sessions = [asked["session"] for asked in serving.asked() if "session" in asked][-40:]
    assert len({*sessions}) == 40  # each its own: a sticky router spreads them
    assert len({session.rpartition(":")[0] for session in sessions}) == 1
    assert serving.sampled()["complete"]["model"] == "served"
    top = base.sample(
        prompt, 1, types.SamplingParams(max_tokens=2, stop=["x"]),
        include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=1,
    ).result()  # fmt: skip
    assert len(top.topk_prompt_logprobs[1]) == 2
    assert top.sequences[0].topk_logprobs is not None
    assert serving.sampled()["complete"]["include_stop_str_in_output"] is True

    for tokens, said in (([13], "no"), ([], "no tokens"), ([65] * 256, "takes 256 in all")):
        with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=said):
            base.sample(types.ModelInput.from_ints(tokens), 1, params).result()
    full = base.compute_logprobs(types.ModelInput.from_ints([65] * 256)).result()
    assert len(full) == 256 and None not in full[1:]  # what a sample that fills the context left


def test_samplers_in_flight_move_on_together(serving: ServingProcess, trainer: Any) -> None:
    prompt, params = types.ModelInput.from_ints([65]), types.SamplingParams(max_tokens=1)

    def used(sampler: Any) -> str:
        sampler.sample(prompt, 1, params).result()
        return str(serving.sampled()["complete"]["model"])

    first = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    fixed = trainer.save_weights_and_get_sampling_client().result()
    before = used(first), used(fixed)
    step(trainer)
    second = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    assert used(first) == used(second) != before[0]
    assert used(fixed) == before[1]


def test_a_training_checkpoint_is_downloaded_by_the_vendors_command(
    serving: ServingProcess, client: Any, trainer: Any, tmp_path: Path
) -> None:
    step(trainer)
    saved = trainer.save_state("leaves").result().path
    run = subprocess.run(
        [sys.executable, "-m", "tinker.cli", "checkpoint", "download", saved, "-o", str(tmp_path)],
        env={**os.environ, "TINKER_BASE_URL": serving.url, "TINKER_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    [adapter] = tmp_path.rglob("adapter_model.safetensors")
    assert json.loads((adapter.parent / "adapter_config.json").read_text())["r"] == 8
    rest = client.create_rest_client()
    kept = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in kept] == [saved]

    external = trainer.save_weights_external("kept").result().path
    urls = rest.get_external_weights_urls(external).result().urls
    url = urls["adapter_model.safetensors"]
    assert httpx.get(url).content == adapter.read_bytes()
    assert httpx.get(url[:-1] + ("0" if url[-1] != "0" else "1")).status_code == 403
    assert httpx.get(url.replace("expires=", "expires=9")).status_code == 403
    rest.delete_checkpoint_from_tinker_path(external).result()
    assert httpx.get(url).status_code == 404


def test_checkpoints_are_listed_published_and_deleted(client: Any, trainer: Any) -> None:
    rest = client.create_rest_client()
    saved = trainer.save_state("kept", ttl_seconds=3600).result().path
    sampled = trainer.save_weights_for_sampler("served").result().path
    rest.publish_checkpoint_from_tinker_path(saved).result()
    found = {c.tinker_path: c for c in rest.list_checkpoints(trainer.model_id).result().checkpoints}
    assert set(found) == {saved, sampled}
    assert found[saved].checkpoint_id == "weights/kept"
    assert found[saved].public
    assert found[saved].expires_at is not None
    assert found[sampled].checkpoint_type == "sampler"
    rest.unpublish_checkpoint_from_tinker_path(saved).result()
    rest.set_checkpoint_ttl_from_tinker_path(saved, None).result()
    [one] = [c for c in rest.list_user_checkpoints().result().checkpoints if c.tinker_path == saved]
    assert not one.public
    assert one.expires_at is None
    assert rest.get_weights_info_by_tinker_path(saved).result().lora_rank == 8
    run = rest.get_training_run_by_tinker_path(saved).result()
    assert run.training_run_id == trainer.model_id
    assert run.last_checkpoint.tinker_path == saved
    sampler = client.create_sampling_client(model_path=sampled).result()
    rest.delete_checkpoint_from_tinker_path(sampled).result()
    with pytest.raises(tinker.RequestFailedError, match="was deleted"):
        sampler.sample(types.ModelInput.from_ints([65]), 1, types.SamplingParams()).result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint(trainer.model_id, "sampler_weights/served").result()

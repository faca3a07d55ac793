"""The trainer against the same computed another way: merged weights, plain loops, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from skyctl.checkpoints.checkpoint import read_checkpoint  # noqa: E402
from skyctl.tinker import wire  # noqa: E402
from skyctl.tinker.adapter import Base  # noqa: E402
from skyctl.tinker.files import DamagedCheckpoint  # noqa: E402
from skyctl.tinker.losses import LossError  # noqa: E402
from skyctl.tinker.ranks import Ranks  # noqa: E402
from skyctl.tinker.trainer import Trainer  # noqa: E402
from tests.tiny import make_tiny_checkpoint  # noqa: E402
from tests.unit.tinker.passes import (  # noqa: E402
    LORA,
    ROWS,
    inputs_for,
    outcome,
    reference,
    request,
    tensor,
)

WHOLE = {**LORA, "rank": 0}


def asked_of(
    trainer: Trainer,
    directory: Path | None,
    tokens: list[int],
    body: bytes = b"",
    *,
    top: int = 0,
    last: int | None = None,
) -> Any:
    """What the trainer says about a prompt, as the SampleResponse that it is."""
    where = None if directory is None else str(directory)
    header = {"directory": where, "tokens": tokens, "wanted": True, "top": top, "last": last}
    return wire.message("SampleResponse").FromString(trainer.prompt_logprobs(header, body))


def test_a_step_is_adamw_over_the_sum_of_all_gradients_since_the_last(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [(row, inputs_for("cross_entropy", len(row), generator)) for row in ROWS]
    model = trainer.models["m"]
    mine = {
        name: value.detach().clone().requires_grad_() for name, value in model.parameters.items()
    }
    adam = torch.optim.AdamW(mine.values(), lr=3e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    params = {
        "learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1,
        "grad_clip_norm": 5.0,
    }  # fmt: skip
    for _ in range(3):
        _, gradients, _ = reference(trainer, "cross_entropy", data, {})
        for datum in data:  # one request each
            outcome(trainer, "m", request("cross_entropy", [datum]))
        metrics = trainer.optim_step("m", params)
        for name, value in mine.items():
            value.grad = gradients[name].float()
        norm = torch.nn.utils.clip_grad_norm_(mine.values(), 5.0)
        adam.step()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert metrics["tokens_per_s"] > 0
        for name, value in mine.items():
            assert torch.allclose(model.parameters[name], value, atol=1e-5), name
        with torch.no_grad():  # the next step begins at the same point
            for name, value in mine.items():
                value.copy_(model.parameters[name])


def test_logits_of_a_long_row_never_exist_at_once(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [(7 * place) % 500 for place in range(64)]
    body = request("cross_entropy", [(tokens, {"target_tokens": torch.tensor(tokens)})])
    whole, logits = outcome(trainer, "m", body), Base.logits
    gradients = trainer.models["m"].gradients or []
    trainer.zero_gradients("m")
    monkeypatch.setattr("skyctl.tinker.adapter.MOST_LOGITS", 512 * 10)
    sizes: list[int] = []

    def measured(self: Base, hidden: Tensor) -> Tensor:
        answer = logits(self, hidden)
        sizes.append(len(answer))
        return answer

    monkeypatch.setattr(Base, "logits", measured)
    first, second = (
        torch.frombuffer(
            bytearray(
                wire.message("ForwardBackwardOutput")
                .FromString(answer)
                .loss_fn_outputs[0]
                .fields["logprobs"]
                .data
            ),
            dtype=torch.float32,
        )
        for answer in (whole, outcome(trainer, "m", body))
    )
    assert torch.allclose(first, second, atol=1e-5)
    assert sizes == [10] * 6 + [4] + sizes[7:] and max(sizes) == 10 and len(sizes) == 14
    for one, other in zip(gradients, trainer.models["m"].gradients or [], strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert len(asked_of(trainer, None, tokens).prompt_logprobs) == 4 * 64 and max(sizes) == 10


def test_rows_of_similar_length_are_computed_together_and_answered_in_order(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [2, 9, 3, 8, 2, 8, 3, 17]
    data = [([5] * n, {"target_tokens": torch.full((n,), 7)}) for n in lengths]
    batches: list[list[int]] = []
    hidden = Base.hidden

    def noted(self: Base, rows: list[Tensor]) -> Tensor:
        batches.append([len(row) for row in rows])
        return hidden(self, rows)

    monkeypatch.setattr(Base, "hidden", noted)
    answer = wire.message("ForwardBackwardOutput").FromString(
        outcome(trainer, "m", request("cross_entropy", data))
    )
    assert batches == [[17], [9], [8, 8], [3, 3, 2, 2]]  # of 16 tokens, padding included
    assert [len(r.fields["logprobs"].data) // 4 for r in answer.loss_fn_outputs] == lengths


def test_requests_that_are_joined_come_to_the_same_and_a_wrong_one_fails_alone(
    trainer: Trainer,
) -> None:
    bodies = [
        request("cross_entropy", [(row, {"target_tokens": torch.tensor(row)})]) for row in ROWS
    ]
    single = [outcome(trainer, "m", body) for body in bodies]
    gradients = trainer.models["m"].gradients or []
    trainer.zero_gradients("m")
    [answers], more = trainer.forward_backward("m", [bodies])
    assert not more
    for alone, joined in zip(single, answers, strict=True):
        assert isinstance(joined, bytes)
        parsed = [wire.message("ForwardBackwardOutput").FromString(x) for x in (alone, joined)]
        assert parsed[0].metrics["loss:sum"] == pytest.approx(parsed[1].metrics["loss:sum"])
    for one, other in zip(gradients, trainer.models["m"].gradients or [], strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    wrong = request("cross_entropy", [([5], {"target_tokens": torch.tensor([600])})])
    units, _ = trainer.forward_backward("m", [[bodies[0], wrong, bodies[1]]])
    assert [[type(answer) for answer in unit] for unit in units] == [[bytes], [LossError], [bytes]]


def test_passes_in_slices_come_to_the_same_bits(trainer: Trainer) -> None:
    data = [(row, {"target_tokens": torch.tensor(row)}) for row in ROWS * 4]
    body = request("cross_entropy", data)
    at_once = outcome(trainer, "m", body)
    gradients = trainer.models["m"].gradients or []
    trainer.zero_gradients("m")
    units, more = trainer.forward_backward("m", [[body], [body]], 0.0)
    slices = 1
    while more:
        ended, more = trainer.go_on("m", 0.0)
        units, slices = units + ended, slices + 1
    assert units == [[at_once], [at_once]] and slices == 8
    for one, other in zip(gradients, trainer.models["m"].gradients or [], strict=True):
        assert torch.equal(2 * one, other)


def test_a_whole_model_is_trained_as_an_adapter_is(base: Base) -> None:
    trainer = Trainer(base, name="org/tiny", batch_tokens=16)
    trainer.create("m", WHOLE)
    model = trainer.models["m"]
    assert model.parameters.keys() == dict(base.model.named_parameters()).keys()
    generator = torch.Generator().manual_seed(5)
    data = [(row, inputs_for("cross_entropy", len(row), generator)) for row in ROWS]
    loss, gradients, logprobs = reference(trainer, "cross_entropy", data, {})
    answer = wire.message("ForwardBackwardOutput").FromString(
        outcome(trainer, "m", request("cross_entropy", data))
    )
    assert answer.metrics["loss:sum"] == pytest.approx(loss, abs=1e-4)
    for output, expected in zip(answer.loss_fn_outputs, logprobs, strict=True):
        seen = torch.frombuffer(bytearray(output.fields["logprobs"].data), dtype=torch.float32)
        assert torch.allclose(seen.double(), expected, atol=1e-5)
    assert model.gradients is not None
    for name, gradient in zip(model.parameters, model.gradients, strict=True):
        assert torch.allclose(gradient, gradients[name].float(), atol=1e-5), name
    before = {name: value.clone() for name, value in base.model.named_parameters()}
    trainer.optim_step("m", {"learning_rate": 1e-2})
    for name, value in base.model.named_parameters():
        assert torch.equal(value, before[name])  # nobody else's base
        assert not torch.equal(model.parameters[name], value), name


@pytest.mark.parametrize("config", [LORA, WHOLE], ids=["adapter", "whole"])
def test_what_is_computed_again_comes_to_the_same_bits(
    base: Base, tiny_base: Path, config: Any
) -> None:
    again = Base(str(tiny_base / "org/tiny"), device="cpu", dtype="float32", checkpointing=True)
    entered = []
    again.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: entered.append(1))
    outputs, gradients = [], []
    for model in (base, again):
        trainer = Trainer(model, name="org/tiny")
        trainer.create("m", config)
        for _ in range(2):
            data = [(row, {"target_tokens": torch.tensor(row)}) for row in ROWS]
            outputs.append(outcome(trainer, "m", request("cross_entropy", data)))
            gradients.append([gradient.clone() for gradient in trainer.models["m"].gradients or ()])
            trainer.optim_step("m", {"learning_rate": 1e-2})
    assert len(entered) == 4  # each step once more for its gradient
    assert outputs[:2] == outputs[2:] and outputs[0] != outputs[1]
    for kept, recomputed in zip(gradients[:2], gradients[2:], strict=True):
        assert all(map(torch.equal, kept, recomputed))


def test_a_tied_embedding_is_trained_once_and_used_in_both_places(tmp_path: Path) -> None:
    made = make_tiny_checkpoint(tmp_path / "org" / "tied", seed=2, tie_word_embeddings=True)
    trainer = Trainer(Base(str(made), device="cpu", dtype="float32"), name="org/tied")
    trainer.create("m", WHOLE)
    assert "lm_head.weight" not in trainer.models["m"].parameters
    body = request("cross_entropy", [(ROWS[0], {"target_tokens": torch.tensor(ROWS[0])})])
    for _ in range(2):
        outcome(trainer, "m", body)
        trainer.optim_step("m", {"learning_rate": 1e-2})
    trainer.save("m", tmp_path / "c", optimizer=True)
    trainer.open("n", tmp_path / "c", optimizer=True)
    assert outcome(trainer, "n", body) == outcome(trainer, "m", body)
    server = Base(str(tmp_path / "c"), device="cpu", dtype="float32")  # what a server would load
    rows = [torch.tensor(ROWS[0])]
    with torch.no_grad(), trainer.base.using(trainer.models["m"].parameters):
        assert torch.allclose(
            trainer.base.logits(trainer.base.hidden(rows)),
            server.logits(server.hidden(rows)),
            atol=1e-5,
        )


def test_a_whole_model_is_saved_as_a_checkpoint_that_a_server_starts_on(
    base: Base, tmp_path: Path
) -> None:
    import transformers

    trainer = Trainer(base, name="org/tiny")
    trainer.create("m", WHOLE)
    outcome(trainer, "m", request("cross_entropy", single_datum()))
    trainer.optim_step("m", {"learning_rate": 1e-2})
    trainer.save("m", tmp_path / "c", optimizer=False)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype="auto")
    for name, value in read.named_parameters():
        assert value.dtype == torch.float32
        assert torch.equal(value, trainer.models["m"].parameters[name])
    assert {path.name for path in Path(base.path).iterdir()} <= {
        path.name for path in (tmp_path / "c").iterdir()
    }
    trainer.save("m", tmp_path / "t", optimizer=True)  # its optimizer's state is no part of it
    names = {tensor.name for tensor in read_checkpoint(str(tmp_path / "t")).tensors}
    assert names == {tensor.name for tensor in read_checkpoint(base.path).tensors}
    answer = asked_of(trainer, tmp_path / "c", ROWS[0])
    with torch.no_grad():
        expected = torch.log_softmax(read(torch.tensor([ROWS[0]])).logits[0], -1)
    seen = torch.frombuffer(bytearray(answer.prompt_logprobs), dtype=torch.float32)
    assert torch.allclose(seen[1:], expected[range(5), ROWS[0][1:]], atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1, 128])
def test_a_checkpoint_gives_back_every_bit(trainer: Trainer, tmp_path: Path, rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    body = request("cross_entropy", [(ROWS[0], inputs_for("cross_entropy", 6, generator))])
    trainer.create("a", {**LORA, "rank": rank})
    trainer.save("a", tmp_path / "fresh", optimizer=True)
    trainer.open("b", tmp_path / "fresh", optimizer=True)
    for model in ("a", "b"):
        outcome(trainer, model, body)
        trainer.optim_step(model, {"learning_rate": 1e-2, "grad_clip_norm": 0.1})
    trainer.save("a", tmp_path / "one", optimizer=True)
    trainer.open("b", tmp_path / "one", optimizer=True)
    outputs = []
    for model in ("a", "b"):
        outcome(trainer, model, body)
        trainer.optim_step(model, {"learning_rate": 1e-2, "grad_clip_norm": 0.1})
        outputs.append(outcome(trainer, model, body))
    assert outputs[0] == outputs[1]
    for name, value in trainer.models["a"].parameters.items():
        assert torch.equal(value, trainer.models["b"].parameters[name])
    if rank == 0:
        return
    names = set(load_file(tmp_path / "one" / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.lm_head.lora_B.weight" in names


def test_a_damaged_checkpoint_is_not_opened(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save("m", tmp_path / "c", optimizer=False)
    with pytest.raises(LossError, match="no optimizer state"):
        trainer.open("n", tmp_path / "c", optimizer=True)
    file = tmp_path / "c" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(DamagedCheckpoint, match="not what was written"):
        trainer.open("n", tmp_path / "c", optimizer=False)
    assert "n" not in trainer.models


def single_datum(**changes: Any) -> list[tuple[list[int], dict[str, Tensor]]]:
    inputs = {"target_tokens": torch.tensor([1, 2]), **changes}
    return [([5, 6], {name: value for name, value in inputs.items() if value is not None})]


RATIO = {"logprobs": torch.zeros(2), "advantages": torch.ones(2)}


@pytest.mark.parametrize(
    ("loss", "data", "config", "said"),
    [
        ("nothing", single_datum(), {}, "not offered"),
        ("stable_reinforce", single_datum(), {}, "not offered"),
        ("cross_entropy", [], {}, "no data"),
        ("cross_entropy", single_datum(target_tokens=None), {}, "needs loss_fn_inputs"),
        ("cross_entropy", single_datum(weight=torch.ones(2)), {}, "no input 'weight'"),
        ("cross_entropy", single_datum(weights=torch.ones(3)), {}, "must be the same"),
        ("cross_entropy", single_datum(target_tokens=torch.tensor([1])), {}, "has shape"),
        ("cross_entropy", single_datum(target_tokens=torch.tensor([1, 512])), {}, "0 to 511"),
        ("cross_entropy", single_datum(target_tokens=torch.tensor([1, -100])), {}, "0 to 511"),
        ("cross_entropy", single_datum(weights=torch.tensor([1, float("nan")])), {}, "not finite"),
        ("cross_entropy", single_datum(), {"beta": 1.0}, "no key 'beta'"),
        ("ppo", single_datum(), {}, "needs loss_fn_inputs"),
        ("ppo", single_datum(**RATIO), {"clip_low_threshold": float("nan")}, "finite"),
        ("dro", single_datum(**RATIO), {}, "beta"),
        (
            "importance_sampling",
            single_datum(**{**RATIO, "logprobs": torch.full((2,), -1e4)}),
            {},
            "loss is",
        ),
        ("cross_entropy", [([5] * 5000, {"target_tokens": torch.ones(5000).long()})], {}, "tokens"),
        ("cross_entropy", [([600], {"target_tokens": torch.tensor([1])})], {}, "tokens outside"),
        ("cross_entropy", [([], {"target_tokens": torch.ones(0).long()})], {}, "0 tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_and_leaves_no_gradient(
    trainer: Trainer, loss: str, data: Any, config: Any, said: str
) -> None:
    good = request("cross_entropy", single_datum())
    outcome(trainer, "m", good)
    before = trainer.models["m"].gradients
    with pytest.raises(LossError, match=said):
        # behind a datum that can be, in the batch before
        first = single_datum() * 8 if data and loss == "cross_entropy" else []
        outcome(trainer, "m", request(loss, first + data, config))
    assert trainer.models["m"].gradients is before


def test_a_sparse_tensor_may_not_claim_any_shape(trainer: Trainer) -> None:
    message = wire.message("ForwardBackwardRequest")(loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\5\0\0\0"
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype, target.sparse_csr.values = wire.INT64, b""
    target.shape.extend([1, 2**40])
    with pytest.raises(LossError, match="larger than"):
        outcome(trainer, "m", message.SerializeToString())


def test_only_what_is_asked_for_is_trained(base: Base) -> None:
    trainer = Trainer(base, name="org/tiny")
    trainer.create("m", {**LORA, "train_mlp": False, "train_unembed": False})
    names = {name.rsplit(".", 2)[-2] for name in trainer.models["m"].parameters}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(LossError, match="rank 129"):
        trainer.create("n", {**LORA, "rank": 129})
    with pytest.raises(LossError, match="rank 0 trains all"):
        trainer.create("n", {**WHOLE, "train_mlp": False})
    with pytest.raises(LossError, match="nothing to do"):
        nothing = {"train_mlp": False, "train_unembed": False, "train_attn": False}
        trainer.create("n", {**LORA, **nothing})


def test_prompt_logprobs_are_the_models_own(trainer: Trainer, tmp_path: Path) -> None:
    import numpy as np

    trainer.save("m", tmp_path / "c", optimizer=False)
    tokens = ROWS[0]
    with torch.no_grad(), trainer.base.using(trainer.models["m"].parameters):
        rows = torch.log_softmax(
            trainer.base.logits(trainer.base.hidden([torch.tensor(tokens)]))[0], -1
        ).numpy()
    targets = torch.tensor([[1, -1]] * 5)
    body = tensor(targets).SerializeToString()
    answer = asked_of(trainer, tmp_path / "c", tokens, body, top=2, last=2)
    scored = np.frombuffer(answer.prompt_logprobs, np.float32)
    assert np.isnan(scored[:4]).all()
    assert np.allclose(scored[4:], [rows[3, tokens[4]], rows[4, tokens[5]]], atol=1e-6)
    best = np.frombuffer(answer.topk_prompt_logprobs.token_ids, np.int32).reshape(6, 2)
    assert list(best[5]) == list(np.argsort(-rows[4])[:2])
    targeted = np.frombuffer(answer.target_prompt_logprobs.dense, np.float32).reshape(5, 2)
    assert np.allclose(targeted[:, 0], rows[:5, 1], atol=1e-6)
    assert not targeted[:, 1].any()
    plain = asked_of(trainer, None, tokens)
    assert not np.allclose(np.frombuffer(plain.prompt_logprobs, np.float32)[4:], scored[4:])
    none = tensor(torch.zeros((5, 0), dtype=torch.int64)).SerializeToString()
    assert asked_of(trainer, None, tokens, none).target_prompt_logprobs.dense == b""


@pytest.mark.parametrize("params", [{"beta1": 1.0}, {"eps": 0.0}, {"eps": 1e-46}])
def test_a_step_that_is_refused_drops_its_gradients(
    trainer: Trainer, params: dict[str, float]
) -> None:
    """As a model does that is rebuilt: nothing of them is in the next step."""
    data = [(ROWS[0], {"target_tokens": torch.tensor(ROWS[0])})]
    outcome(trainer, "m", request("cross_entropy", data))
    with pytest.raises(LossError, match=f"{next(iter(params))}=.* makes no sense"):
        trainer.optim_step("m", params)
    assert trainer.models["m"].gradients is None


@pytest.mark.parametrize(
    ("chosen", "memory", "sharded", "reason"),
    [
        (None, 2**31, False, ""),
        (None, 2**21, True, "of the 0 GiB of cuda:1: 2 ranks shard it"),
        (True, 2**31, True, ""),
        (False, 2**21, False, ""),
    ],
)
def test_a_base_that_is_large_for_a_gpu_is_sharded_unless_the_file_says(
    base: Base,
    monkeypatch: pytest.MonkeyPatch,
    chosen: bool | None,
    memory: int,
    sharded: bool,
    reason: str,
) -> None:
    ranks = Ranks(1, 2)
    monkeypatch.setattr(ranks, "exchange", lambda content: [b"0", content])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory, memory))
    monkeypatch.setattr(base, "ranks", ranks)
    monkeypatch.setattr(base, "device", torch.device("cuda:1"))
    assert base._shards(chosen)[0] == sharded
    assert base._shards(chosen)[1].endswith(reason) and bool(reason) == bool(
        base._shards(chosen)[1]
    )

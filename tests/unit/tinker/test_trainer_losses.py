"""Losses and their gradients, against the same computed another way."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from skyctl.tinker import wire  # noqa: E402
from skyctl.tinker.trainer import Trainer  # noqa: E402
from tests.unit.tinker.passes import ROWS, inputs_for, outcome, reference, request  # noqa: E402


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
        ("cispo", {}),
        ("dro", {"beta": 0.3}),
        ("gspo", {}),
    ],
)
def test_losses_and_their_gradients_are_those_of_the_formula(
    trainer: Trainer, loss: str, config: dict[str, float]
) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [(row, inputs_for(loss, len(row), generator)) for row in ROWS]
    total, gradients, logprobs = reference(trainer, loss, data, config)
    answer = wire.message("ForwardBackwardOutput").FromString(
        outcome(trainer, "m", request(loss, data, config))
    )
    assert answer.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert len(answer.loss_fn_outputs) == len(ROWS)
    by_token = 0.0
    for record, expected in zip(answer.loss_fn_outputs, logprobs, strict=True):
        got = torch.frombuffer(bytearray(record.fields["logprobs"].data), dtype=torch.float32)
        assert torch.allclose(got.double(), expected, atol=1e-5)
        losses = record.fields["elementwise_loss"].data
        assert len(losses) == 4 * len(expected)
        by_token += float(torch.frombuffer(bytearray(losses), dtype=torch.float32).sum())
    assert by_token == pytest.approx(total, rel=1e-5)
    model = trainer.models["m"]
    assert model.gradients is not None
    for (name, expected), got in zip(gradients.items(), model.gradients, strict=True):
        scale = float(expected.abs().max())
        assert scale > 0 or loss == "ppo", name
        assert float((got - expected).abs().max()) <= 1e-5 * max(scale, 1.0), name


def test_a_response_has_a_length_and_an_entropy_without_its_prompt(trainer: Trainer) -> None:
    """Of a prompt neither a probability nor an advantage is sent."""
    prompts, data, entropies = (0, 2, 3), [], []
    for row, prompt in zip(ROWS, prompts, strict=True):
        inputs = inputs_for("ppo", len(row), torch.Generator().manual_seed(3))
        inputs["logprobs"][:prompt] = inputs["advantages"][:prompt] = 0
        inputs["advantages"][-1] = 0  # of a token that was sampled
        data.append((row, inputs))
        with torch.no_grad(), trainer.base.using(trainer.models["m"].parameters):
            logits = trainer.base.logits(trainer.base.hidden([torch.tensor(row)]))[0]
        entropies.append(torch.distributions.Categorical(logits=logits).entropy()[prompt:].mean())
    answer = wire.message("ForwardBackwardOutput").FromString(
        outcome(trainer, "m", request("ppo", data))
    )
    lengths = [len(row) - prompt for row, prompt in zip(ROWS, prompts, strict=True)]
    assert answer.metrics["response_length:mean"] == pytest.approx(sum(lengths) / 3)
    expected = float(torch.stack(entropies).mean())
    assert answer.metrics["policy_entropy:mean"] == pytest.approx(expected, rel=1e-5)
    datum = ([5, 6], {"target_tokens": torch.tensor([1, 2]), "weights": torch.tensor([0.0, 0.5])})
    answer = wire.message("ForwardBackwardOutput").FromString(
        outcome(trainer, "m", request("cross_entropy", [datum]))
    )
    assert dict(answer.metrics).keys() == {"loss:sum", "response_length:mean"}
    assert answer.metrics["response_length:mean"] == 1


@pytest.mark.parametrize("sparse", [False, True])
def test_several_targets_of_a_token_are_summed_with_their_weights(
    trainer: Trainer, sparse: bool
) -> None:
    targets = torch.tensor([[4, 9], [0, 7], [3, 0]])
    weights = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.0, 0.25]])
    tokens = [5, 6, 7]
    body = request(
        "cross_entropy", [(tokens, {"target_tokens": targets, "weights": weights})], sparse=sparse
    )
    answer = wire.message("ForwardBackwardOutput").FromString(outcome(trainer, "m", body))
    with torch.no_grad(), trainer.base.using(trainer.models["m"].parameters):
        rows = torch.log_softmax(
            trainer.base.logits(trainer.base.hidden([torch.tensor(tokens)]))[0], -1
        )
    expected = -(rows.gather(1, targets) * weights).sum()
    assert answer.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-5)
    assert list(answer.loss_fn_outputs[0].fields["logprobs"].trailing_shape) == [2]
    assert answer.metrics["response_length:mean"] == 2
    rewarded = request("ppo", [(tokens, inputs_for("ppo", 3, torch.Generator().manual_seed(3)))])
    [answers], _ = trainer.forward_backward("m", [[body, rewarded]])  # in one pass
    assert [type(answer) for answer in answers] == [bytes] * 2

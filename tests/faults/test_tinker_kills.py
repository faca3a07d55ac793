"""kill -9 of the Tinker API or of its worker, between and during requests: the SDK goes on, and
the losses are those of an undisturbed run, to the bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

tinker = pytest.importorskip("tinker")
pytest.importorskip("torch")
from tinker import types  # noqa: E402

from skyctl.checkpoints.tiny import make_tiny_checkpoint  # noqa: E402
from tests.unit.tinker.serving import BASE, KEY, ServingProcess  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
STEPS = 8


def data(step: int) -> list[Any]:
    tokens = [(37 * step + 11 * place) % 500 for place in range(20)]
    inputs = {"target_tokens": tokens[1:]}
    return [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]


def train(serving: ServingProcess, rank: int, disturb: Callable[[int], None]) -> list[float]:
    """The loss of each step, and after them that of a model loaded from the last checkpoint."""
    with tinker.ServiceClient(base_url=serving.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(base_model=BASE, rank=rank, seed=1).result()
        losses = []
        for step in range(STEPS):
            first = trainer.forward_backward(data(step), "cross_entropy")
            second = trainer.forward_backward(data(step + 1), "cross_entropy")
            optim = trainer.optim_step(types.AdamParams(learning_rate=5e-3))
            disturb(step)
            losses += [f.result(timeout=120).metrics["loss:sum"] for f in (first, second)]
            optim.result(timeout=120)
        saved = trainer.save_state("end")
        disturb(STEPS)
        path = saved.result(timeout=120).path
        again = client.create_training_client_from_state_with_optimizer(path).result(timeout=120)
        for one in (trainer, again):
            result = one.forward(data(0), "cross_entropy").result(timeout=120)
            losses.append(result.metrics["loss:sum"])
        sampler = trainer.save_weights_and_get_sampling_client().result(timeout=120)
        prompt, params = types.ModelInput.from_ints([65]), types.SamplingParams(max_tokens=2)
        sample = sampler.sample(prompt, 1, params)
        disturb(STEPS + 1)
        assert sample.result(timeout=120).sequences[0].tokens == [65, 66]
    return losses


@pytest.mark.parametrize("rank", [4, 0])
def test_no_step_is_lost_or_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, rank: int
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", seed=1)
    # snapshots every third step: a rebuilt model repeats up to two
    serving = ServingProcess(tmp_path / "d", checkpoint, snapshot_steps=3, snapshot_share=1.0)
    request.addfinalizer(lambda: serving.kill())
    serving.start()
    undisturbed = train(serving, rank, lambda step: None)
    dice = random.Random(5)

    def disturb(step: int) -> None:
        if step in (1, 5, STEPS):
            time.sleep(dice.random() * 0.1)  # in the middle of something, or before it, or after
            serving.kill_worker()
        if step in (3, 5, STEPS + 1):
            time.sleep(dice.random() * 0.1)
            serving.kill()
            serving.start()

    assert train(serving, rank, disturb) == undisturbed
    assert undisturbed[-1] == undisturbed[-2]
    left = {path.name for path in (serving.directory / "snapshots").iterdir()}
    assert len(left) <= 4  # one for each model

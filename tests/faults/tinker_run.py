"""A training run through the tinker SDK that may be disturbed at named moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinker import types

from tests.processes.tinker.serving import BASE, KEY, ServingProcess
from tests.tinker_sdk import service_client

STEPS = 8
OF_A_STEP = ("forward", "second", "optim", "settled")
MOMENTS = ("create", *OF_A_STEP, "save", "reload", "load", "check", "sampler", "sample")
"""Right after a request was handed to the SDK, which may not have sent it yet; `settled`: when all
of a step was answered."""


def train(serving: ServingProcess, rank: int, disturb: Callable[[str, int], None]) -> list[float]:
    """The loss of each step, and after them that of the model and of one that was loaded from its
    last checkpoint. `disturb` hears the moment and the step."""
    with service_client(base_url=serving.url, api_key=KEY) as client:

        def ended(future: Any, moment: str, step: int = STEPS) -> Any:
            disturb(moment, step)
            return future.result(timeout=120)

        create = client.create_lora_training_client(base_model=BASE, rank=rank, seed=1)
        trainer = ended(create, "create", 0)
        losses = []
        for step in range(STEPS):
            first = trainer.forward_backward(_data(step), "cross_entropy")
            disturb("forward", step)
            second = trainer.forward_backward(_data(step + 1), "cross_entropy")
            disturb("second", step)
            optim = trainer.optim_step(types.AdamParams(learning_rate=5e-3))
            disturb("optim", step)
            losses += [f.result(timeout=120).metrics["loss:sum"] for f in (first, second)]
            optim.result(timeout=120)
            disturb("settled", step)
        path = ended(trainer.save_state("end"), "save").path
        ended(trainer.load_state_with_optimizer(path), "reload")
        again = ended(client.create_training_client_from_state_with_optimizer(path), "load")
        for one in (trainer, again):
            forward = one.forward(_data(0), "cross_entropy")
            losses.append(ended(forward, "check").metrics["loss:sum"])
        sampler = ended(trainer.save_weights_and_get_sampling_client(), "sampler")
        prompt, params = types.ModelInput.from_ints([65]), types.SamplingParams(max_tokens=2)
        sample = ended(sampler.sample(prompt, 1, params), "sample")
        assert sample.sequences[0].tokens == [65, 66]
    return losses


def _data(step: int) -> list[Any]:
    tokens = [(37 * step + 11 * place) % 500 for place in range(20)]
    inputs = {"target_tokens": tokens[1:]}
    return [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]

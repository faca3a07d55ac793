"""One client script of the tinker SDK against any server that speaks its API: what works, how fast.

    python -m benchmarks.tinker_beside skyctl --rounds 10        a fleet of one CPU server, started
    python -m benchmarks.tinker_beside skyrl --url http://127.0.0.1:9301 --base-model org/tiny

The second form asks a server that is there; `--key` is its key, if it wants one. Each step is a
call of the unmodified SDK and is tried whatever became of those before it. Adds a column to
benchmarks/results/tinker-beside.json: per step milliseconds (median of the rounds), or the error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import math
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.push import RESULTS, Fleet

TIMEOUT_S = 30
ROWS, TOKENS, RANK = 4, 64, 32
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


class Script:
    """The steps, in order; each keeps what later ones need in `self`."""

    def __init__(self, url: str, key: str, base: str) -> None:
        import tinker

        self.base = base
        self.client = tinker.ServiceClient(base_url=url, api_key=key)
        self.trainer: Any = None
        self.sampler: Any = None
        self.path = ""
        self.told: list[float] = []

    def data(self, loss: str = "cross_entropy") -> list[Any]:
        from tinker import types

        found = []
        for row in range(ROWS):
            tokens = [(7 * row + place) % 500 for place in range(TOKENS + 1)]
            inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
            if loss == "cross_entropy":
                inputs["weights"] = [1.0] * TOKENS
            else:
                inputs |= {"logprobs": [-6.2] * TOKENS, "advantages": [1.0] * TOKENS}
            if loss == "gspo":
                inputs["sequence_ratio_mask"] = [1.0] * TOKENS
            prompt = types.ModelInput.from_ints(tokens[:-1])
            found.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
        return found

    def capabilities(self) -> None:
        self.client.get_server_capabilities()

    def create(self) -> None:
        create = self.client.create_lora_training_client
        self.trainer = ended(create(base_model=self.base, rank=RANK, seed=1))

    def step(self) -> None:
        """A forward_backward and an optim_step, sent together."""
        from tinker import types

        forward = self.trainer.forward_backward(self.data(), "cross_entropy")
        optim = self.trainer.optim_step(types.AdamParams(learning_rate=1e-3))
        self.told.append(loss_of(forward.result(timeout=TIMEOUT_S)))
        optim.result(timeout=TIMEOUT_S)

    def loss(self, name: str) -> None:
        config = {"beta": 0.1} if name == "dro" else None
        output = self.trainer.forward(self.data(name), name, config).result(timeout=TIMEOUT_S)
        if not math.isfinite(loss_of(output)):
            raise ValueError(f"the loss is {loss_of(output)}")

    def falls(self) -> None:
        if not (len(self.told) > 1 and self.told[-1] < self.told[0]):
            raise ValueError(f"the loss does not fall: {self.told[:1]} to {self.told[-1:]}")

    def save(self) -> None:
        self.path = self.trainer.save_state("here").result(timeout=TIMEOUT_S).path

    def load(self) -> None:
        """What was saved, with its optimizer, goes on with the same loss."""
        again = ended(self.client.create_training_client_from_state_with_optimizer(self.path))
        models = (self.trainer, again)
        asked = [model.forward(self.data(), "cross_entropy") for model in models]
        before, after = (loss_of(future.result(timeout=TIMEOUT_S)) for future in asked)
        if abs(before - after) > 1e-3:
            raise ValueError(f"a loss of {before} became {after}")

    def new_sampler(self) -> None:
        self.sampler = ended(self.trainer.save_weights_and_get_sampling_client())

    def sample(self) -> None:
        from tinker import types

        params = types.SamplingParams(max_tokens=8, temperature=0.0)
        done = self.sampler.sample(types.ModelInput.from_ints([65, 66]), 1, params)
        if len(done.result(timeout=TIMEOUT_S).sequences[0].tokens) != 8:
            raise ValueError("not eight tokens")

    def logprobs(self) -> None:
        from tinker import types

        told = ended(self.sampler.compute_logprobs(types.ModelInput.from_ints([65, 66, 67])))
        if len(told) != 3:
            raise ValueError(f"{len(told)} of three tokens: {told}")

    def rest(self, name: str) -> None:
        client = self.client.create_rest_client()
        run = self.path.removeprefix("tinker://").split("/")[0]
        calls: dict[str, Callable[[], Any]] = {
            "list_checkpoints": lambda: client.list_checkpoints(run),
            "get_training_run": lambda: client.get_training_run(run),
            "publish": lambda: client.publish_checkpoint_from_tinker_path(self.path),
            "set_ttl": lambda: client.set_checkpoint_ttl_from_tinker_path(self.path, 3600),
            "delete_checkpoint": lambda: client.delete_checkpoint_from_tinker_path(self.path),
        }
        ended(calls[name]())

    def bad_model(self) -> None:
        """A model that there is not is refused within a minute, by the SDK's own error."""
        import tinker

        began = time.monotonic()
        try:
            ended(self.client.create_lora_training_client(base_model="no/such", rank=8))
        except tinker.TinkerError:
            if time.monotonic() - began > 60:
                raise
            return
        raise ValueError("it was taken")


def ended(answer: Any) -> Any:
    """Versions of the SDK differ in which calls return a future."""
    return answer.result(timeout=TIMEOUT_S) if hasattr(answer, "result") else answer


def loss_of(output: Any) -> float:
    """A loss is a sum over tokens; where a server does not tell it, that of the log-probabilities
    that it tells."""
    if "loss:sum" in output.metrics:
        return float(output.metrics["loss:sum"])
    return -sum(sum(one["logprobs"].data) for one in output.loss_fn_outputs)


def steps(script: Script, rounds: int) -> dict[str, tuple[Callable[[], None], int]]:
    """What is done, and how often."""
    found: dict[str, tuple[Callable[[], None], int]] = {
        "get_server_capabilities": (script.capabilities, 1),
        "create_lora_training_client": (script.create, 1),
        "forward_backward and optim_step": (script.step, rounds),
        "the loss falls": (script.falls, 1),
    }
    for loss in LOSSES:
        found[f"forward, {loss}"] = (lambda loss=loss: script.loss(loss), 1)  # type: ignore[misc]
    found |= {
        "save_state": (script.save, 1),
        "create_training_client_from_state_with_optimizer": (script.load, 1),
        "save_weights_and_get_sampling_client": (script.new_sampler, rounds),
        "sample, 8 tokens": (script.sample, rounds),
        "compute_logprobs": (script.logprobs, 1),
    }
    for call in ("list_checkpoints", "get_training_run", "publish", "set_ttl", "delete_checkpoint"):
        found[f"REST: {call}"] = (lambda call=call: script.rest(call), 1)  # type: ignore[misc]
    return {**found, "an unknown model is refused": (script.bad_model, 1)}


def tried(step: Callable[[], None], times: int) -> Any:
    """Milliseconds, or what was raised."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        try:
            step()
        except Exception as error:  # a column of a table
            text = " ".join(str(error).split())
            return f"{type(error).__name__}: {text}"[:200]
        taken.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(taken), 1)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    script = Script(options.url, options.key, options.base_model)
    column: dict[str, Any] = {}
    for name, (step, times) in steps(script, options.rounds).items():
        column[name] = tried(step, times)
        print(f"{name}: {column[name]}", flush=True)
    return column


def of_a_fleet(options: argparse.Namespace) -> dict[str, Any]:
    """Of a fleet that is started here, and taken down."""
    from benchmarks.tinker import BASE, access, settings
    from skyctl.checkpoints.tiny import make_tiny_checkpoint

    model = make_tiny_checkpoint(options.scratch / "model", seed=1)
    fleet = Fleet(
        options.scratch / "fleet", settings(argparse.Namespace(gpus=[], servers=1), model)
    )
    try:
        fleet.run("up")
        options.url, options.key = access(fleet)
        options.base_model = BASE
        return measured(options)
    finally:
        fleet.run("down", check=False)
        shutil.rmtree(options.scratch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinker_beside", description=__doc__)
    parser.add_argument("server", help="name of the column")
    parser.add_argument("--url", help="where it is; default: a fleet that is started for this")
    parser.add_argument("--key", default="tml-none")
    parser.add_argument("--base-model", default="org/tiny")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench-beside"))
    parser.add_argument("--out", type=Path, default=RESULTS / "tinker-beside.json")
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    column = measured(options) if options.url else of_a_fleet(options)
    result = json.loads(options.out.read_text()) if options.out.exists() else {"servers": {}}
    result["servers"][options.server] = {
        "sdk": importlib.metadata.version("tinker"),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "milliseconds": column,
    }
    options.out.write_text(json.dumps({"benchmark": "tinker-beside", **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()

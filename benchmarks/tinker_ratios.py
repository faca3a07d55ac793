"""What the Tinker API's times and disk grow with: ratios, on CPU.

    python -m benchmarks.tinker_ratios

The unmodified SDK, the real API and its training process; the servers answer fixed tokens. Writes
benchmarks/results/tinker-ratios.json. A ratio is the median of `--rounds` pairs, one after the
other, of processor times of the API and the trainer: `joined` and `not_joined` of 64
`forward_backward` of one row to one of 64 rows, by tokens of a row; `unsorted` of rows with lengths
as in reinforcement learning to the same ones sorted; `tenants` of a step of 17 and 32 models in
turn to one of 16. `ephemeral` has what is on disk of samplers without a name at each third of many
rounds of training and sampling, `finished` the snapshots that finished runs of whole models leave;
for these two the times of housekeeping are a hundredth.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from tests.processes.tinker.serving import BASE, KEY, ServingProcess
from tests.processes.tinker.steps import datum, step
from tests.tinker_sdk import service_client

RESULTS = Path(__file__).parent / "results" / "tinker-ratios.json"
FASTER = 100


_serving: list[ServingProcess] = []


def timed(work: Callable[[], object]) -> float:
    """Processor seconds of the API and its trainer, which other processes change little."""
    before = _cpu_s()
    work()
    return _cpu_s() - before


def _cpu_s() -> float:
    assert _serving[-1].process is not None
    api = psutil.Process(_serving[-1].process.pid)
    return sum(sum(p.cpu_times()[:2]) for p in (api, *api.children(recursive=True)))


def ratio(
    rounds: int, work: Callable[[], object], other: Callable[[], object], scale: float = 1.0
) -> dict[str, Any]:
    """The time of one to that of the other."""
    work()
    other()
    ratios = [round(scale * timed(work) / timed(other), 2) for _ in range(rounds)]
    return {"median": statistics.median(ratios), "all": ratios}


def rows(lengths: list[int]) -> list[Any]:
    return [
        datum([(7 * number + 11 * place) % 500 for place in range(length + 1)])
        for number, length in enumerate(lengths)
    ]


@contextmanager
def served(directory: Path, checkpoint: Path, **limits: Any) -> Iterator[ServingProcess]:
    process = ServingProcess(directory, checkpoint, **limits)
    process.start()
    _serving.append(process)
    try:
        yield process
    finally:
        process.stop()


def of_client(work: Callable[[Any, int], Any]) -> Callable[[ServingProcess, int], Any]:
    """The same, of a process of which it needs a client."""

    def of_process(process: ServingProcess, amount: int) -> Any:
        with service_client(base_url=process.url, api_key=KEY) as client:
            return work(client, amount)

    return of_process


def one_row_requests(client: Any, rounds: int) -> dict[str, Any]:
    trainer = client.create_lora_training_client(base_model=BASE, rank=8, seed=1).result()

    def together(data: list[Any]) -> None:
        trainer.forward_backward(data, "cross_entropy").result()

    def apart(data: list[Any]) -> None:
        futures = [trainer.forward_backward([row], "cross_entropy") for row in data]
        for future in futures:
            future.result()

    found = {}
    for tokens in (48, 240):
        data = rows([tokens] * 64)
        found[str(tokens)] = ratio(rounds, partial(apart, data), partial(together, data))
    return found


def unsorted(client: Any, rounds: int) -> dict[str, Any]:
    trainer = client.create_lora_training_client(base_model=BASE, rank=8, seed=1).result()
    dice = random.Random(1)
    lengths = [min(250, max(4, int(dice.lognormvariate(4.0, 0.8)))) for _ in range(96)]
    sent, ordered = rows(lengths), rows(sorted(lengths))
    return ratio(
        rounds,
        lambda: trainer.forward_backward(sent, "cross_entropy").result(),
        lambda: trainer.forward_backward(ordered, "cross_entropy").result(),
    )


def tenants(client: Any, rounds: int) -> dict[str, Any]:
    make = client.create_lora_training_client
    models = [make(base_model=BASE, rank=8, seed=seed).result() for seed in range(32)]

    def turns(count: int) -> Callable[[], object]:
        return lambda: [step(model) for model in models[:count]]

    return {str(n): ratio(rounds, turns(n), turns(16), 16 / n) for n in (17, 32)}


def size(directory: Path) -> int:
    total = 0
    for parent, _, files in os.walk(directory):  # which passes over what goes meanwhile
        for name in files:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total


def ephemeral(process: ServingProcess, rounds: int) -> dict[str, Any]:
    from tinker import types

    prompt, params = types.ModelInput.from_ints([65]), types.SamplingParams(max_tokens=1)
    stored, sizes = process.directory / "checkpoints", []
    with service_client(base_url=process.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(base_model=BASE, rank=8, seed=1).result()
        for number in range(1, rounds + 1):
            step(trainer)
            sampler = trainer.save_weights_and_get_sampling_client().result()
            sampler.sample(prompt, 1, params).result()
            if number % (rounds // 3) == 0:
                sizes.append({"adapters": len(list(stored.iterdir())), "bytes": size(stored)})
    return {"rounds": rounds, "after_each_third": sizes}


def finished(process: ServingProcess, count: int) -> dict[str, Any]:
    snapshots, most = process.directory / "snapshots", 0
    for seed in range(count):
        with service_client(base_url=process.url, api_key=KEY) as client:
            make = client.create_lora_training_client
            step(make(base_model=BASE, rank=0, seed=seed).result())
        most = max(most, len(list(snapshots.iterdir())))
    deadline = time.monotonic() + 120
    while (left := len(list(snapshots.iterdir()))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return {"runs": count, "most_snapshots": most, "left": left}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinker_ratios", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samplers", type=int, default=300)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    result: dict[str, Any] = {"benchmark": "tinker_ratios", "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="tinker-ratios-") as name:
        checkpoint = make_tiny_checkpoint(Path(name) / "tiny", seed=1)

        def measure(what: str, work: Callable[..., Any], amount: int, **limits: float) -> None:
            if options.only and what not in options.only:
                return
            with served(Path(name) / what, checkpoint, **limits) as process:
                result[what] = work(process, amount)
            print(json.dumps({what: result[what]}), flush=True)

        rounds = options.rounds
        measure("joined", of_client(one_row_requests), rounds, join_requests=True)
        measure("not_joined", of_client(one_row_requests), rounds)
        measure("unsorted", of_client(unsorted), rounds)
        measure("tenants", of_client(tenants), rounds)
        measure("ephemeral", ephemeral, options.samplers, haste=FASTER)
        often = {"snapshot_steps": 1, "snapshot_share": 1.0}
        measure("finished", finished, options.runs, haste=FASTER, **often)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

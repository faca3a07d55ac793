"""Real workers of several ranks against the trainer of one: what they compute, how they end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from skyctl.tinker import wire, worker_messages  # noqa: E402
from skyctl.tinker.adapter import Base  # noqa: E402
from skyctl.tinker.ranks import Ranks  # noqa: E402
from skyctl.tinker.trainer import Trainer  # noqa: E402
from skyctl.tinker.training_process import Refused, Worker, WorkerDied, WorkerSettings  # noqa: E402
from tests.processes.tinker.forked_ranks import fork_ranks  # noqa: E402
from tests.unit.tinker.passes import LORA, inputs_for, request  # noqa: E402

WHOLE = {**LORA, "rank": 0}
PROMPT = {"do": "prompt_logprobs", "tokens": [5, 6, 7, 8], "top": 0, "last": None, "wanted": True}
LENGTHS = (6, 30, 2, 17, 9, 30, 4)
ADAM = {"learning_rate": 3e-3, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 5.0}
RANKS = [2, 3]
MEMORY = 'fails(RuntimeError("out of memory"))'


@pytest.fixture(autouse=True)
def ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)


def body(loss: str, lengths: tuple[int, ...], **options: Any) -> bytes:
    generator = torch.Generator().manual_seed(3)
    rows = [[(7 * place + 11 * length) % 500 for place in range(length)] for length in lengths]
    data = [(row, inputs_for(loss, len(row), generator)) for row in rows]
    return request(loss, data, **options)


def outputs(answer: bytes) -> tuple[dict[str, float], list[float]]:
    """The metrics, and log-probabilities and losses of all data in their order."""
    parsed = wire.message("ForwardBackwardOutput").FromString(answer)
    records = [record.fields for record in parsed.loss_fn_outputs]
    raw = b"".join(record[name].data for record in records for name in sorted(record))
    return dict(parsed.metrics), torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist()


def scores(answer: bytes) -> tuple[dict[str, float], list[float]]:
    """Log-probabilities of the prompt's tokens but the first."""
    parsed = wire.message("SampleResponse").FromString(answer)
    return {}, torch.frombuffer(bytearray(parsed.prompt_logprobs), dtype=torch.float32)[1:].tolist()


@asynccontextmanager
async def running(checkpoint: Path, ranks: int, *, shard: bool = False) -> AsyncIterator[Worker]:
    settings = WorkerSettings(
        *("org/tiny", str(checkpoint), ["cpu"] * ranks, "float32"),
        threads=1,
        batch_tokens=64,
        checkpointing=shard,
        shard_base=shard,
    )
    worker = Worker(settings)
    try:
        await worker.ensure()
        yield worker
    finally:
        await worker.stop()


async def passes(worker: Worker, model: str, units: list[list[bytes]]) -> list[Any]:
    """The answers to each unit's requests, of slices that are as short as can be."""
    header = {"do": "forward_backward", "model": model, "slice_s": 0.0}
    header["units"] = [[len(request) for request in unit] for unit in units]
    content = b"".join(request for unit in units for request in unit)
    found: list[Any] = []
    while True:
        answer, raw = await worker.call(header, content)
        for errors, parts in zip(
            answer["errors"], worker_messages.cut(raw, answer["units"]), strict=True
        ):
            found.append([error or part for error, part in zip(errors, parts, strict=True)])
        if not answer["more"]:
            return found
        header, content = {"do": "go_on", "model": model, "slice_s": 0.0}, b""


async def trained(worker: Worker, model: str, config: Any, directory: Path) -> list[Any]:
    """What three steps answer; the model is saved after the first and the last."""
    await worker.call({"do": "create", "model": model, "config": config})
    answers: list[Any] = []
    for step in range(3):
        units = [[body("cross_entropy", LENGTHS)], [body("ppo", LENGTHS[step : step + 1])]]
        answers += [outputs(answer) for [answer] in await passes(worker, model, units)]
        stepped, _ = await worker.call({"do": "optim_step", "model": model, "params": ADAM})
        answers.append(stepped["metrics"]["grad_norm"])
        if step != 1:
            save = {"do": "save", "model": model, "optimizer": True}
            await worker.call({**save, "directory": str(directory / str(step))})
    for sampler in (None, str(directory / "0")):
        answers.append(scores((await worker.call({**PROMPT, "directory": sampler}))[1]))
    return answers


def alone(checkpoint: Path, config: Any, directory: Path) -> list[Any]:
    """As `trained`, by the trainer in this process."""
    trainer = Trainer(
        Base(str(checkpoint), device="cpu", dtype="float32"), name="org/tiny", batch_tokens=64
    )
    trainer.create("m", config)
    answers: list[Any] = []
    for step in range(3):
        units = [[body("cross_entropy", LENGTHS)], [body("ppo", LENGTHS[step : step + 1])]]
        answers += [outputs(answer) for [answer] in trainer.forward_backward("m", units)[0]]
        answers.append(trainer.optim_step("m", ADAM)["grad_norm"])
        if step != 1:
            trainer.save("m", directory / str(step), optimizer=True)
    for sampler in (None, str(directory / "0")):
        answers.append(scores(trainer.prompt_logprobs({**PROMPT, "directory": sampler}, b"")))
    return answers


def tensors(directory: Path) -> dict[str, Any]:
    """Of a model's steps: parameters, and moments, of which the first are those of a gradient."""
    return {
        f"{file.parent.name} {name}": value
        for file in (*directory.glob("*/*.safetensors"), *directory.glob("*/optimizer*"))
        for name, value in load_file(file).items()
    }


def close(expected: Any, computed: Any) -> None:
    for one, other in zip(expected, computed, strict=True):
        if isinstance(one, float):
            assert other == pytest.approx(one, rel=1e-5)
        else:
            assert other[0] == pytest.approx(one[0], rel=1e-5)
            assert other[1] == pytest.approx(one[1], rel=1e-5, abs=1e-5)


async def end(worker: Worker, rank: int) -> None:
    """Kill one rank; wait until all are gone."""
    pids = [entry["pid"] for entry in worker.report()["ranks"]]
    os.kill(pids[rank], signal.SIGKILL)
    async with asyncio.timeout(30):
        while worker.report()["ranks"] or any(map(psutil.pid_exists, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("ranks", "lives", "shard"), [(2, 2, False), (3, 1, False), (2, 1, True)])
async def test_ranks_train_as_one_does_and_after_a_death_to_the_same_bits(
    tiny_base: Path, tmp_path: Path, ranks: int, lives: int, shard: bool
) -> None:
    checkpoint = tiny_base / "org" / "tiny"
    models = {"lora": LORA, "whole": WHOLE, "other": LORA}
    runs: list[list[Any]] = []
    by_one = {name: alone(checkpoint, models[name], tmp_path / name) for name in ("lora", "whole")}
    async with running(checkpoint, ranks, shard=shard) as worker:
        assert worker.hello["sharded"] == shard
        for life in range(1, lives + 1):
            assert await worker.ensure() == life
            several = [
                trained(worker, name, config, tmp_path / f"{name}-{life}")
                for name, config in models.items()
            ]
            # in turns; in the first life one model after the other
            runs.append(
                await asyncio.gather(*several) if life > 1 else [await one for one in several]
            )
            if life < lives:
                await end(worker, rank=0)  # though nobody asks it anything
                with pytest.raises(WorkerDied):
                    await worker.call({"do": "zero_gradients", "model": "lora"})
        opened = {"model": "whole", "directory": str(tmp_path / "whole" / "2"), "optimizer": True}
        await worker.call({"do": "open", **opened})
        await worker.call({"do": "save", **opened, "directory": str(tmp_path / "opened" / "2")})
    assert runs[0] == runs[-1] and runs[0][0] == runs[0][2]
    stored, opened = tensors(tmp_path / "whole"), tensors(tmp_path / "opened")
    assert opened.keys() == {key for key in stored if key.startswith("2 ")}
    assert all(torch.equal(value, stored[key]) for key, value in opened.items())
    for (name, expected), answers in zip(by_one.items(), runs[0], strict=False):
        close(expected, answers)
        expected = tensors(tmp_path / name)
        computed, again = (tensors(tmp_path / f"{name}-{life}") for life in (1, lives))
        assert expected.keys() == computed.keys() and any("exp_avg" in key for key in expected)
        for key, value in expected.items():
            assert torch.equal(computed[key], again[key]), key
            # as a whole: AdamW divides by a gradient's size, and so the rounding of a tiny one
            assert (computed[key] - value).norm() <= 1e-5 * value.norm(), key


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_are_dealt_by_the_request_alone_and_evenly(ranks: int) -> None:
    shares = Ranks(0, ranks).deal(LENGTHS)
    assert sorted(index for share in shares for index in share) == list(range(len(LENGTHS)))
    assert shares == Ranks(ranks - 1, ranks).deal(LENGTHS)
    tokens = [sum(LENGTHS[index] for index in share) for share in shares]
    assert max(tokens) - min(tokens) <= min(LENGTHS) + max(LENGTHS) // ranks
    for share in shares:
        lengths = [LENGTHS[index] for index in share]
        assert lengths == sorted(lengths, reverse=True)
    assert Ranks(0, 5).deal([3]) == [[0], [], [], [], []]


@pytest.mark.parametrize("config", [LORA, WHOLE])
async def test_a_row_that_one_rank_refuses_is_refused_by_all_and_a_dead_one_ends_all(
    tiny_base: Path, config: dict[str, Any]
) -> None:
    tokens = [5, 6, 7]
    inputs = {"target_tokens": torch.tensor(tokens), "advantages": torch.ones(3)}
    good, infinite = ({**inputs, "logprobs": torch.full((3,), lp)} for lp in (-6.0, -1e4))
    wrong = request("importance_sampling", [(tokens, good), (tokens, infinite)])  # rank 1 has it
    fine = body("cross_entropy", LENGTHS)
    norms = []
    async with running(tiny_base / "org" / "tiny", 2) as worker:
        with pytest.raises(Refused):
            nowhere = {"directory": "/nowhere", "optimizer": True}
            await worker.call({"do": "open", "model": "m", **nowhere})
        for model, units in (("m", [[wrong], [fine, wrong], [fine]]), ("n", [[fine], [fine]])):
            await worker.call({"do": "create", "model": model, "config": config})
            answers = [answer for [answer] in await passes(worker, model, units)]
            errors = [answer for answer in answers if isinstance(answer, str)]
            assert [type(answer) for answer in answers if answer not in errors] == [bytes] * 2
            assert len({answer for answer in answers if answer not in errors}) == 1
            assert len(errors) == units.count([wrong]) * 2
            assert all("loss is -inf" in error for error in errors)
            answer, _ = await worker.call({"do": "optim_step", "model": model, "params": ADAM})
            norms.append(answer["metrics"]["grad_norm"])
        assert norms[0] == norms[1] > 0
        many = asyncio.create_task(
            passes(worker, "m", [[body("cross_entropy", LENGTHS * 40)]] * 20)
        )
        await asyncio.sleep(0.3)
        await end(worker, rank=1)  # which rank 0 waits for
        with pytest.raises(WorkerDied):
            await many


@pytest.mark.parametrize(
    ("operation", "config"),
    [("forward_backward", LORA), ("optim_step", LORA), ("forward_backward", WHOLE)],
)
async def test_a_rank_that_fails_while_another_waits_for_it_is_named_and_ends_all(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch, operation: str, config: dict[str, Any]
) -> None:
    place = "passes._logprobs" if config is WHOLE else "trainer._move"
    fork_ranks(monkeypatch, f"{place} = {MEMORY}")
    async with running(tiny_base / "org" / "tiny", 2) as worker:
        with pytest.raises(Refused, match="KeyError"):  # by both
            await passes(worker, "unknown", [[body("ppo", LENGTHS)]])
        await worker.call({"do": "create", "model": "m", "config": config})
        with pytest.raises(WorkerDied, match=r"rank 1 \(cpu\) .*out of memory"):
            async with asyncio.timeout(60):
                if operation == "optim_step":
                    await worker.call({"do": "optim_step", "model": "m", "params": ADAM})
                await passes(worker, "m", [[body("ppo", LENGTHS)]])
        assert worker.report()["ranks"] == []


async def test_a_rank_that_cannot_write_its_share_fails_the_save_alone(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch, 'trainer.save_file = fails(OSError("no space left"))')
    async with running(tiny_base / "org" / "tiny", 2) as worker:
        await worker.call({"do": "create", "model": "m", "config": WHOLE})
        await passes(worker, "m", [[body("cross_entropy", LENGTHS)]])
        await worker.call({"do": "optim_step", "model": "m", "params": ADAM})
        save = {"do": "save", "model": "m", "directory": str(tmp_path / "c" / "m")}
        with pytest.raises(Refused, match=r"rank 1: .*no space left"):
            await worker.call({**save, "optimizer": True})
        assert list((tmp_path / "c").iterdir()) == []
        await worker.call({**save, "optimizer": False})  # of which rank 1 writes no moments
        assert (tmp_path / "c" / "m" / "config.json").exists()
        await passes(worker, "m", [[body("cross_entropy", LENGTHS)]])

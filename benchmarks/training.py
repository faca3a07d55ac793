"""Tokens per second of the Tinker API's trainer, beside a plain loop of torch and peft.

    python -m benchmarks.training                          Qwen3-8B's shape on a GPU, rank 32
    python -m benchmarks.training --gpus 2                 on one GPU and on two; and what fits
    python -m benchmarks.training --gpus 4                 on one GPU and on four
    python -m benchmarks.training --gpus 2 --only small-1 small-2      these parts in a minute
    python -m benchmarks.training --gpus 2 --device cpu --shape qwen3-4-layers \
        --small qwen3-4-layers --rows 4 --tokens 64 --longest 128 256

Both train the same adapter from the same values, on the same base in bfloat16 with activations
computed again for the gradient, by cross entropy and AdamW: `forward_backward` and `optim_step` of
the training process over its socket here, `loss.backward()` and `optimizer.step()` there, with
DistributedDataParallel on several GPUs. One has the devices after the other. Losses are compared,
so that the two compute the same.

With several GPUs also: all parameters of a small model on one GPU and on all, which shard it; and
all parameters of the large one on all, where its weights, moments and gradients in float32 (16
bytes per parameter) would not fit one. With `--gpus 2` the longest row that trains in 80 GB of one
GPU. Each part is a process that ends in time; one that fails does not stop the others. Prints a
table, and writes benchmarks/results/training.json, training-N-gpus.json, or with `--only` one of
the same name and `-only`. Needs `skyctl-fleet[tinker]`, and peft for the plain loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import INDEX, SHAPES, write_checkpoint
from benchmarks.push import RESULTS, gpu_memory

LEARNING_RATE, BETAS, EPSILON = 1e-4, (0.9, 0.95), 1e-12
SAME_LOSS = 0.02
"""Relative, of two programs; bfloat16 has three digits."""
SHARDED_LOSS = 1e-3
"""Relative, of all parameters on several GPUs and on one."""
HELD_TO = 80e9
"""Bytes of a GPU that the longest row has."""
LONGEST, LONGEST_S = 32_768, 50.0
FASTER, THAN_PLAIN = {2: 1.85, 4: 3.5}, 1.2
CONTEXT = 1 << 18
LIMIT_S = {1: 240.0, 2: 360.0, 4: 480.0}
PART_S = {
    "model": 60,
    "skyctl-1": 120,
    "skyctl-2": 95,
    "skyctl-4": 110,
    "longest": 60,
    "small-1": 60,
    "small-2": 60,
}
OTHER_PARTS_S = 90
_PR_SET_PDEATHSIG = 1

Report = Callable[..., None]


def batch(options: argparse.Namespace, vocabulary: int, rows: int) -> list[list[int]]:
    """Token ids of each row, one more than are trained on."""
    return [
        [(7919 * row + 31 * place * place + 1) % vocabulary for place in range(options.tokens + 1)]
        for row in range(rows)
    ]


def request(rows: list[list[int]]) -> bytes:
    """A ForwardBackwardRequest as the SDK sends it."""
    import numpy as np

    from skyctl.tinker import wire

    message = wire.message("ForwardBackwardRequest")(
        model_id="m", seq_id=1, loss_fn="cross_entropy"
    )
    for row in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(row[:-1], np.int32).tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dtype, targets.dense = wire.INT64, np.array(row[1:], np.int64).tobytes()
        targets.shape.append(len(row) - 1)
    return bytes(message.SerializeToString())


def parameters() -> dict[str, float]:
    """Of AdamW, as the SDK sends them."""
    names = ("learning_rate", "beta1", "beta2", "eps")
    return dict(zip(names, (LEARNING_RATE, *BETAS, EPSILON), strict=True))


async def steps(
    worker: Any, model: str, config: dict[str, Any], body: bytes, count: int, adapter: Path | None
) -> dict[str, Any]:
    """Seconds and losses of each step by the training process; its adapter is saved before any."""
    from skyctl.tinker import wire

    await worker.call({"do": "create", "model": model, "config": config})
    if adapter is not None:
        save = {"do": "save", "model": model, "directory": str(adapter), "optimizer": False}
        await worker.call(save)
    seconds, losses = [], []
    for _ in range(count):
        began = time.perf_counter()
        header = {"do": "forward_backward", "model": model, "slice_s": 1e9, "units": [[len(body)]]}
        answer, content = await worker.call(header, body)
        if any(answer["errors"][0]):
            raise SystemExit(f"the trainer refused: {answer['errors']}")
        await worker.call({"do": "optim_step", "model": model, "params": parameters()})
        seconds.append(time.perf_counter() - began)
        output = wire.message("ForwardBackwardOutput").FromString(content)
        losses.append(output.metrics["loss:sum"])
    return {"seconds": seconds, "losses": losses}


def worker_of(options: argparse.Namespace, model: Path, ranks: int, dtype: str = "bfloat16") -> Any:
    """The training process with as many ranks."""
    from skyctl.tinker.training_process import Worker, WorkerSettings

    return Worker(
        WorkerSettings(
            name="base",
            path=str(model),
            devices=options.devices[:ranks],
            dtype=dtype,
            batch_tokens=options.batch_tokens,
            checkpointing=True,
        )
    )


async def adapters(options: argparse.Namespace, report: Report, ranks: int) -> None:
    """An adapter; on several GPUs then all parameters of the same base."""
    worker = worker_of(options, options.model, ranks)
    began = time.perf_counter()
    await worker.ensure()
    report(start_s=round(time.perf_counter() - began, 1))
    try:
        vocabulary = int(SHAPES[options.shape]["vocab_size"])
        body = request(batch(options, vocabulary, options.rows))
        adapter = options.scratch / "adapter" if ranks == 1 else None
        config = {"rank": options.rank, "seed": 1}
        count = options.warmups + options.steps
        report(**await steps(worker, "m", config, body, count, adapter))
        if ranks > 1:
            await worker.call({"do": "close", "model": "m"})
            body = request(batch(options, vocabulary, max(ranks, options.rows // 4)))
            whole = await steps(worker, "w", {"rank": 0, "seed": 1}, body, 3, None)
            report(whole={**whole, "memory_mib": gpu_memory()})
            began = time.perf_counter()
            save = {"do": "save", "model": "w", "directory": str(options.scratch / "whole")}
            answer, _ = await worker.call({**save, "optimizer": False})
            report(saved={"seconds": time.perf_counter() - began, "bytes": answer["size"]})
    finally:
        await worker.stop()


async def small(options: argparse.Namespace, report: Report, ranks: int) -> None:
    """All parameters of a small model, in float32; on several GPUs twice."""
    worker = worker_of(options, options.small_model, ranks, "float32")
    began = time.perf_counter()
    await worker.ensure()
    report(start_s=round(time.perf_counter() - began, 1))
    try:
        body = request(batch(options, int(SHAPES[options.small]["vocab_size"]), options.rows))
        for name in ("losses", "again")[: min(ranks, 2)]:
            done = await steps(worker, "w", {"rank": 0, "seed": 1}, body, 6, None)
            seconds = [round(step, 3) for step in done["seconds"]]
            report(**{name: done["losses"], f"{name}_s": seconds})
    finally:
        await worker.stop()


def plain(options: argparse.Namespace, report: Report, ranks: int) -> None:
    """The same adapter by torch and peft."""
    import torch

    if ranks == 1:
        _plain(0, options, 1)
    else:
        torch.multiprocessing.spawn(_plain, (options, ranks), nprocs=ranks)
    report(**json.loads((options.scratch / "plain").read_text()))


def _plain(rank: int, options: argparse.Namespace, ranks: int) -> None:
    import peft
    import torch
    import transformers

    device = options.devices[rank]
    base = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    base.to(device).gradient_checkpointing_enable({"use_reentrant": False})
    trained: Any = peft.PeftModel.from_pretrained(
        base, options.scratch / "adapter", is_trainable=True
    ).train()
    values = [value for value in trained.parameters() if value.requires_grad]
    if ranks > 1:
        gpu = device != "cpu"
        if gpu:
            torch.cuda.set_device(device)
        torch.distributed.init_process_group(
            *("nccl" if gpu else "gloo", f"file://{options.scratch / 'ddp'}"),
            rank=rank,
            world_size=ranks,
        )
        trained = torch.nn.parallel.DistributedDataParallel(
            trained, device_ids=[rank] if gpu else None
        )
    optimizer = torch.optim.AdamW(
        values, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0
    )
    vocabulary = int(SHAPES[options.shape]["vocab_size"])
    rows = torch.tensor(batch(options, vocabulary, options.rows)[rank::ranks], device=device)
    seconds, losses = [], []
    for _ in range(options.warmups + options.steps):
        began, total = time.perf_counter(), torch.zeros((), device=device)
        for some in rows.split(max(1, options.batch_tokens // options.tokens)):
            logits = trained(input_ids=some[:, :-1], use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), some[:, 1:].flatten(), reduction="sum"
            )
            (loss * ranks).backward()  # of which DistributedDataParallel takes the mean
            total += loss.detach()
            del logits, loss
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total))
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        found = {"seconds": seconds, "losses": losses, "parameters": sum(v.numel() for v in values)}
        (options.scratch / "plain").write_text(json.dumps(found))
    if ranks > 1:
        torch.distributed.destroy_process_group()


def longest(options: argparse.Namespace, report: Report) -> None:
    """Steps of an adapter over one row, of more and more tokens, in `HELD_TO` of a GPU."""
    import torch

    from skyctl.tinker.adapter import Base
    from skyctl.tinker.trainer import Trainer

    started = time.perf_counter()
    device, gpu = options.devices[-1], options.devices[-1] != "cpu"
    if gpu:
        torch.cuda.set_device(device)
        _, memory = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(HELD_TO / memory)
    base = Base(str(options.model), device=device, dtype="bfloat16", checkpointing=True)
    trainer = Trainer(base, name="base", batch_tokens=options.batch_tokens)
    trainer.create("m", {"rank": options.rank, "seed": 1})
    rows: list[list[float]] = []
    for tokens in options.longest:
        began = time.perf_counter()
        if rows and began - started + 4 * rows[-1][1] > LONGEST_S:
            break
        options.tokens = tokens
        body = request(batch(options, int(SHAPES[options.shape]["vocab_size"]), 1))
        try:
            [[answer]], _ = trainer.forward_backward("m", [[body]])
        except torch.OutOfMemoryError:
            report(out_of_memory=tokens)
            break
        if not isinstance(answer, bytes):
            raise SystemExit(f"a row of {tokens} tokens: {answer}")
        trainer.optim_step("m", parameters())
        peak = torch.cuda.max_memory_allocated() if gpu else 0
        rows.append([tokens, round(time.perf_counter() - began, 2), peak])
        report(rows=rows)


def model(options: argparse.Namespace, report: Report) -> None:
    """The checkpoints, of a context that is longer than any row."""
    for path, shape in ((options.model, options.shape), (options.small_model, options.small)):
        reader = "small" if path == options.small_model else ("skyctl", "plain", "longest")
        read = any(name.startswith(reader) for name in parts_of(options))
        if not read or (path / INDEX).exists():
            continue
        began = time.perf_counter()
        write_checkpoint(path, shape, 1)
        config = json.loads((path / "config.json").read_text())
        config["max_position_embeddings"] = CONTEXT
        (path / "config.json").write_text(json.dumps(config))
        report(**{path.name: round(time.perf_counter() - began, 1)})


KINDS: dict[str, Callable[[argparse.Namespace, Report, int], None]] = {
    "model": lambda options, report, _: model(options, report),
    "skyctl": lambda options, report, ranks: asyncio.run(adapters(options, report, ranks)),
    "plain": plain,
    "longest": lambda options, report, _: longest(options, report),
    "small": lambda options, report, ranks: asyncio.run(small(options, report, ranks)),
}
"""Of parts, named KIND or KIND-GPUS. Each is a process of its own, whose report survives it."""
ORDER = {
    1: [["model"], ["skyctl-1"], ["plain-1"]],
    # two of them have a GPU each at the same time
    2: [["model"], ["skyctl-1"], ["skyctl-2"], ["plain-2"], ["small-1", "longest"], ["small-2"]],
    4: [["model"], ["skyctl-1"], ["skyctl-4"], ["plain-4"], ["small-1"], ["small-4"]],
}


def parts_of(options: argparse.Namespace) -> list[str]:
    """The parts of this run."""
    names = [name for group in ORDER[options.gpus] for name in group]
    return [name for name in names if name == "model" or name in (options.only or names)]


def slower(options: argparse.Namespace) -> int:
    """How much more time there is on a CPU."""
    return 5 if options.device == "cpu" else 1


def run_part(options: argparse.Namespace, name: str, until: float) -> dict[str, Any]:
    """What a part reported, and how it ended."""
    out, began = options.scratch / f"{name}.json", time.monotonic()
    limit_s = min(PART_S.get(name, OTHER_PARTS_S) * slower(options), until - began)
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.training", *sys.argv[1:], "--part", name],
        start_new_session=True,
    ) as process:
        try:
            code: int | str = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            code = f"not done in {limit_s:.0f} s"
        if process.poll() is None or code:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    ended = {"ended": code, "took_s": round(time.monotonic() - began, 1)}
    return {**(json.loads(out.read_text()) if out.exists() else {}), **ended}


def main() -> int:
    """Exit status 1 when a part failed or a goal was missed."""
    options = arguments()
    if options.part:
        return part(options)
    until = time.monotonic() + (options.limit or LIMIT_S[options.gpus] * slower(options))
    options.scratch.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    try:
        with ThreadPoolExecutor() as pool:
            chosen = parts_of(options)
            for group in ORDER[options.gpus]:
                names = [name for name in group if name in chosen]
                runs = [pool.submit(run_part, options, name, until) for name in names]
                found |= dict(zip(names, [run.result() for run in runs], strict=True))
    finally:
        shutil.rmtree(options.scratch, ignore_errors=True)
    table = rows_of(options, found)
    write(options, found, table)
    width = max(len(row[0]) for row in table)
    for name, value, goal, met in table:
        sys.stdout.write(f"{name:{width}}  {value:>12}  {goal:>10}  {met}\n")
    return 0 if all(met != "no" for *_, met in table) else 1


def part(options: argparse.Namespace) -> int:
    """Be one part, and end with the run; its report is written at each addition."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    seen: dict[str, Any] = {}

    def report(**values: Any) -> None:
        seen.update(values)
        beside = options.scratch / f"{options.part}.partial"
        beside.write_text(json.dumps(seen))
        beside.rename(options.scratch / f"{options.part}.json")

    try:
        kind, _, ranks = options.part.partition("-")
        KINDS[kind](options, report, int(ranks or 0))
    except Exception as error:
        traceback.print_exc()
        report(error=repr(error)[:1000])
        return 1
    return 0


def rows_of(
    options: argparse.Namespace, found: dict[str, dict[str, Any]]
) -> list[tuple[str, str, str, str]]:
    """What was measured, its goal, and whether it is met."""
    table: list[tuple[str, str, str, str]] = []

    def add(name: str, value: float | None, goal: str = "", met: bool | None = None) -> None:
        shown = "-" if value is None else f"{value:,.4g}" if value < 1e3 else f"{value:,.0f}"
        verdict = "no" if value is None and goal else "" if met is None else "yes" if met else "no"
        table.append((name, shown, goal, verdict))

    gpus, speed = options.gpus, {name: speed_of(options, side) for name, side in found.items()}
    ours, other = f"skyctl-{gpus}", f"plain-{gpus}"
    for name in dict.fromkeys(("skyctl-1", ours, "plain-1", other)):
        if name in found:
            add(f"{name}: tokens/s", speed[name])
    if ours in found and other in found:
        value = ratio(speed[ours], speed[other])
        met = value is not None and value >= THAN_PLAIN
        add(f"{ours} over {other}", value, f">= {THAN_PLAIN}", met)
        value = apart(found[ours].get("losses"), found[other].get("losses"))
        same = value is not None and value <= SAME_LOSS
        add("  losses apart", value, f"<= {SAME_LOSS}", same)
    if gpus > 1 and ours in found and "skyctl-1" in found:
        value, goal = ratio(speed[ours], speed["skyctl-1"]), FASTER[gpus]
        add(f"{gpus} GPUs over one", value, f">= {goal}", value is not None and value >= goal)
    if "longest" in found:
        row = max((row[0] for row in found["longest"].get("rows", [])), default=None)
        add("longest row in 80 GB, tokens", row, f">= {LONGEST}", (row or 0) >= LONGEST)
    if (small := f"small-{gpus}") in found and "small-1" in found:
        value = apart(found["small-1"].get("losses"), found[small].get("losses"))
        met = value is not None and value <= SHARDED_LOSS
        add(f"small, all parameters, {gpus} over 1: apart", value, f"<= {SHARDED_LOSS}", met)
        value = apart(found[small].get("losses"), found[small].get("again"))
        add(f"  {gpus} GPUs twice: apart", value, "0", value == 0)
    if gpus > 1 and ours in found:
        whole = found[ours].get("whole", {})
        falls = bool(whole) and whole["losses"][-1] < whole["losses"][0]
        add("large, all parameters, last step: s", (whole.get("seconds") or [None])[-1])
        add("  losses fall, last over first", _last_over_first(whole), "< 1", falls)
        add("  GPU memory, MiB", max(whole.get("memory_mib") or [0]))
        add("  saved for a sampler: s", found[ours].get("saved", {}).get("seconds"))
    for name, side in found.items():
        if side["ended"]:
            table.append((f"{name}: {side.get('error', side['ended'])}"[:100], "", "", "no"))
    return table


def _last_over_first(whole: dict[str, Any]) -> float | None:
    return whole["losses"][-1] / whole["losses"][0] if whole else None


def speed_of(options: argparse.Namespace, side: dict[str, Any]) -> float | None:
    """Tokens per second of the median step."""
    seconds = side.get("seconds", [])[options.warmups :]
    return options.rows * options.tokens / statistics.median(seconds) if seconds else None


def ratio(one: float | None, other: float | None) -> float | None:
    """Of two speeds, if both were measured."""
    return one / other if one and other else None


def apart(some: Sequence[float] | None, others: Sequence[float] | None) -> float | None:
    """The largest relative difference of two runs' losses."""
    if not some or not others:
        return None
    pairs = zip(some, others, strict=False)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def write(
    options: argparse.Namespace, found: dict[str, dict[str, Any]], table: Sequence[tuple[str, ...]]
) -> None:
    """The JSON of this run."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpu = shutil.which(query[0]) and options.device != "cpu"
    result = {
        "benchmark": "training",
        "gpu": subprocess.check_output(query, text=True).splitlines()[0] if gpu else None,
        "gpus": options.gpus,
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "date": time.strftime("%Y-%m-%d"),
        "shape": options.shape,
        "small_shape": options.small,
        "rank": options.rank,
        "tokens_a_step": options.rows * options.tokens,
        "batch_tokens": options.batch_tokens,
        "table": table,
        "parts": found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    name = "training" if options.gpus == 1 else f"training-{options.gpus}-gpus"
    file = options.out / f"{name}{'-only' if options.only else ''}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """The options, with what follows from them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--small", choices=sorted(SHAPES), default="qwen3-0.5b")
    parser.add_argument("--gpus", type=int, choices=sorted(ORDER), default=1)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N for one, or cpu")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rows", type=int, help="8 for each GPU")
    parser.add_argument("--tokens", type=int, default=1024, help="of each row")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="of one forward pass")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--longest", type=int, nargs="+", default=[LONGEST, 2 * LONGEST])
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench-training"))
    parser.add_argument("--model", type=Path, help="a checkpoint of this shape that is there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", help="these parts, such as small-1 small-2")
    parser.add_argument("--limit", type=float, help="seconds by which all parts have ended")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rows = options.rows or 8 * options.gpus
    options.model = options.model or options.scratch / "model"
    options.small_model = options.scratch / "small"
    numbered = options.device == "cuda"
    options.devices = [f"cuda:{n}" if numbered else options.device for n in range(options.gpus)]
    return options


if __name__ == "__main__":
    sys.exit(main())

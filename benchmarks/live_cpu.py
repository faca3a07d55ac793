"""A sharded trainer on CPU: its live push beside `sync_weights` of its gathered state dict.

    python -m benchmarks.live_cpu [--shape tiny] [--warmups 3] [--runs 7]

Starts two real vLLM CPU servers, and two gloo ranks with FSDP 2 and float32 masters (torchrun).
After each optimizer step the weights go into the fleet by both ways in turn. At the end a fleet is
started on the checkpoint that the trainer saved, and must answer as the servers did after each of
the last two pushes. Writes benchmarks/results/live-cpu-SHAPE.json and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, write_checkpoint
from benchmarks.cpu_transports import settings, taken_on
from benchmarks.push import RESULTS, Fleet, answer, control_token
from skyctl.checkpoints.tiny import make_tiny_checkpoint

RANKS = 2
TINY = "tiny"
"""The shape that `skyctl init --tiny` makes, 2 MB: what CI pushes."""
PROMPTS = ([40, 41, 42, 43], [7, 300, 12], [100, 200, 300])
WAYS = ("live", "state_dict")


class Ranks:
    """One rank of the trainer: a model whose weights change at each step."""

    def __init__(self, model: Path) -> None:
        import torch
        import transformers
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)

    def step(self) -> None:
        """As an optimizer does: in place, on this rank's shards."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                local: Any = parameter
                local = local.to_local()
                local.add_(torch.randn_like(local), alpha=0.01)

    def gathered(self) -> dict[str, Any]:
        """The whole model, on every rank."""
        return {name: tensor.full_tensor() for name, tensor in self.model.state_dict().items()}


async def measure(options: argparse.Namespace, token: str) -> None:
    """What torchrun starts: writes what rank 0 has measured."""
    import torch.distributed as dist

    from skyctl import Fleet as LiveFleet

    rank = dist.get_rank()
    ranks = Ranks(options.model)
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    async with LiveFleet.load(options.file) as fleet, fleet.trainer(ranks.model) as live:

        async def by_live(version: str) -> Any:
            return await live.push(version)

        async def by_state_dict(version: str) -> Any:
            tensors = ranks.gathered()
            if rank == 0:
                return await fleet.sync_weights(tensors, weight_version=version, dtype="match")
            return None

        ways: dict[str, Callable[[str], Awaitable[Any]]] = dict(
            zip(WAYS, (by_live, by_state_dict), strict=True)
        )
        for number in range(options.warmups + options.runs):
            for name, way in ways.items():
                ranks.step()
                dist.barrier()
                began = time.perf_counter()
                result = await way(f"{name}-{number}")
                dist.barrier()
                if rank == 0:
                    whole = time.perf_counter() - began
                    row = {"whole_s": whole, "frozen_s": result.freeze_window_s}
                    rows[name].append(row | {"push_s": result.seconds, **result.stages})
                    print(f"{name} {number}: {rows[name][-1]}", flush=True)
        answers = {}
        for name, way in ways.items():  # the same weights by both ways
            await way(f"{name}-last")
            dist.barrier()
            if rank == 0:
                urls = (await fleet.urls()).servers.values()
                answers[name] = [
                    await asyncio.to_thread(answer, url, token, PROMPTS) for url in urls
                ]
        tensors = ranks.gathered()
        if rank == 0:
            ranks.model.save_pretrained(options.saved, state_dict=tensors)
            plan = live.plan().to_json()
            found = {"rows": rows, "answers": answers, "plan": plan}
            options.out.write_text(json.dumps(found))


def trained(fleet: Fleet, options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Run the ranks; returns what they measured."""
    out = options.scratch / "measured.json"
    token = fleet.data("urls")["access"]["control_token_file"]
    arguments = {
        "--model": model,
        "--file": fleet.directory / "fleet.yaml",
        "--saved": options.scratch / "saved",
        "--out": out,
        "--token": token,
        "--warmups": options.warmups,
        "--runs": options.runs,
    }
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "-m"]
    command += ["benchmarks.live_cpu", "--rank"]
    command += [str(part) for pair in arguments.items() for part in pair]
    subprocess.run([sys.executable, *command], env=fleet.env, check=True, timeout=1200)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def reference(options: argparse.Namespace, model: Path) -> list[int]:
    """What a server answers that was started on the checkpoint that the trainer saved."""
    saved = options.scratch / "saved"
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if (model / name).exists():
            shutil.copy(model / name, saved / name)
    started = argparse.Namespace(**{**vars(options), "servers": 1})
    fleet = Fleet(options.scratch / "reference", {**settings(started, saved), "name": "reference"})
    try:
        fleet.run("up")
        return answer(fleet.urls[0], control_token(fleet), PROMPTS)
    finally:
        fleet.run("down", check=False)


def summary(found: dict[str, Any], warmups: int) -> dict[str, Any]:
    """Medians of each way, and of live over the other."""
    medians = {
        way: {
            key: round(statistics.median(row[key] for row in found["rows"][way][warmups:]), 3)
            for key in ("whole_s", "push_s", "frozen_s")
        }
        for way in WAYS
    }
    wholes = {way: [round(row["whole_s"], 3) for row in found["rows"][way]] for way in WAYS}
    ratio = medians["live"]["whole_s"] / medians["state_dict"]["whole_s"]
    return {"medians": medians, "whole_s": wholes, "live_over_state_dict": round(ratio, 3)}


def run(options: argparse.Namespace) -> None:
    model = options.scratch / options.shape
    fleet = None
    try:
        if options.shape == TINY:
            make_tiny_checkpoint(model, seed=1)
        else:
            write_checkpoint(model, options.shape, 1)
        fleet = Fleet(options.scratch / "fleet", settings(options, model))
        fleet.run("up")
        found = trained(fleet, options, model)
        fleet.run("down", check=False)
        expected = reference(options, model)
    finally:
        if fleet is not None:
            fleet.run("down", check=False)
        shutil.rmtree(options.scratch, ignore_errors=True)
    for way, answers in found["answers"].items():
        if any(tokens != expected for tokens in answers):
            raise SystemExit(f"after {way} servers answer {answers}, one that loads it {expected}")
    result = {
        "benchmark": "live-cpu",
        "shape": options.shape,
        "servers": options.servers,
        "ranks": RANKS,
        "warmups": options.warmups,
        **taken_on(),
        "plan": found["plan"],
        "answers_equal": True,
        **summary(found, options.warmups),
    }
    (RESULTS / f"live-cpu-{options.shape}.json").write_text(json.dumps(result, indent=1) + "\n")
    for way in WAYS:
        print(f"{way:<12}", result["medians"][way])
    print("live / state_dict, whole:", result["live_over_state_dict"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_cpu")
    parser.add_argument("--shape", choices=[TINY, *sorted(SHAPES)], default=TINY)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench-live"))
    parser.add_argument("--rank", action="store_true", help="be a rank; torchrun starts these")
    for name in ("--model", "--file", "--saved", "--out", "--token"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        run(options)
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        asyncio.run(measure(options, options.token.read_text().strip()))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The first token after a sync of a LoRA adapter, beyond a usual first token, by where it was.

    python -m benchmarks.adapter_memory --gpu 0 1    # tensors on the server's GPU, and on the next
    python -m benchmarks.adapter_memory --cpu --shape tiny

Starts one server, and syncs one name between two adapters of rank 32 in each way in turn: out of a
GPU's memory, out of host memory, and from a directory that PEFT would write. `extra_s` is the time
from the call of `Fleet.adapters.sync` to the first token of a request for the name, less the median
of five first tokens before it. Every time, log-probabilities of the likeliest tokens are compared
with those of the same adapter's directory under another name: their distance must be within what
two equal requests differ by (kernels of LoRA add in any order), and that of the two adapters is far
above. Writes adapter-memory.json to --out, and prints a table last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoints import SHAPES, tensor_shapes, two_checkpoints
from benchmarks.cpu_transports import taken_on
from benchmarks.push import PROMPTS, RESULTS, Fleet, control_token, on_cpu, save, taken_on_gpus
from skyctl import Fleet as Api
from skyctl.adapters.peft import WEIGHTS
from skyctl.adapters.tensors import write_adapter
from skyctl.checkpoints.header import read_header
from skyctl.checkpoints.tiny import make_tiny_checkpoint

GIB = 1 << 30
RANK = 32
CONFIG = {"r": RANK, "lora_alpha": RANK}
USUAL = 5
REPEATED = 5
LIKELIEST = 20
EXACT = 1e-4
"""Log-probabilities that differ by less are equal."""
KEPT_TIMEOUT_S = 60.0
TINY_PROMPTS = ([40, 41, 42, 43], [7, 300, 12], [100, 200, 300])


def modules(options: argparse.Namespace, model: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all linear layers of the model."""
    if options.shape == "tiny":
        tensors = read_header(model / "model.safetensors")[1]
        shapes = [(tensor.name, tensor.shape) for tensor in tensors]
    else:
        shapes = tensor_shapes(SHAPES[options.shape])
    return [
        (name.removesuffix(".weight"), shape)
        for name, shape in shapes
        if len(shape) == 2 and "embed" not in name
    ]


def adapter(layers: list[tuple[str, tuple[int, ...]]], seed: int, device: str) -> dict[str, Any]:
    """float32, as PEFT trains it."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for module, (rows, columns) in layers:
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            values = torch.randn(shape, generator=generator, device=device) * 0.01
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    return tensors


def written(scratch: Path, contents: list[dict[str, Any]]) -> list[str]:
    """Directories of these adapters."""
    directories = []
    for number, tensors in enumerate(contents):
        directory = scratch / f"adapter-{number}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_adapter([*tensors.items()], CONFIG, directory)
        directories.append(str(directory))
    return directories


class Server:
    """What clients see of the server."""

    def __init__(self, http: httpx.AsyncClient, prompts: tuple[list[int], ...]) -> None:
        self._http = http
        self._prompts = prompts

    async def _ask(self, model: str, prompt: list[int], tokens: int) -> list[int]:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = (await self._http.post("/v1/completions", json=body)).raise_for_status().json()
        return list(answer["choices"][0]["token_ids"])

    async def first_token_s(self, model: str) -> float:
        """Of a prompt that no cached prefix helps: its length, and so its blocks, is small."""
        began = time.perf_counter()
        await self._ask(model, self._prompts[0], 1)
        return time.perf_counter() - began

    async def scores(self, model: str) -> dict[str, float]:
        """Log-probabilities of the likeliest next tokens of each prompt."""
        scores: dict[str, float] = {}
        for number, prompt in enumerate(self._prompts):
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            body |= {"logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
            answer = (await self._http.post("/v1/completions", json=body)).raise_for_status().json()
            (tokens,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            scores |= {f"{number} {token}": logprob for token, logprob in tokens.items()}
        return scores


def distance(scores: dict[str, float], others: dict[str, float]) -> float:
    """The largest difference; a token that the others lack is at most as likely as all of them."""
    least = min(others.values())
    return max(abs(score - others.get(token, least)) for token, score in scores.items())


@dataclass
class Reference:
    """What an adapter's directory answers under a name of its own."""

    scores: dict[str, float]
    """Log-probabilities."""
    spread: float
    """How far equal requests are apart."""

    @classmethod
    async def of(cls, server: Server, model: str) -> Reference:
        first, *others = [await server.scores(model) for _ in range(REPEATED)]
        return cls(first, max(distance(first, scores) for scores in others))


async def timed(api: Api, server: Server, source: Any, expected: Reference) -> dict[str, float]:
    """One sync, with its first token, and how far its answers are from the expected ones."""
    usual = statistics.median([await server.first_token_s("x") for _ in range(USUAL)])
    config = CONFIG if isinstance(source, Mapping) else None
    began = time.perf_counter()
    change = await api.adapters.sync("x", source, config)
    synced = time.perf_counter()
    first = await server.first_token_s("x")
    return {
        "distance": distance(expected.scores, await server.scores("x")),
        "extra_s": synced - began + first - usual,
        "sync_s": synced - began,
        "servers_s": change.elapsed_ms / 1000,
        "first_s": first,
        "usual_s": usual,
    }


async def until_kept(api: Api) -> float:
    """Seconds until the fleet's own copy of the last version is a file."""
    path = next(adapter.path for adapter in await api.adapters.list() if adapter.name == "x")
    began = time.perf_counter()
    while not (Path(path) / WEIGHTS).exists():
        if time.perf_counter() - began > KEPT_TIMEOUT_S:
            raise SystemExit(f"{path} was not written")
        await asyncio.sleep(0.2)
    return time.perf_counter() - began


async def measure(
    options: argparse.Namespace, fleet: Fleet, layers: list[tuple[str, tuple[int, ...]]]
) -> dict[str, Any]:
    import torch

    [url], token = fleet.urls, control_token(fleet)
    home = f"cuda:{options.gpu[0]}" if options.gpu else "cpu"
    drawn = [adapter(layers, seed, home) for seed in (1, 2)]
    directories = written(options.scratch, drawn)
    contents = [{name: tensor.cpu() for name, tensor in tensors.items()} for tensors in drawn]
    total = sum(tensor.nbytes for tensor in contents[0].values())
    ways: dict[str, list[Any]] = {}
    for gpu in options.gpu:
        device = f"cuda:{gpu}"
        ways[device] = [{n: t.to(device) for n, t in tensors.items()} for tensors in contents]
    ways |= {"host": contents, "directory": directories}
    prompts = TINY_PROMPTS if options.shape == "tiny" else PROMPTS
    headers = {"authorization": f"Bearer {token}"}
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    kept = {}
    async with (
        Api.named("bench") as api,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http,
    ):
        server = Server(http, prompts)
        expected = []
        for number, directory in enumerate(directories):
            await api.adapters.load(f"reference-{number}", directory)
            expected.append(await Reference.of(server, f"reference-{number}"))
        apart = distance(expected[0].scores, expected[1].scores)
        allowed = 2 * max(reference.spread for reference in expected) + EXACT
        print(f"equal requests differ by up to {allowed:.4f}, the adapters by {apart:.4f}")
        if apart < 3 * allowed:
            raise SystemExit("the adapters answer alike")
        await api.adapters.load("x", directories[0])
        for way, sources in ways.items():
            for run in range(options.warmups + options.runs):
                content = (run + 1) % 2
                row = await timed(api, server, sources[content], expected[content])
                row["agree"] = float(row.pop("distance") <= allowed)
                print(way, run, {key: round(value, 4) for key, value in row.items()}, flush=True)
                if run >= options.warmups:
                    rows[way].append(row)
            kept[way] = round(await until_kept(api), 2)
            if options.gpu:
                torch.cuda.synchronize()
    return {
        "bytes": total,
        "adapters_apart": round(apart, 4),
        "equal_within": round(allowed, 4),
        "ways": {
            way: {
                **{
                    key: round(statistics.median(row[key] for row in measured), 4)
                    for key in measured[0]
                },
                "agree": statistics.mean(row["agree"] for row in measured),
                "extra_runs_s": [round(row["extra_s"], 4) for row in measured],
                "kept_after_s": kept[way],
            }
            for way, measured in rows.items()
        },
    }


def settings(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    lora = {"max_adapters": 4, "max_rank": RANK}
    content = on_cpu(model, 1, lora=lora)
    if options.gpu:
        content |= {"device": "cuda", "gpus": [options.gpu[0]], "share_gpus": True}
        # of a fixed size: vLLM would measure the memory that others take and free meanwhile
        content["args"] |= {"max-num-seqs": 32, "kv-cache-memory-bytes": 2 * GIB}
        content["args"] |= {"gpu-memory-utilization": 0.08}
        content["weight_transfer"] = {"warm": False}  # no rehearsal beside what is timed
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", type=int, nargs="+", default=[], help="the server's first")
    where.add_argument("--cpu", action="store_true")
    parser.add_argument("--shape", choices=["tiny", *sorted(SHAPES)], default="qwen3-8b")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.shape == "tiny":
        model = options.scratch / "tiny"
        if not model.exists():
            make_tiny_checkpoint(model, seed=1)
    else:
        model = two_checkpoints(options.scratch, options.shape)[0]
    fleet = Fleet(options.scratch / "fleet-adapter-memory", settings(options, model))
    os.environ["SKYCTL_HOME"] = fleet.env["SKYCTL_HOME"]
    try:
        fleet.run("up")
        result = asyncio.run(measure(options, fleet, modules(options, model)))
    finally:
        fleet.run("down", check=False)
    machine = taken_on_gpus() if options.gpu else taken_on()
    save({"benchmark": "adapter-memory", **machine, **result}, directory=options.out)
    print("\nmedians, in seconds")
    print(f"{'way':<10} {'extra':>8} {'sync':>8} {'usual':>8} {'kept':>6} {'agree':>6}")
    for way, row in result["ways"].items():
        print(
            f"{way:<10} {row['extra_s']:>8.3f} {row['sync_s']:>8.3f} {row['usual_s']:>8.3f} "
            f"{row['kept_after_s']:>6.1f} {row['agree']:>6.0%}"
        )


if __name__ == "__main__":
    main()

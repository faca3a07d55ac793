"""Syncs of a LoRA adapter into real vLLM CPU servers, idle and under load: how long, what fails.

    python -m benchmarks.adapters [--servers 2] [--syncs 200] [--clients 4]

Makes a tiny model and two adapters, starts a fleet with `skyctl up`, and syncs one adapter name
between the two, from tensors in memory: idle first, then while clients ask for it by name through
the router without a break. Each answer says which version made it, and is compared with the tokens
that its adapter gave before. Writes benchmarks/results/adapters.json.

`sync_ms` is what the fleet sees: from the first request sent to a server to the last answer, two
calls to each. `call_ms` is all of `Fleet.adapters.sync`: tensors written and checked, the record on
disk, those calls. `bare_ms` is the same two calls sent to all servers at once by nobody in between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cpu_transports import taken_on
from benchmarks.push import RESULTS, Fleet, control_token, on_cpu
from skyctl import Fleet as Api
from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.engines.vllm.server import VLLMServer
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget

CONFIG = {"r": 8, "lora_alpha": 32}
PROMPT = [300, 401, 302, 455]
TOKENS = 16
MODULES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def adapter(model: Path, seed: int) -> dict[str, Any]:
    """Tensors for every linear layer of the model."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in (f"model.layers.{layer}.{one}" for layer in (0, 1) for one in MODULES):
        rows, columns = weights[f"{module}.weight"].shape
        for part, shape in (("A", (CONFIG["r"], columns)), ("B", (rows, CONFIG["r"]))):
            values = torch.randn(shape, generator=generator) * 0.2
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    return tensors


async def ask(http: httpx.AsyncClient) -> tuple[str, list[int]]:
    """The version that answered, and its tokens. Raises httpx.HTTPError; nothing is repeated."""
    body = {"model": "x", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    return answer["model"], answer["choices"][0]["token_ids"]


async def syncs(api: Api, tensors: list[dict[str, Any]], count: int) -> dict[str, list[float]]:
    """Milliseconds of each, the versions alternating between the adapters."""
    times: dict[str, list[float]] = {"sync_ms": [], "call_ms": []}
    for number in range(count):
        began = time.perf_counter()
        change = await api.adapters.sync("x", tensors[(number + 1) % 2], CONFIG)
        times["call_ms"].append((time.perf_counter() - began) * 1000)
        times["sync_ms"].append(change.elapsed_ms)
    return times


async def bare(targets: list[ServerTarget], path: str, count: int) -> list[float]:
    """Milliseconds of loading a directory and naming it, on all servers at once."""
    times = []
    async with ControlClient() as client:
        for number in range(count):
            servers = [VLLMServer(client, target) for target in targets]
            began = time.perf_counter()
            await asyncio.gather(*(s.load_adapter(f"bare@{number}", path) for s in servers))
            await asyncio.gather(*(s.name_adapter("bare", f"bare@{number}") for s in servers))
            times.append((time.perf_counter() - began) * 1000)
        await asyncio.gather(*(s.unload_adapter("bare") for s in servers))
    return times


async def measure(
    options: argparse.Namespace, model: Path, targets: list[ServerTarget], router: str, key: str
) -> dict[str, Any]:
    tensors = [adapter(model, seed) for seed in (1, 2)]
    headers = {"authorization": f"Bearer {key}"}
    async with (
        Api.named("bench") as api,
        httpx.AsyncClient(base_url=router, headers=headers, timeout=60) as http,
    ):
        change = await api.adapters.load("x", tensors[0], CONFIG)
        assert change.adapter is not None
        floor = await bare(targets, change.adapter.path, 50)
        expected: dict[int, list[int]] = {}
        for which in (0, 1):  # odd versions are the first adapter
            if which:
                await api.adapters.sync("x", tensors[1], CONFIG)
            expected[1 - which] = (await ask(http))[1]
        if expected[0] == expected[1]:
            raise SystemExit("the adapters answer alike")
        idle = await syncs(api, tensors[::-1], options.syncs // 4 * 2)
        counts = {"requests": 0, "failed": 0, "wrong": 0}
        seen: set[str] = set()
        over = asyncio.Event()

        async def client() -> None:
            while not over.is_set():
                counts["requests"] += 1
                try:
                    said, tokens = await ask(http)
                except httpx.HTTPError as error:
                    counts["failed"] += 1
                    print(f"failed: {error}")
                    continue
                seen.add(said)
                counts["wrong"] += tokens != expected[int(said.partition("@")[2]) % 2]

        clients = [asyncio.create_task(client()) for _ in range(options.clients)]
        began = time.perf_counter()
        loaded = await syncs(api, tensors[::-1], options.syncs)
        seconds = time.perf_counter() - began
        over.set()
        await asyncio.gather(*clients)
    return {
        "bare_ms": spread(floor),
        "idle": {name: spread(times) for name, times in idle.items()},
        "under_load": {name: spread(times) for name, times in loaded.items()}
        | counts
        | {"seconds": round(seconds, 1), "versions_that_answered": len(seen)},
    }


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 1),
        "p90": round(ordered[int(len(ordered) * 0.9)], 1),
        "max": round(ordered[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench-adapters"))
    options = parser.parse_args()
    fleet = None
    try:
        model = make_tiny_checkpoint(options.scratch / "model", seed=1)
        sections = {"router": {"policy": "round_robin"}, "lora": {"max_adapters": 4}}
        fleet = Fleet(options.scratch / "fleet", on_cpu(model, options.servers, **sections))
        fleet.run("up")
        urls, token = fleet.data("urls")["servers"], control_token(fleet)
        targets = [ServerTarget(name, url, token) for name, url in urls.items()]
        os.environ["SKYCTL_HOME"] = fleet.env["SKYCTL_HOME"]
        router, key = fleet.data("urls")["router"], fleet.run("urls", "--show-key").strip()
        found = asyncio.run(measure(options, model, targets, router, key))
    finally:
        if fleet is not None:
            fleet.run("down", check=False)
        shutil.rmtree(options.scratch, ignore_errors=True)
    result = {
        "benchmark": "adapters",
        "servers": options.servers,
        "clients": options.clients,
        **taken_on(),
        **found,
    }
    (RESULTS / "adapters.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Fleets whose servers are not all alike: split over GPUs, in copies, quantizing, with experts,
with tied embeddings. Each pushes the same two checkpoints, "a" and "b"."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.gpu.devices import available
from tests.gpu.quantized import COMPRESSED, FP8
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, bearer, greedy, greedy_body

MODEL = "special"
MAX_LEN = 1024
STREAMS = 64
STREAM_TOKENS = 300
_PROMPTS = [[40, 41, 42, 43], [7, 300, 12], [1000, 2000, 3000, 4000, 5000]]
_SETTLE_S = 2.0
_REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """A fleet: `groups` as the fleet file's `replicas`, on GPUs 0 to `gpus` - 1. It is started on
    `checkpoints[0]` and gets the other one pushed."""

    transport: str
    model: str
    shape: str
    groups: tuple[dict[str, Any], ...]
    gpus: int
    checkpoints: tuple[str, str]

    @property
    def copied(self) -> bool:
        """Whether a push copies every parameter: no layer is quantized, or held in ranks' parts."""
        others = {"quantization", "data_parallel_size"}
        keys = {key for group in self.groups for key in (*group, *group.get("args", {}))}
        return not others & keys and not self.shape.endswith(tuple(QUANTIZED))

    @property
    def name(self) -> str:
        kinds = [group["name"] for group in self.groups]
        return "-".join([self.transport, self.model, *kinds])


def _group(name: str, *gpus: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "gpus": [list(gpus)], "tensor_parallel_size": len(gpus), **more}


_FP8 = {"args": {"quantization": "fp8"}}
_EP = {"args": {"enable-expert-parallel": True}}
# frozen requests are computed anew after a push, in other batches than before
_EXACT = _group("whole", 0, env={"VLLM_BATCH_INVARIANT": "1"})
# a collective has each GPU once, and the sender one that no server uses; IPC shares them
_IPC = (_group("whole", 0), _group("split", 0, 1))
_NCCL = (_group("whole", 0), _group("split", 1, 2))
# two data-parallel ranks that hold half of the experts each
_RANKS = _group("ranks", 0, 1, tensor_parallel_size=1, data_parallel_size=2, **_EP)

QUANTIZED = {"-block-fp8": FP8, "-block-compressed": COMPRESSED}
"""The endings of shapes that are quantized, and how."""
_SHARED = _group("shared", 0)
CASES = (
    Case("ipc", "single", "qwen3-0.5b", (_IPC[0], _group("fp8", 0, **_FP8)), 1, ("a", "b")),
    Case("ipc", "single", "qwen3-0.5b", (_IPC[0], _SHARED), 1, ("b", "a")),
    Case("ipc", "block", "qwen3-0.5b-block-fp8", (_IPC[0],), 1, ("a", "b")),
    Case("ipc", "block", "qwen3-0.5b-block-fp8", (_IPC[0], _SHARED), 1, ("b", "a")),
    Case("ipc", "compressed", "qwen3-0.5b-block-compressed", (_IPC[0],), 1, ("a", "b")),
    Case("ipc", "compressed", "qwen3-0.5b-block-compressed", (_IPC[0], _SHARED), 1, ("b", "a")),
    Case("ipc", "experts", "qwen3-moe-0.6b-block-fp8", (_IPC[0],), 1, ("a", "b")),
    Case("ipc", "experts", "qwen3-moe-0.6b-block-fp8", (_IPC[0], _SHARED), 1, ("b", "a")),
    Case("ipc", "online", "qwen3-moe-0.6b", (_group("fp8", 0, **_FP8),), 1, ("a", "b")),
    Case("ipc", "dense", "qwen3-0.5b", (*_IPC, _group("fp8", 1, **_FP8)), 2, ("a", "b")),
    Case("ipc", "exact", "qwen3-0.5b", (_EXACT,), 1, ("a", "b")),
    Case("ipc", "moe", "qwen3-moe-0.6b", (*_IPC, _group("spread", 0, 1, **_EP)), 2, ("a", "b")),
    Case("ipc", "ranks", "qwen3-moe-0.6b", (_group("whole", 0), _RANKS), 2, ("a", "b")),
    Case("ipc", "ranks", "qwen3-moe-0.6b", (_RANKS,), 2, ("b", "a")),
    Case("ipc", "tied", "qwen3-0.5b-tied", _IPC, 2, ("a", "b")),
    Case("nccl", "dense", "qwen3-0.5b", (_group("whole", 0),), 2, ("b", "a")),
    Case("nccl", "dense", "qwen3-0.5b", (_group("fp8", 0, **_FP8), _NCCL[1]), 4, ("b", "a")),
    Case("nccl", "exact", "qwen3-0.5b", (_EXACT,), 2, ("b", "a")),
    Case("nccl", "moe", "qwen3-moe-0.6b", _NCCL, 4, ("b", "a")),
    Case("nccl", "tied", "qwen3-0.5b-tied", _NCCL, 4, ("b", "a")),
)


def _placed(group: dict[str, Any]) -> dict[str, Any]:
    """A group on the GPUs that there are."""
    found = available()
    return {**group, "gpus": [[found[gpu] for gpu in gpus] for gpus in group["gpus"]]}


class SpecialFleet(FleetCli):
    """The fleet of one case. `started`: what its servers answered before anything was pushed."""

    def __init__(self, root: Path, case: Case, checkpoints: dict[str, Path]) -> None:
        super().__init__(root / "fleet", root / "home")
        self.checkpoints = checkpoints
        self.started: dict[str, list[list[int]]] = {}
        self._ranks = {
            f"{group['name']}-0": range(group["data_parallel_size"])
            for group in case.groups
            if "data_parallel_size" in group
        }
        self.directory.mkdir(parents=True)
        settings = {
            "name": MODEL,
            "model": str(checkpoints[case.checkpoints[0]]),
            "served_model_name": MODEL,
            "replicas": [_placed(group) for group in case.groups],
            "share_gpus": case.transport == "ipc",
            "args": {
                "max-model-len": MAX_LEN,
                "enforce-eager": True,
                "gpu-memory-utilization": 0.08,
                # not what is free: other fleets start on the same GPUs meanwhile
                "kv-cache-memory-bytes": 2 << 30,
            },
            # below the size of the embeddings, so that their chunk has to grow
            "weight_transfer": {"transport": case.transport, "chunk_size": "64MiB"},
            "router": {"enabled": False},
        }
        # JSON is YAML
        (self.directory / "fleet.yaml").write_text(json.dumps(settings))

    def up(self) -> None:
        self.run("up", timeout_s=UP_TIMEOUT_S)
        self.started = self.answers()

    def push(self, name: str, *more: str, layout: str = "auto") -> dict[str, Any]:
        """Push a checkpoint, labelled with its name; the job's result."""
        result: dict[str, Any] = self.data(
            *("sync-weights", str(self.checkpoints[name]), "--weight-version", name),
            *("--mode", "keep", "--layout", layout, *more),
        )["job"]["result"]
        return result

    @property
    def servers(self) -> dict[str, str]:
        """Every server's URL by its name."""
        urls: dict[str, str] = self.data("urls")["servers"]
        return urls

    def answers(self) -> dict[str, list[list[int]]]:
        """Greedy token ids of some prompts, from each server; one after the other of its ranks."""
        key = self.control_token
        return {
            name: [
                greedy(url, MODEL, prompt, 16, key=key, rank=rank)
                for rank in self._ranks.get(name, [None])
                for prompt in _PROMPTS
            ]
            for name, url in self.servers.items()
        }

    async def streams(self, url: str, disturb: str = "") -> tuple[list[list[int]], bool]:
        """Token ids of 64 streams that begin in one step, and whether all ran when `disturb` ended.

        With `disturb`, that checkpoint is pushed as soon as each stream has said something.
        """
        prompts = [[n + 1, 2 * n + 1, 3 * n + 1, 77, 5] for n in range(STREAMS)]
        got: list[list[int]] = [[] for _ in prompts]
        ended = [False for _ in prompts]

        async with httpx.AsyncClient(
            headers=bearer(self.control_token),
            timeout=_REQUEST_TIMEOUT_S,
            limits=httpx.Limits(max_connections=STREAMS + 4),
        ) as client:

            async def read(number: int) -> None:
                body = {**greedy_body(MODEL, prompts[number], STREAM_TOKENS), "stream": True}
                async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
                    reply.raise_for_status()
                    async for line in reply.aiter_lines():
                        if line.startswith("data: {"):
                            choice = json.loads(line.removeprefix("data: "))["choices"][0]
                            got[number] += choice.get("token_ids") or []
                ended[number] = True

            (await client.post(f"{url}/pause", params={"mode": "keep"})).raise_for_status()
            reading = asyncio.gather(*(read(number) for number in range(len(prompts))))
            await asyncio.sleep(_SETTLE_S)  # all wait in the queue
            assert not any(got), "a paused server answered"
            (await client.post(f"{url}/resume")).raise_for_status()
            in_flight = True
            if disturb:
                deadline = time.monotonic() + 30
                while not all(got):
                    assert time.monotonic() < deadline, "not every stream began"
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(self.push, disturb)
                in_flight = not any(ended)
            await reading
        return got, in_flight

"""A prefill and a decode server over NIXL, behind the real router: on CPU, or on two GPUs."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.conftest import SHAPE, make_checkpoints, need_gpus
from tests.gpu.devices import available
from tests.integration.fleet_cli import FEW_BLOCKS, UP_TIMEOUT_S, FleetCli
from tests.integration.reference import answered

MODEL = "tiny"
PROMPT = " ".join(map(str, range(120)))
HELD = " ".join(map(str, range(200, 280)))  # another: a cached prefix is not transferred
LEASE_S = 6
TOKENS = 8
PREFILL, DECODE = "pd-prefill-0", "pd-decode-0"
Answers = dict[str, list[int]]
_ON_CPU: dict[str, Any] = {
    "args": {"max-model-len": 512, "enforce-eager": True, **FEW_BLOCKS},
    "env": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"},
}
_ON_GPUS: dict[str, Any] = {
    "args": {
        "max-model-len": 1024,
        "enforce-eager": True,
        "gpu-memory-utilization": 0.08,
        "kv-cache-memory-bytes": 2 << 30,
        # few: a cache whose lease is over is soon another request's
        "num-gpu-blocks-override": 80,
    },
    # the last token of a prompt is computed alone where the others were fetched
    "env": {"VLLM_BATCH_INVARIANT": "1"},
    "weight_transfer": {"transport": "ipc"},
}


class Pair(FleetCli):
    """The fleet of a pair that is started on checkpoint "a". `answer` is what each checkpoint
    answers where nothing was pushed or transferred."""

    def __init__(
        self, root: Path, checkpoints: dict[str, Path], answer: Answers, settings: dict[str, Any]
    ) -> None:
        super().__init__(root / "d", root / "home")
        self.checkpoints = checkpoints
        self.answer = answer
        self.sleeps = settings["args"].get("enable-sleep-mode", True)
        _write(self, "pd", checkpoints["a"], {"auth": "control", **settings})

    @property
    def servers(self) -> dict[str, str]:
        return dict(self.data("urls")["servers"])

    def greedy(self) -> list[int]:
        """The tokens that the fleet's users get."""
        return _greedy(self)

    def transferred(self) -> float:
        """Prompt tokens that the decode server did not compute."""
        with urllib.request.urlopen(f"{self.servers[DECODE]}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        name = "vllm:prompt_tokens_by_source_total"
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(name) and 'source="external_kv_transfer"' in line
        )

    def hold(self) -> dict[str, Any]:
        """Have the prefill server keep a KV cache that nobody fetches; what a decode server is
        told."""
        kept = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {"model": MODEL, "prompt": HELD, "max_tokens": 1, "kv_transfer_params": kept}
        told: dict[str, Any] = asked(self.servers[PREFILL], body)["kv_transfer_params"]
        assert told["remote_block_ids"]
        return told

    def kill(self, name: str) -> None:
        status = self.data("status")
        found = [row["pid"] for row in status["replicas"] if row["name"] == name]
        os.kill(found[0] if found else status["router"]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self.data("status")["health"] == "healthy" and time.monotonic() < deadline:
            time.sleep(0.2)


def on_cpu(root: Path, checkpoints: dict[str, Path]) -> Pair:
    """The right answers are those of transformers."""
    answer = {
        name: answered(checkpoint, PROMPT, TOKENS) for name, checkpoint in checkpoints.items()
    }
    replicas = [{"role": "prefill"}, {"role": "decode"}]
    return Pair(root, checkpoints, answer, {"replicas": replicas, **_ON_CPU})


def started_on_gpus(root: Path) -> tuple[dict[str, Path], Answers]:
    """Two checkpoints, and what a server answers that was started on it."""
    need_gpus(2)
    checkpoints = make_checkpoints(root, SHAPE)

    def started(name: str, gpu: int) -> list[int]:
        fleet = FleetCli(root / name, root / f"{name}-home")
        _write(fleet, name, checkpoints[name], {**_ON_GPUS, "gpus": [gpu]})
        try:
            fleet.run("up", timeout_s=UP_TIMEOUT_S)
            return _greedy(fleet)
        finally:
            fleet.run("down", expect=None)

    with ThreadPoolExecutor(len(checkpoints)) as pool:
        answers = list(pool.map(started, checkpoints, available()))
    assert answers[0] != answers[1]
    return checkpoints, dict(zip(checkpoints, answers, strict=True))


def on_gpus(
    root: Path,
    checkpoints: dict[str, Path],
    answer: Answers,
    gpus: list[int],
    args: dict[str, Any],
) -> Pair:
    """A GPU for each server: half of them prefill, half decode. `args`: more of vLLM's. Where
    servers cannot sleep, their KV caches are ordinary memory of CUDA.
    """
    half = len(gpus) // 2
    groups = {"prefill": gpus[:half], "decode": gpus[half:]}
    replicas = [
        {"role": role, "count": half, "gpus": [[gpu] for gpu in chosen]}
        for role, chosen in groups.items()
    ]
    settings = {"replicas": replicas, **_ON_GPUS, "args": {**_ON_GPUS["args"], **args}}
    return Pair(root, checkpoints, answer, settings)


def _write(fleet: FleetCli, name: str, model: Path, settings: dict[str, Any]) -> None:
    fleet.directory.mkdir(parents=True)
    known = {"name": name, "model": str(model), "served_model_name": MODEL, **settings}
    (fleet.directory / "fleet.yaml").write_text(json.dumps(known))  # JSON is YAML


def _greedy(fleet: FleetCli) -> list[int]:
    found = fleet.data("generate", PROMPT, "--max-tokens", str(TOKENS), "--temperature", "0")
    return list(found["results"][0]["token_ids"])


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """A completion, straight from a server."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)  # type: ignore[no-any-return]

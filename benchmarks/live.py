"""Pushes out of a trainer's GPUs, beside vLLM's own sender from the same tensors in the same run.

    python -m benchmarks.live --case dense-other --out DIR
    python -m benchmarks.live --case small-same --runs 3 --warmups 1 --native-runs 0
    python -m benchmarks.live --case dense-other --phase up …    (then --phase push, --phase down)
    python -m benchmarks.live --case dense-other --phase write    the checkpoints alone

A trainer of one process or more has the contents of two checkpoints in its GPUs' memory, in turn,
and pushes by `Fleet.trainer`. After every push the servers answer prompts, which are compared with
those of servers that were started on that checkpoint. Writes one JSON object to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.checkpoints import two_checkpoints
from benchmarks.push import (
    AS_INSTALLED,
    RESULTS,
    Fleet,
    answer,
    control_token,
    fleet_of,
    gpu_memory,
    save,
    start,
    taken_on_gpus,
    wait_until_warm,
)

SCRATCH = Path("/dev/shm/skyctl-bench")
GIB = 1 << 30
TRAINER_TIMEOUT_S = 240


@dataclass(frozen=True)
class Case:
    """A trainer and the fleet that it pushes into."""

    shape: str
    """Of the checkpoints."""
    trainer: tuple[int, ...]
    """The GPU of each of its ranks."""
    servers: tuple[tuple[int, ...], ...] = ((0,),)
    """The GPUs of each server."""
    dtype: str = "bfloat16"
    """What the trainer has its weights as."""
    transport: str = "nccl"
    """The fleet's, which decides how vLLM's own sender gets in."""
    reference: tuple[int, ...] = (0,)
    """The GPUs of the server that is started on the second checkpoint; none if another case has
    one that answers alike."""
    answers: str = ""
    """That case."""
    fleet: str = ""
    """The case whose fleet this one pushes into; its own if empty."""
    stage: str = "auto"
    """As `Trainer.push` takes it."""
    live: Any = "auto"
    """The transport, as `Fleet.trainer` takes it."""
    differing: int = 0
    """Shards in which the checkpoints differ; 0: all."""
    args: dict[str, Any] = field(default_factory=dict)
    """More arguments of vLLM."""

    def beginning_at(self, first: int) -> Case:
        """The same, with GPU `first` in place of GPU 0, and so on."""
        return replace(
            self,
            trainer=tuple(gpu + first for gpu in self.trainer),
            servers=tuple(tuple(gpu + first for gpu in gpus) for gpus in self.servers),
            reference=tuple(gpu + first for gpu in self.reference),
        )


_TWO = ((0,), (1,))
_FOUR = ((0,), (1,), (2,), (3,))
CASES = {
    "small-same": Case("qwen3-0.5b", (0,), transport="ipc"),
    "small-other": Case("qwen3-0.5b", (1,)),
    "small-other-nccl": Case("qwen3-0.5b", (1,), fleet="small-other", live="nccl"),
    "small-fsdp": Case("qwen3-0.5b", (0, 1), _TWO, transport="ipc"),
    "small-fsdp-tp2": Case("qwen3-0.5b", (0, 1), ((0, 1),), transport="ipc", reference=(0, 1)),
    "dense-other": Case("qwen3-8b", (1,)),
    "dense-other-straight": Case("qwen3-8b", (1,), fleet="dense-other", stage="stream"),
    "dense-other-nccl": Case("qwen3-8b", (1,), fleet="dense-other", live="nccl"),
    "dense-other-nccl-straight": Case(
        "qwen3-8b", (1,), fleet="dense-other", live="nccl", stage="stream"
    ),
    "dense-same": Case("qwen3-8b", (0,), transport="ipc"),
    "moe-other": Case("qwen3-30b-a3b-24", (1,), differing=2),
    "moe-other-nccl": Case("qwen3-30b-a3b-24", (1,), differing=2, fleet="moe-other", live="nccl"),
    "fsdp": Case("qwen3-8b", (0, 1), _TWO, reference=(), answers="dense-other", transport="ipc"),
    "fsdp-float32": Case(
        *("qwen3-8b", (0, 1), _TWO, "float32", "ipc"),
        reference=(),
        answers="dense-other",
        fleet="fsdp",
    ),
    "fsdp-tp2": Case("qwen3-8b", (0, 1), ((0, 1),), transport="ipc", reference=(0, 1)),
    "fsdp4": Case(
        *("qwen3-8b", (0, 1, 2, 3), _FOUR, "bfloat16", "ipc"),
        reference=(),
        answers="dense-other",
    ),
    "fsdp4-tp2": Case(
        *("qwen3-8b", (0, 1, 2, 3), ((0, 1), (2, 3)), "bfloat16", "ipc"),
        reference=(2, 3),
    ),
    "fsdp2-tp2-apart": Case(
        *("qwen3-8b", (0, 1), ((2, 3),), "bfloat16", "ipc"),
        reference=(2, 3),
    ),
    "fsdp2-tp2-apart-nccl": Case(
        *("qwen3-8b", (0, 1), ((2, 3),), "bfloat16", "ipc"),
        reference=(),
        answers="fsdp2-tp2-apart",
        fleet="fsdp2-tp2-apart",
        live="nccl",
    ),
    "moe-ep4": Case(
        *("qwen3-30b-a3b-24", (0, 1, 2, 3), ((0, 1, 2, 3),), "bfloat16", "ipc"),
        reference=(0, 1, 2, 3),
        differing=2,
        args={"enable-expert-parallel": True},
    ),
}


# --- the trainer, in processes of its own ---------------------------------------------------------


def module_of(headers: dict[str, list[int]], dtype: Any) -> Any:
    """A module with these parameters on the meta device, nested as their names say."""
    import torch

    root = torch.nn.Module()
    for name, shape in headers.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        empty = torch.empty(shape, dtype=dtype, device="meta")
        module.register_parameter(last, torch.nn.Parameter(empty, requires_grad=False))
    return root


class Weights:
    """One rank's part of a model, with the content of either of two checkpoints."""

    def __init__(self, checkpoints: list[Path], dtype: str, world_size: int) -> None:
        import torch

        self._files = [_slices(checkpoint) for checkpoint in checkpoints]
        headers = {name: part.get_shape() for name, part in self._files[0].items()}
        self.model = module_of(headers, getattr(torch, dtype))
        if world_size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cuda", (world_size,))
            for layer in self.model.model.layers.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cuda")
        self._now = 0
        self.local = {n: _local(p) for n, p in self.model.named_parameters()}
        self._other = {}
        for name, local in self.local.items():
            local.copy_(self._read(0, name))
            self._other[name] = self._read(1, name)
        torch.cuda.synchronize()

    def show(self, number: int) -> None:
        """Have the content of this checkpoint, where the tensors are."""
        import torch

        if number != self._now:
            for name, local in self.local.items():
                before = local.to(torch.bfloat16, copy=True)
                local.copy_(self._other[name])
                self._other[name].copy_(before)
            self._now = number
        torch.cuda.synchronize()

    def _read(self, number: int, name: str) -> Any:
        import torch

        part, local = self._files[number][name], self.local[name]
        rows = part.get_shape()[0]
        if local.shape[0] == rows:
            return part[:].cuda()
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        step = -(-rows // ranks)
        return part[rank * step : min(rows, (rank + 1) * step)].cuda()


def _local(parameter: Any) -> Any:
    """What this rank has of a parameter: memory, not a copy."""
    plain = parameter.detach()
    return plain.to_local() if hasattr(plain, "to_local") else plain


def _slices(checkpoint: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        file = safe_open(shard, framework="pt")
        found.update({name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118
    return found


def trainer_main(options: argparse.Namespace) -> None:
    """Reads lines: `push CONTENT LABEL`, `native CONTENT`, and answers each with a line of JSON."""
    import torch

    import skyctl

    case = CASES[options.case]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    if world_size > 1:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
    checkpoints = two_checkpoints(options.scratch, case.shape, differing=case.differing)
    began = time.perf_counter()
    weights = Weights(checkpoints, case.dtype, world_size)
    own = torch.cuda.memory_allocated()
    shards = sum(local.nbytes for local in weights.local.values())
    loaded = time.perf_counter()
    live = skyctl.Fleet.load("fleet.yaml").trainer(weights.model, transport=case.live).blocking()
    opened = time.perf_counter()
    reached = _points_noted()
    print(f"loaded in {loaded - began:.1f} s, opened in {opened - loaded:.2f} s", file=sys.stderr)
    native = None
    for line in sys.stdin:
        verb, content, *label = line.split()
        weights.show(int(content))
        if world_size > 1:
            torch.distributed.barrier()
        torch.cuda.reset_peak_memory_stats()
        reached.clear()
        began = time.perf_counter()
        told: dict[str, Any] = {}
        if verb == "push":
            told = live.push(label[0], stage=case.stage).to_json()
        else:
            native = native or _native(case, weights, rank, checkpoints[0])
            native()
        told["wall_s"] = time.perf_counter() - began
        times = [began, *reached.values()]
        steps = zip(reached, times, times[1:], strict=False)
        told["until_s"] = {point: end - before for point, before, end in steps}
        told["extra_bytes"] = torch.cuda.max_memory_allocated() - own
        told["own_bytes"] = shards
        told["plan"] = live.plan().to_json()
        if rank == 0:
            print("RESULT " + json.dumps(told), flush=True)
    live.close()


def _points_noted() -> dict[str, float]:
    """When this rank last came to each point of its push, filled as it does."""
    reached: dict[str, float] = {}

    def note(point: str) -> None:
        reached.pop(point, None)  # in a second attempt
        reached[point] = time.perf_counter()

    for module in ("trainer", "live"):
        mock.patch(f"skyctl.api.{module}.reached", note).start()
    return reached


def _native(case: Case, weights: Weights, rank: int, first: Path) -> Any:
    """One push by vLLM's own sender; FSDP's shards are gathered tensor by tensor."""
    import torch

    from benchmarks.native_sender import (
        EngineSender,
        metadata,
        post,
        send_token_with_every_request,
    )

    parameters = dict(weights.model.named_parameters())
    dtypes = {name: dtype for name, dtype, _ in metadata(first)}  # vLLM wants this order and these

    def memory() -> Any:
        for name, dtype in dtypes.items():
            plain = parameters[name].detach().to(getattr(torch, dtype))
            yield name, plain.full_tensor() if hasattr(plain, "full_tensor") else plain

    url, token = os.environ["BENCHMARK_URL"], os.environ["BENCHMARK_TOKEN"]
    assert token
    send_token_with_every_request()
    workers = len(case.servers[0])
    sender = EngineSender(case.transport, url, workers, "cuda:0", first, memory, rank)

    def push() -> None:
        if not rank:
            post(url, "/pause", mode="keep")
        sender.send()
        if not rank:
            post(url, "/resume")

    return push


class Trainer:
    """The processes of a trainer, driven by lines."""

    def __init__(self, case: Case, fleet: Fleet, options: argparse.Namespace) -> None:
        command = [
            *(sys.executable, "-m", "benchmarks.live", "--role", "trainer"),
            *("--case", options.case, "--scratch", str(options.scratch)),
        ]
        self._log = (options.out / f"live-{options.case}-trainer.log").open("w")
        self._ranks = []
        for rank, gpu in enumerate(case.trainer):
            env = {
                **os.environ,
                **AS_INSTALLED,
                "SKYCTL_HOME": fleet.env["SKYCTL_HOME"],
                "CUDA_VISIBLE_DEVICES": str(gpu),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(case.trainer)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29655",
                "BENCHMARK_URL": fleet.urls[0],
                "BENCHMARK_TOKEN": control_token(fleet),
                "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}",
                **dict(pair.split("=", 1) for pair in options.trainer_env),
            }
            self._ranks.append(
                subprocess.Popen(
                    command,
                    cwd=fleet.directory,
                    env=env,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else self._log,
                    stderr=self._log,
                )
            )

    def ask(self, *words: str) -> dict[str, Any]:
        """Every rank carries out a line; the answer of rank 0."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(" ".join(words) + "\n")
            process.stdin.flush()
        first = self._ranks[0].stdout
        assert first is not None
        for line in first:
            if line.startswith("RESULT "):
                told: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return told
            self._log.write(line)
        self.close()
        raise SystemExit(f"the trainer has ended: see {self._log.name}")

    def close(self) -> None:
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


# --- the benchmark --------------------------------------------------------------------------------


def fleet_options(case: Case, options: argparse.Namespace) -> argparse.Namespace:
    """What `benchmarks.push` makes fleets by."""
    arguments = {"max-num-seqs": 32, "kv-cache-memory-bytes": 2 * GIB, **case.args}
    return argparse.Namespace(
        name=f"live-{case.fleet or options.case}",
        scratch=options.scratch,
        servers=len(case.servers),
        tensor_parallel_size=len(case.servers[0]),
        gpus=[gpu for gpus in case.servers for gpu in gpus],
        reference=list(case.reference),
        share_gpus=True,
        transport=case.transport,
        chunk_size="1GiB",
        memory=0.08,
        cuda_graphs=False,
        warm="true",
        args=json.dumps(arguments),
    )


def measure(case: Case, fleet: Fleet, options: argparse.Namespace) -> None:
    """Saves the result."""
    checkpoints = two_checkpoints(options.scratch, case.shape, differing=case.differing)
    known = json.loads((fleet.directory / "answers.json").read_text())
    if case.answers:
        other = fleet.directory.with_name(f"fleet-live-{case.answers}") / "answers.json"
        known |= json.loads(other.read_text())
    urls, token = fleet.urls, control_token(fleet)
    print(f"warm after {wait_until_warm(fleet):.1f} s", flush=True)
    before = gpu_memory()
    trainer = Trainer(case, fleet, options)
    pushes, native = [], []
    try:
        for run in range(options.warmups + options.runs):
            content = (run + 1) % 2
            told = trainer.ask("push", str(content), f"step-{run}")
            stages = " ".join(f"{k} {v:.3f}" for k, v in told["stages"].items())
            print(
                f"push {run}: {told['wall_s']:.3f} s, of that {told['seconds']:.3f}, frozen "
                f"{told['freeze_window_s']:.3f}, {told['transport']}, over its shards "
                f"{told['extra_bytes'] / told['own_bytes']:.1%}; {stages}",
                flush=True,
            )
            print("  until", " ".join(f"{k} {v:.3f}" for k, v in told["until_s"].items()))
            for note in told["notes"]:
                print(f"  {note}", flush=True)
            compare(urls, token, known[str(checkpoints[content])])
            pushes.append({**told, "gpu_memory_mib": gpu_memory()})
        print(json.dumps(pushes[-1]["plan"])[:400], pushes[-1]["compared"], flush=True)
        natives = 1 + options.native_runs if options.native_runs and case.live == "auto" else 0
        for run in range(natives):
            content = run % 2
            told = trainer.ask("native", str(content))
            print(f"vLLM's own sender: {told['wall_s']:.3f} s", flush=True)
            compare(urls[:1], token, known[str(checkpoints[content])])
            native.append(told["wall_s"])
    finally:
        trainer.close()
        if len(pushes) > options.warmups:  # also where vLLM's sender has failed
            save(
                record(options, pushes[options.warmups :], native[1:], before),
                directory=options.out,
            )


def compare(urls: list[str], token: str, expected: list[int]) -> None:
    """Stop where a server answers otherwise than one that was started on the same weights."""
    for url in urls:
        if (tokens := answer(url, token)) != expected:
            raise SystemExit(f"{url} answers {tokens}, not {expected}")


def record(
    options: argparse.Namespace,
    pushes: list[dict[str, Any]],
    native: list[float],
    memory: list[int],
) -> dict[str, Any]:
    def middle(key: str) -> float:
        return round(float(statistics.median(push[key] for push in pushes)), 4)

    stages = pushes[0]["stages"]
    return {
        "benchmark": f"live-{options.case}",
        **taken_on_gpus(),
        "whole_s": middle("wall_s"),
        "whole_runs_s": [round(push["wall_s"], 4) for push in pushes],
        "push_s": middle("seconds"),
        "frozen_s": middle("freeze_window_s"),
        "frozen_runs_s": [round(push["freeze_window_s"], 4) for push in pushes],
        "stages_s": {
            name: round(statistics.median(push["stages"].get(name, 0.0) for push in pushes), 4)
            for name in stages
        },
        "rank_0_until_s": {
            point: round(statistics.median(push["until_s"].get(point, 0.0) for push in pushes), 4)
            for point in pushes[0]["until_s"]
        },
        "transport": pushes[-1]["plan"]["transport"] or pushes[-1]["transport"],
        "beside": f"live-{CASES[options.case].fleet}" if CASES[options.case].fleet else "",
        "compared": pushes[-1]["compared"],
        "total_bytes": pushes[-1]["total_bytes"],
        "extra_share_of_a_rank": round(
            max(push["extra_bytes"] / push["own_bytes"] for push in pushes), 4
        ),
        "balance": pushes[-1]["plan"]["balance"],
        "gpu_memory_mib": {"before": memory, "after": pushes[-1]["gpu_memory_mib"]},
        "native_runs_s": [round(seconds, 4) for seconds in native],
        "native_median_s": round(statistics.median(native), 4) if native else None,
        "options": f"{CASES[options.case]} {options.trainer_env}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--role", choices=["benchmark", "trainer"], default="benchmark")
    parser.add_argument("--phase", choices=["all", "write", "up", "push", "down"], default="all")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--native-runs", type=int, default=5, help="of vLLM's own sender; 0: none")
    parser.add_argument("--first-gpu", type=int, default=0, help="begin with this one")
    parser.add_argument("--trainer-env", nargs="*", default=[], help="NAME=VALUE for the trainer")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.role == "trainer":
        trainer_main(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    case = CASES[options.case].beginning_at(options.first_gpu)
    checkpoints = two_checkpoints(options.scratch, case.shape, differing=case.differing)
    wanted = fleet_options(case, options)
    fleet = fleet_of(wanted, checkpoints[0], wanted.gpus)
    try:
        if options.phase in ("all", "up"):
            start(fleet, checkpoints, wanted)
        if options.phase in ("all", "push"):
            measure(case, fleet, options)
    finally:
        if options.phase in ("all", "down"):
            fleet.run("down", check=False)


if __name__ == "__main__":
    main()

"""Push a Qwen3-8B-shaped checkpoint into real vLLM GPU servers, beside vLLM's own sender.

    python -m benchmarks.push --transport ipc --servers 1
    python -m benchmarks.push --transport nccl --servers 3 --runs 5 --shape qwen3-8b
    python -m benchmarks.push --transport ipc --phase up …   (then --phase push, --phase down)

Makes two checkpoints in --scratch (default /dev/shm), starts a fleet with `skyctl up`, pushes them
in turn, lets vLLM's own sender push them to the first server, and takes the fleet down. With
--reference, another server is started on the second checkpoint first; every answer after a push is
compared with those of the servers that were started on what was pushed. Writes one JSON object to
--out (default benchmarks/results/). `python -m benchmarks.push_matrix` runs many of these.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, two_checkpoints

RESULTS = Path(__file__).parent / "results"
COMMAND_TIMEOUT_S = 400
AS_INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}
"""A package that is installed is compiled: without this a command would compile it each time."""
PROMPTS = ([40, 41, 42, 43], [7, 300, 12], [1000, 2000, 3000])
STREAMS = 16
STREAM_TOKENS = 1500
WARM_TIMEOUT_S = 90


class Fleet:
    """A fleet in a directory of its own, driven by the skyctl command."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # JSON is YAML
        (directory / "fleet.yaml").write_text(json.dumps(settings))
        self.env = {**os.environ, **AS_INSTALLED, "SKYCTL_HOME": str(directory / "state")}

    def run(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "skyctl", *arguments],
            cwd=self.directory,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if check and done.returncode:
            if arguments[0] == "up":
                print(self._errors(), file=sys.stderr)
            raise SystemExit(f"skyctl {' '.join(arguments)}: {done.returncode}\n{done.stdout}")
        return done.stdout

    def _errors(self) -> str:
        """What servers' logs have of errors: an engine says why it failed before its server."""
        lines = self.run("logs", "-n", "2000", check=False).splitlines()
        return "\n".join(line for line in lines if " ERROR " in line or "Error: " in line)[-8000:]

    def data(self, *arguments: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.run(*arguments, "--json"))["data"]
        return data

    @property
    def urls(self) -> list[str]:
        """The servers'."""
        return list(self.data("urls")["servers"].values())


def on_cpu(model: Path, servers: int, **more: Any) -> dict[str, Any]:
    """The content of a fleet file: servers on CPU behind no router, unless `more` says so."""
    return {
        "name": "bench",
        "model": str(model),
        "served_model_name": "bench",
        "replicas": servers,
        "device": "cpu",
        "args": {"max-model-len": 1024, "enforce-eager": True},
        "router": {"enabled": False},
        **more,
    }


ONE_SERVER: dict[str, Any] = {
    "servers": 1,
    "tensor_parallel_size": 1,
    "gpus": [0],
    "memory": 0.3,
    "cuda_graphs": False,
    "warm": "false",
}
"""Options of other benchmarks' fleets, beside `transport` and `chunk_size`."""


def settings(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The fleet file of this run."""
    gpus = options.gpus or list(range(options.servers))
    return {
        "name": "bench",
        "model": str(model),
        "served_model_name": "bench",
        "replicas": options.servers,
        "device": "cuda",
        "gpus": gpus,
        "share_gpus": len(gpus) < options.servers,
        "tensor_parallel_size": options.tensor_parallel_size,
        "args": {
            "max-model-len": 2048,
            "enforce-eager": not options.cuda_graphs,
            "gpu-memory-utilization": options.memory,
        },
        "weight_transfer": {
            "transport": options.transport,
            "chunk_size": options.chunk_size,
            "warm": options.warm == "true",
        },
        "router": {"enabled": False},
    }


def fleet_of(options: argparse.Namespace, model: Path, gpus: list[int], suffix: str = "") -> Fleet:
    """A fleet of this run that is started on a checkpoint, on these GPUs."""
    found = settings(argparse.Namespace(**{**vars(options), "gpus": gpus}), model)
    found["args"] |= json.loads(options.args)
    found["share_gpus"] |= options.share_gpus
    found["weight_transfer"]["warm"] &= suffix != "reference"
    return Fleet(options.scratch / "-".join(filter(None, ("fleet", options.name, suffix))), found)


def control_token(fleet: Fleet) -> str:
    """What the servers ask for; only in our environment and in headers from here on."""
    return Path(fleet.data("urls")["access"]["control_token_file"]).read_text().strip()


def answer(url: str, token: str, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[int]:
    """Greedy token ids of fixed prompts, one by one: the sums of a batch depend on its size."""
    import httpx

    found: list[int] = []
    for prompt in prompts:
        body = {
            "model": "bench",
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"Authorization": f"Bearer {token}"}
        reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        reply.raise_for_status()
        found += reply.json()["choices"][0]["token_ids"]
    return found


def start(fleet: Fleet, checkpoints: list[Path], options: argparse.Namespace) -> None:
    """Bring the fleet up, and note what servers answer that are started on each checkpoint."""
    reference = None
    if options.reference:
        reference = fleet_of(options, checkpoints[1], options.reference, "reference")
    starting = threading.Thread(target=reference.run, args=("up",)) if reference else None
    if starting:
        starting.start()
    try:
        fleet.run("up")
        found = {str(checkpoints[0]): answer(fleet.urls[0], control_token(fleet))}
        if starting and reference:
            starting.join()
            found[str(checkpoints[1])] = answer(reference.urls[0], control_token(reference))
    finally:
        if starting and reference:
            starting.join()
            reference.run("down", check=False)
    (fleet.directory / "answers.json").write_text(json.dumps(found))
    if len({tuple(tokens) for tokens in found.values()}) != len(found):
        raise SystemExit(f"the checkpoints answer alike: {found}")


def wait_until_warm(fleet: Fleet) -> float:
    """Seconds until the supervisor has rehearsed a push: it puts the servers' digests on record."""
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_TIMEOUT_S:
        if all(server["weights_digest"] for server in fleet.data("weights")["servers"]):
            return time.perf_counter() - began
        time.sleep(0.5)
    raise SystemExit("no push was rehearsed: see skyctl logs supervisor")


def skyctl_pushes(
    fleet: Fleet, checkpoints: list[Path], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Results of every push, with `command_wall_s`; the first `warmups` of them do not count."""
    urls, token = fleet.urls, control_token(fleet)
    known = json.loads((fleet.directory / "answers.json").read_text())
    if options.answers and options.answers.exists():
        known = {**json.loads(options.answers.read_text()), **known}
    started = set(known)
    results = []
    for run in range(options.warmups + options.runs):
        checkpoint = str(checkpoints[(run + 1) % len(checkpoints)])
        arguments = ["--layout", options.layout, *options.push_options.split()]
        began = time.perf_counter()
        result = fleet.data("sync-weights", checkpoint, *arguments)["job"]["result"]
        wall_s = time.perf_counter() - began
        stages = " ".join(f"{name} {value:.3f}" for name, value in result["stages"].items())
        print(
            f"push {run}: {result['seconds']:.3f} s, command {wall_s:.2f}, frozen "
            f"{result['freeze_window_s']:.3f}, copied {result['layout_share']:.0%}; {stages}",
            flush=True,
        )
        for note in result["notes"]:
            print(f"  {note}", flush=True)
        for url in urls:
            tokens = answer(url, token)
            if known.setdefault(checkpoint, tokens) != tokens:
                raise SystemExit(f"{url} answers {tokens} with {checkpoint}, not {known}")
        results.append({**result, "command_wall_s": wall_s, "gpu_memory_mib": gpu_memory()})
    print(f"  answers as of servers started on {len(started)} of {len(known)} checkpoints")
    return results


def gpu_memory() -> list[int]:
    """MiB in use on every GPU; [] without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(query, text=True).split()]


def serving_ratio(
    fleet: Fleet, checkpoint: Path, options: argparse.Namespace, *more: str
) -> float | None:
    """Tokens per second of streams while a push stages its checkpoint, over those in the second
    before it. The streams run on the first server."""
    url, token = fleet.urls[0], control_token(fleet)
    times: list[float] = []
    stop = threading.Event()
    readers = [
        threading.Thread(target=_stream, args=(url, token, number, times, stop), daemon=True)
        for number in range(STREAMS)
    ]
    for reader in readers:
        reader.start()
    time.sleep(2.5)  # they begin one after the other
    arguments = ["--layout", options.layout, *options.push_options.split(), *more]
    job = fleet.data("sync-weights", str(checkpoint), *arguments)["job"]
    stop.set()
    for reader in readers:
        reader.join(30)
    asked = job["created_at"]
    stages = fleet.data("jobs", "show", job["id"])["timeline"]["stages"]
    staging = next(stage for stage in stages if stage["name"] == "stage")
    began, ended = asked + staging["begin_s"], asked + staging["end_s"]
    before = sum(asked - 1.0 <= at < asked for at in times)
    during = sum(began <= at < ended for at in times) / (ended - began)
    print(
        f"serving {' '.join(more)}: {before} tokens/s, staging took {ended - began:.2f} s, ", end=""
    )
    print(f"{during:.0f} tokens/s meanwhile, frozen {job['result']['freeze_window_s']:.3f}")
    return round(during / before, 3) if before else None


def _stream(url: str, token: str, number: int, times: list[float], stop: threading.Event) -> None:
    """Note when each piece of one long answer comes."""
    import httpx

    body = {
        "model": "bench",
        "prompt": [number + 1, 2 * number + 1, 77],
        "max_tokens": STREAM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
    ) as reply:
        for line in reply.iter_lines():
            if stop.is_set():
                return
            if line.startswith("data: {"):
                times.append(time.time())


def native_pushes(
    fleet: Fleet, checkpoints: list[Path], options: argparse.Namespace
) -> dict[str, Any]:
    """vLLM's own sender on the first server, from a GPU of its own for NCCL."""
    servers = options.gpus or range(options.servers * options.tensor_parallel_size)
    own = next(gpu for gpu in range(len(servers) + 1) if gpu not in servers)
    device = own if options.transport == "nccl" else servers[0]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.native_sender"),
            *("--backend", options.transport, "--url", fleet.urls[0]),
            *("--device", f"cuda:{device}"),
            *("--world-size", str(options.tensor_parallel_size)),
            *("--runs", str(options.native_runs), "--warmups", "1"),
            *map(str, checkpoints),
        ],
        env={**os.environ, "BENCHMARK_TOKEN": control_token(fleet)},
        text=True,
        capture_output=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        print(done.stderr[-3000:])
        return {"runs_s": [], "vllm": ""}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def taken_on_gpus() -> dict[str, Any]:
    """The machine of a result, and the day."""
    import torch
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(0),
        "machine": f"{torch.cuda.device_count()} GPUs, {os.cpu_count()} processors",
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
    }


def figures(pushes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the results of these pushes come to: each one's times, and the medians."""

    def every(key: str) -> list[float]:
        return [round(push[key], 4) for push in pushes]

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 4)

    return {
        "bytes": pushes[0]["total_bytes"],
        "runs_s": every("seconds"),
        "median_s": statistics.median(every("seconds")),
        "command_wall_s": median(every("command_wall_s")),
        "freeze_window_s": median(every("freeze_window_s")),
        "freeze_windows_s": every("freeze_window_s"),
        "stages_s": {
            name: median(push["stages"].get(name, 0.0) for push in pushes)
            for name in pushes[0]["stages"]
        },
        "layout_share": median(every("layout_share")),
    }


def record(
    options: argparse.Namespace,
    pushes: list[dict[str, Any]],
    native: dict[str, Any],
    serving: dict[str, float | None],
) -> dict[str, Any]:
    """One object per figure, as benchmarks/results/ keeps them."""
    counted = pushes[options.warmups :]
    return {
        "benchmark": options.name or f"{options.transport}-{options.servers}",
        **taken_on_gpus(),
        **figures(counted),
        "first_push_s": round(pushes[0]["command_wall_s"], 4),
        "native_runs_s": native["runs_s"],
        "native_median_s": statistics.median(native["runs_s"]) if native["runs_s"] else None,
        "gpu_memory_mib": {
            "first": counted[0]["gpu_memory_mib"],
            "last": counted[-1]["gpu_memory_mib"],
        },
        "warm": options.warm == "true",
        "serving_ratio": serving.get(""),
        "serving_ratio_limited": {rate: ratio for rate, ratio in serving.items() if rate},
        "options": (
            f"{options.shape} chunk {options.chunk_size}, layout {options.layout}, "
            f"{options.warmups} warm-ups, "
            f"{'CUDA graphs' if options.cuda_graphs else 'eager'} {options.args} "
            f"{options.push_options}"
        ).strip(),
    }


def save(result: dict[str, Any], label: str = "", directory: Path = RESULTS) -> None:
    """Write a result where benchmarks/results/ keeps it, and print it."""
    text = json.dumps(result, indent=1)
    directory.mkdir(exist_ok=True, parents=True)
    (directory / f"{result['benchmark']}{label}.json").write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=["ipc", "nccl"], required=True)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpus", type=int, nargs="*", help="GPUs of the servers")
    parser.add_argument("--share-gpus", action="store_true", help="other fleets are on them, too")
    parser.add_argument("--memory", type=float, default=0.3, help="gpu-memory-utilization")
    parser.add_argument("--args", default="{}", help="more arguments of vLLM, as JSON")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--differing", type=int, default=0, help="shards that are not shared")
    parser.add_argument("--chunk-size", default="1GiB")
    parser.add_argument("--layout", choices=["auto", "runtime", "checkpoint"], default="auto")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--push-options", default="", help="more options of sync-weights")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--reference", type=int, nargs="*", help="GPUs of a server on the second")
    parser.add_argument("--answers", type=Path, help="those of servers that were started alike")
    parser.add_argument("--warm", choices=["true", "false"], default="true")
    parser.add_argument("--serving", action="store_true", help="one more push, beside streams")
    parser.add_argument("--stage-rates", nargs="*", default=[], help="the same, bounded to these")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="", help="of the result")
    parser.add_argument("--label", default="", help="more of the result's file name")
    parser.add_argument("--native-runs", type=int, default=5, help="of vLLM's own sender; 0: none")
    parser.add_argument("--keep-up", action="store_true", help="leave the fleet running")
    parser.add_argument("--phase", choices=["all", "up", "push", "down"], default="all")
    options = parser.parse_args()

    checkpoints = two_checkpoints(options.scratch, options.shape, differing=options.differing)
    gpus = options.gpus or list(range(options.servers * options.tensor_parallel_size))
    fleet = fleet_of(options, checkpoints[0], gpus)
    try:
        if options.phase in ("all", "up"):
            start(fleet, checkpoints, options)
        if options.phase in ("up", "down"):
            return
        if options.warm == "true" and options.phase in ("all", "push"):
            print(f"warm after {wait_until_warm(fleet):.1f} s", flush=True)
        pushes = skyctl_pushes(fleet, checkpoints, options)
        serving: dict[str, float | None] = {}
        for number, rate in enumerate(("", *options.stage_rates) if options.serving else ()):
            more = ("--stage-rate", rate) if rate else ()
            checkpoint = checkpoints[(options.warmups + options.runs + 1 + number) % 2]
            serving[rate] = serving_ratio(fleet, checkpoint, options, *more)
        native: dict[str, Any] = {"runs_s": [], "vllm": ""}
        if options.native_runs:
            native = native_pushes(fleet, checkpoints, options)
        save(record(options, pushes, native, serving), options.label, options.out)
    finally:
        if not options.keep_up and options.phase in ("all", "down"):
            fleet.run("down", check=False)


if __name__ == "__main__":
    main()

"""vLLM's own trainer engines and client, unmodified: through the fleet URL, and into a server.

    python -m benchmarks.trainer_url --shape qwen3-8b --backends ipc --out DIR     one GPU
    python -m benchmarks.trainer_url --shape qwen3-8b --out DIR    NCCL, if there are two, and IPC
    python -m benchmarks.trainer_url --device cpu --out DIR        files in place of a GPU's memory

Each backend has two servers on the first GPU: that of a fleet with `trainer:`, started on one
checkpoint, and a plain vLLM, started on the other. One trainer has the contents of both in turn (on
the second GPU by NCCL, on the servers' by IPC: four times the model in one GPU's memory) and sends
them both ways: to the URL of the fleet, and to the plain server between /pause and /resume. Which
way is first alternates, with each content alike. After each, the server answers as the one that was
started on that checkpoint, or it counts as unlike. `frozen` is skyctl's freeze window there, and
from /pause to /resume here; `paired` is the median of the ratios within each run. The last update
goes into a fleet that sleeps, but for its weights. Once --seconds for each backend are over, starts
included, no run begins after the fifth that counts. Writes a JSON object for each to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoints import SHAPES, two_checkpoints
from benchmarks.live import GIB, SCRATCH, Weights
from benchmarks.native_sender import EngineSender, free_port, metadata, post
from benchmarks.push import (
    AS_INSTALLED,
    ONE_SERVER,
    Fleet,
    answer,
    control_token,
    gpu_memory,
    on_cpu,
    save,
    settings,
    taken_on_gpus,
)
from skyctl.engines.vllm.command import server_flags

REPOSITORY = Path(__file__).parents[1]
WAYS = ("fleet URL", "directly")
PROMPTS = ([40, 41, 42, 43], [7, 300, 12], [1000, 2000, 3000])
STARTED_WITHIN_S = 170.0
FEWEST_RUNS = 5
"""Of each way, after the warm-ups."""


# --- the trainer, in a process of its own ---------------------------------------------------------


def trainer_main(options: argparse.Namespace) -> None:
    """Sends all runs; prints a line of JSON after each."""
    import torch

    checkpoints = two_checkpoints(options.scratch, options.shape)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    weights = Weights(checkpoints, "bfloat16", 1) if options.device == "cuda" else None
    urls = dict(zip(WAYS, options.urls, strict=True))
    seconds_of = _timed_calls()
    sends = {way: _sender(options, url, checkpoints, weights) for way, url in urls.items()}
    content = 0
    for run in range(options.warmups + options.runs):
        if run >= options.warmups + FEWEST_RUNS and time.time() > options.until:
            break
        content = 1 - content
        if weights is not None:
            weights.show(content)
        for way in WAYS if run // 2 % 2 else reversed(WAYS):
            alone = way == "directly"
            seconds_of.clear()
            began = time.perf_counter()
            if alone:
                post(urls[way], "/pause", mode="keep")
            sends[way](content)
            if alone:
                post(urls[way], "/resume")
            seconds = time.perf_counter() - began
            tokens = answer(options.servers[WAYS.index(way)], os.environ["BENCHMARK_TOKEN"])
            line = {"run": run, "way": way, "content": content, "seconds": seconds}
            print(json.dumps({**line, "calls": seconds_of, "tokens": tokens}), flush=True)
    if weights is not None:
        url, content = options.urls[0], 1 - content
        weights.show(content)
        post(url, "/sleep", level=1)
        post(url, "/wake_up", tags="weights")
        sends["fleet URL"](content)
        post(url, "/wake_up", tags="kv_cache")
        tokens = answer(options.servers[0], os.environ["BENCHMARK_TOKEN"])
        print(json.dumps({"way": "asleep", "content": content, "tokens": tokens}), flush=True)


def _timed_calls() -> dict[str, float]:
    """The seconds that calls of vLLM's client take from now on, by route."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    bare, seconds_of = HTTPVLLMWeightSyncClient._post, defaultdict[str, float](float)

    def timed(self: Any, path: str, json: dict[str, Any] | None = None) -> None:
        began = time.perf_counter()
        bare(self, path, json)
        seconds_of[path] += time.perf_counter() - began

    HTTPVLLMWeightSyncClient._post = timed
    return seconds_of


def _sender(
    options: argparse.Namespace, url: str, checkpoints: list[Path], weights: Weights | None
) -> Callable[[int], None]:
    """vLLM's trainer engine over its HTTP client: sends either content."""
    if weights is None:
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

        from tests.integration.files_backend import FilesTrainer, FilesTrainerInit

        files = FilesTrainer.trainer_init(
            FilesTrainerInit(rank=0), client=HTTPVLLMWeightSyncClient(url)
        )
        return lambda content: files.send(None, checkpoints[content])
    parameters = dict(weights.model.named_parameters())
    names = [name for name, _, _ in metadata(checkpoints[0])]  # the order that vLLM is told

    def memory() -> Iterator[tuple[str, Any]]:
        for name in names:
            yield name, parameters[name].detach()

    sender = EngineSender(options.backends[0], url, 1, "cuda:0", checkpoints[0], memory)
    return lambda content: sender.send()


# --- the servers ----------------------------------------------------------------------------------


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What both servers are started with."""
    if options.device == "cpu":
        extension = "tests.integration.files_backend.FilesExtension"
        dtype = {"dtype": "float32"}  # skyctl's default there
        return {
            "max-model-len": 1024,
            "enforce-eager": True,
            "worker-extension-cls": extension,
        } | dtype
    return {
        "max-model-len": 2048,
        "max-num-seqs": 32,
        "enforce-eager": True,
        "gpu-memory-utilization": 0.08,
        "kv-cache-memory-bytes": 2 * GIB,
    }


def fleet_of(options: argparse.Namespace, backend: str, model: Path, port: int) -> Fleet:
    """One server and the fleet URL, at this port."""
    more = {"args": arguments(options), "trainer": {"port": port}}
    if options.device == "cpu":
        transfer = {"backend": backend}
        env = {"PYTHONPATH": str(REPOSITORY), "VLLM_CPU_KVCACHE_SPACE": "1"}
        content = on_cpu(model, 1, weight_transfer=transfer, env=env, **more)
    else:
        given = {**ONE_SERVER, "transport": backend, "chunk_size": "1GiB"}
        content = {**settings(argparse.Namespace(**given), model), "share_gpus": True, **more}
    return Fleet(options.scratch / f"fleet-url-{backend}", content)


@contextmanager
def plain_server(
    options: argparse.Namespace, backend: str, model: Path, port: int
) -> Iterator[subprocess.Popen[bytes]]:
    """vLLM without skyctl, until the end of the block."""
    transfer = json.dumps({"backend": backend})
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port)),
        *("--weight-transfer-config", transfer, *server_flags(arguments(options))),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "CUDA_VISIBLE_DEVICES": "0" if options.device == "cuda" else "",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if backend == "ipc" else "0",
    }
    log = (options.out / f"trainer-url-{backend}-plain.log").open("wb")
    # a session of its own: vLLM's processes end together
    with (
        log,
        subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit("the plain server did not start: see its log")


# --- the benchmark --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Both servers of one backend."""

    backend: str
    """The trainer's and theirs."""
    fleet: Fleet
    """That of the fleet URL, with one server."""
    port: int
    """The fleet URL's."""
    plain: str
    """The other server's URL."""

    def started(self, options: argparse.Namespace, model: Path, stack: ExitStack) -> None:
        """Bring both up; they end with the stack. Raises SystemExit: one did not start."""
        port = int(self.plain.rpartition(":")[2])
        process = stack.enter_context(plain_server(options, self.backend, model, port))
        stack.callback(self.fleet.run, "down", "--drain-timeout", "0", check=False)
        self.fleet.run("up", "--timeout", str(int(STARTED_WITHIN_S)))
        until_healthy(process, self.plain)

    def sent(self, options: argparse.Namespace, until: float) -> dict[str, Any]:
        """What came of all runs of a trainer, none of which begins after `until`."""
        token = control_token(self.fleet)
        servers = [self.fleet.urls[0], self.plain]
        expected = [answer(url, token, PROMPTS) for url in servers]
        if expected[0] == expected[1]:
            raise SystemExit("the checkpoints answer alike")
        began = time.time()
        lines = self._trained(options, servers, token, until)
        jobs = [job for job in self.fleet.data("jobs")["jobs"] if job["result"]]
        jobs = sorted(
            (job for job in jobs if job["created_at"] > began), key=lambda job: job["created_at"]
        )
        ways: dict[str, list[dict[str, Any]]] = {
            way: [line for line in lines if line["way"] == way] for way in WAYS
        }
        for line, job in zip(ways["fleet URL"], jobs, strict=False):
            line |= {"frozen": job["result"]["freeze_window_s"], "stages": job["result"]["stages"]}
        counted = {way: ways[way][options.warmups :] for way in WAYS}
        frozen = {
            way: [line.get("frozen", line["seconds"]) for line in counted[way]] for way in WAYS
        }
        medians = {way: statistics.median(frozen[way]) for way in WAYS}
        return {
            "pushes": len(lines),
            "answers_unlike_a_server_started_on_them": sum(
                line["tokens"] != expected[line["content"]] for line in lines
            ),
            "frozen_s": {way: [round(value, 4) for value in frozen[way]] for way in WAYS},
            "frozen_median_s": {way: round(medians[way], 4) for way in WAYS},
            "frozen_ratio": round(medians["fleet URL"] / medians["directly"], 3),
            "frozen_ratio_paired": round(
                statistics.median(
                    url / direct for url, direct in zip(*frozen.values(), strict=True)
                ),
                3,
            ),
            "whole_median_s": {
                way: round(statistics.median(line["seconds"] for line in counted[way]), 4)
                for way in WAYS
            },
            "stages_median_s": medians_of(line["stages"] for line in counted["fleet URL"]),
            "calls_median_s": {
                way: medians_of(line["calls"] for line in counted[way]) for way in WAYS
            },
            "updated_asleep": any(line["way"] == "asleep" for line in lines),
        }

    def _trained(
        self, options: argparse.Namespace, servers: list[str], token: str, until: float
    ) -> list[dict[str, Any]]:
        """A line of each run, by a trainer's process that ended well."""
        log = options.out / f"trainer-url-{self.backend}-trainer.log"
        command = [
            *(sys.executable, "-m", "benchmarks.trainer_url", "--role", "trainer"),
            *("--device", options.device, "--shape", options.shape, "--backends", self.backend),
            *("--urls", f"http://trainer:{token}@127.0.0.1:{self.port}", self.plain),
            *("--servers", *servers, "--scratch", str(options.scratch), "--out", str(options.out)),
            *("--runs", str(options.runs), "--warmups", str(options.warmups)),
            *("--until", str(until)),
        ]
        env = {
            **os.environ,
            **AS_INSTALLED,
            "BENCHMARK_TOKEN": token,
            "CUDA_VISIBLE_DEVICES": "1" if self.backend == "nccl" else "0",
            "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        }
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=errors
            ) as process,
        ):
            try:
                out, _ = process.communicate(timeout=options.trainer_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if process.returncode:
            print(f"the trainer ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        least = options.warmups + min(options.runs, FEWEST_RUNS)
        if sum(line["way"] == WAYS[0] for line in lines) < least or process.returncode:
            raise SystemExit(f"the trainer has made {len(lines)} updates only")
        return lines


def medians_of(times: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The median of each name's seconds."""
    rows = list(times)
    return {
        name: round(statistics.median(row.get(name, 0.0) for row in rows), 4) for name in rows[0]
    }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A result for each backend that could be measured; the reasons of the others are printed."""
    checkpoints = two_checkpoints(options.scratch, options.shape)
    with ExitStack() as stack, ThreadPoolExecutor(len(options.backends)) as pool:
        starting, until = {}, time.time()
        for backend in options.backends:
            port = free_port()
            fleet = fleet_of(options, backend, checkpoints[0], port)
            pair = Pair(backend, fleet, port, f"http://127.0.0.1:{free_port()}")
            starting[pair] = pool.submit(pair.started, options, checkpoints[1], stack)
        for pair, started in starting.items():
            try:
                started.result()
            except (SystemExit, subprocess.SubprocessError) as error:
                print(f"{pair.backend}: {error}", flush=True)
        for pair in (pair for pair, started in starting.items() if not started.exception()):
            until += options.seconds
            try:
                yield {"benchmark": f"trainer-url-{pair.backend}", **pair.sent(options, until)}
            except (SystemExit, subprocess.SubprocessError, httpx.HTTPError) as error:
                print(f"{pair.backend}: {error}", flush=True)


def interrupt_once(*_: object) -> None:
    """`timeout` interrupts twice, and the servers are to be taken down in between."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """Exit status 1 when a backend was not measured, or a server answered otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backends", choices=["nccl", "ipc", "files"], nargs="+")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--runs", type=int, default=16, help="of each way, at most")
    parser.add_argument("--warmups", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=140.0, help="for each backend")
    parser.add_argument("--trainer-timeout-s", type=float, default=120.0)
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--role", choices=["benchmark", "trainer"], default="benchmark")
    parser.add_argument("--urls", nargs=2, default=[], help="of --role trainer")
    parser.add_argument("--servers", nargs=2, default=[], help="of --role trainer")
    parser.add_argument("--until", type=float, default=0.0, help="of --role trainer")
    options = parser.parse_args()
    on_gpus = options.device == "cuda"
    usual = ["nccl", "ipc"] if len(gpu_memory()) > 1 else ["ipc"]  # NCCL wants a GPU for each rank
    options.backends = options.backends or (usual if on_gpus else ["files"])
    options.shape = options.shape or ("qwen3-0.5b" if on_gpus else "qwen3-4-layers")
    if options.role == "trainer":
        trainer_main(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, interrupt_once)
    results = []
    with suppress(KeyboardInterrupt):  # what was measured until then is the result
        for result in measure(options):
            machine = taken_on_gpus() if on_gpus else {"cpus": os.cpu_count()}
            shape = {"options": f"{options.shape}, {options.warmups} warm-ups"}
            save({**result, **machine, **shape}, f"-{options.shape}", options.out)
            results.append(result)
    columns = f"{'frozen, fleet URL':>18}{'directly':>10}{'ratio':>7}{'paired':>8}{'runs':>6}"
    print(f"{'backend':<9}{columns}{'unlike':>8}{'asleep':>9}")
    for result in results:
        backend = result["benchmark"].removeprefix("trainer-url-")
        there, here = result["frozen_median_s"].values()
        unlike = result["answers_unlike_a_server_started_on_them"]
        asleep = "updated" if result["updated_asleep"] else "no"
        runs = len(result["frozen_s"][WAYS[0]])
        ratios = f"{result['frozen_ratio']:>7.3f}{result['frozen_ratio_paired']:>8.3f}"
        print(f"{backend:<9}{there:>18.4f}{here:>10.4f}{ratios}{runs:>6}{unlike:>8}{asleep:>9}")
        print(f"{'':<9}its stages: {result['stages_median_s']}")
        for way, calls in result["calls_median_s"].items():
            print(f"{'':<9}calls, {way}: {calls}")
    wrong = sum(result["answers_unlike_a_server_started_on_them"] for result in results)
    return int(bool(wrong) or len(results) < len(options.backends))


if __name__ == "__main__":
    sys.exit(main())

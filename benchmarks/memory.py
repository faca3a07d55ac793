"""Memory that a push takes, beside what `--dry-run` says; and what is left after many pushes.

    python -m benchmarks.memory --transport ipc
    python -m benchmarks.memory --transport nccl --pushes 20

One server on GPU 0 (over NCCL the sender has GPU 1). For each way of staging, --repeats times:
`--dry-run` is asked, a push is made by a sender that was just started, and the memory in use on
every GPU and on the host is sampled until the push is over; the peak is what was in use more than
before the sender came. The first of them finds servers that took no push yet; in the others workers
take nothing more. What a host has in use moves by itself, by tens of MiB on one with many CPUs.
Then the same fleet takes --pushes pushes, and the memory in use after the second and after the last
is compared. Writes benchmarks/results/memory-<transport>.json.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoints import SHAPES, two_checkpoints
from benchmarks.push import ONE_SERVER, Fleet, save, settings
from skyctl.push.forecast import WORKER_HOST

MIB = 1 << 20
SAMPLE_S = 0.002
STAGES = ("gpu", "stream")


class Sampler:
    """The most memory in use on each GPU and on the host while the block runs, in bytes."""

    def __init__(self, gpus: int) -> None:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(gpus)]
        self.peak: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def now(self) -> list[int]:
        """GPUs in order, then the host."""
        gpus = [int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles]
        memory = psutil.virtual_memory()
        return [*gpus, memory.total - memory.available]

    def __enter__(self) -> Sampler:
        self.peak = self.now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.peak = [max(pair) for pair in zip(self.peak, self.now(), strict=True)]


def senders(state: str) -> list[psutil.Process]:
    """The sender processes of the fleets below this state directory."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("SKYCTL_HOME") == state
            if ours and "skyctl.transfer.sender" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def end_idle_sender(state: str) -> None:
    """So that the next push starts one: its context and its group count, too."""
    for process in senders(state):
        with suppress(psutil.Error):  # it ended by itself
            process.kill()
            process.wait(10)


def unique_host_bytes(processes: list[psutil.Process]) -> int:
    """Host memory that no other process shares with these."""
    return sum(int(process.memory_full_info().uss) for process in processes)


def compare(
    fleet: Fleet, checkpoint: Path, stage: str, gpus: int, *, first: bool
) -> dict[str, Any]:
    """One push with a new sender: what was predicted and what was seen, in MiB."""
    push = ("sync-weights", str(checkpoint), "--stage", stage)
    plan = fleet.data(*push, "--dry-run")["job"]["result"]["plan"]
    (forecast,) = [one for one in plan["forecasts"] if one["stage"] == stage]
    end_idle_sender(fleet.env["SKYCTL_HOME"])
    time.sleep(2)
    sampler = Sampler(gpus)
    before = sampler.now()
    with sampler:
        result = fleet.data(*push)["job"]["result"]
    extra = [peak - now for peak, now in zip(sampler.peak, before, strict=True)]
    time.sleep(1)
    of_sender = unique_host_bytes(senders(fleet.env["SKYCTL_HOME"]))
    idle = [now - then for now, then in zip(sampler.now(), before, strict=True)]
    worker, host = forecast["worker_gpu_bytes"], forecast["host_bytes"]
    if not first:  # workers keep what the first push made them take, but for copies of the chunks
        worker = worker if result["layout_share"] and gpus > 1 else 0
        host -= 0 if worker else WORKER_HOST[plan["transport"]]
    predicted = [worker, *([0] * (gpus - 1)), host]
    predicted[gpus - 1] += forecast["sender_gpu_bytes"]
    return {
        "stage": stage,
        "first": first,
        "predicted_mib": [round(value / MIB) for value in predicted],
        "peak_mib": [round(value / MIB) for value in extra],
        "sender_process_mib": round(of_sender / MIB),
        "left_mib": [round(value / MIB) for value in idle],
        "peak_over_predicted": [
            round(peak / expected, 3) if expected else None
            for peak, expected in zip(extra, predicted, strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=["ipc", "nccl"], required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--chunk-size", default="1GiB")
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    options = argparse.Namespace(**ONE_SERVER, **vars(parser.parse_args()))

    checkpoints = two_checkpoints(options.scratch, options.shape)
    fleet = Fleet(options.scratch / "fleet", settings(options, checkpoints[0]))
    gpus = 2 if options.transport == "nccl" else 1
    in_use: list[list[int]] = []
    try:
        fleet.run("up")
        stages: list[dict[str, Any]] = []
        for stage in STAGES * options.repeats:
            stages.append(compare(fleet, checkpoints[1], stage, gpus, first=not stages))
            print(json.dumps(stages[-1]), flush=True)
        sampler = Sampler(gpus)
        for number in range(options.pushes):
            fleet.data("sync-weights", str(checkpoints[number % 2]))
            in_use.append([round(value / MIB) for value in sampler.now()])
    finally:
        fleet.run("down", check=False)
    import torch

    result = {
        "benchmark": f"memory-{options.transport}",
        "gpu": torch.cuda.get_device_name(0),
        "date": time.strftime("%Y-%m-%d"),
        "chunk_size": options.chunk_size,
        "columns": [*(f"GPU {gpu}" for gpu in range(gpus)), "host"],
        "stages": stages,
        "in_use_mib": {
            "after 2 pushes": in_use[1],
            f"after {options.pushes} pushes": in_use[-1],
        },
    }
    save(result)


if __name__ == "__main__":
    main()

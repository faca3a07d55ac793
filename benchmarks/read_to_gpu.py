"""Checkpoint files to GPU memory: skyctl's reader beside the pinned-copy limit and other readers.

    python -m benchmarks.read_to_gpu CHECKPOINT [--runs 5]

Every reader fills GPU 0 with all tensors, page cache warm, in turn. Readers that are not installed
are left out. Prints a table and writes benchmarks/results/read-to-gpu.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyctl.transfer.gpu.reader import DeviceReader, ReadBatch, Span, cut

RESULTS = Path(__file__).parent / "results"


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def pinned_limit(checkpoint: Path) -> Callable[[], None]:
    """Copies of as many bytes from pinned memory that is already filled: nothing can be faster."""
    import torch

    total = sum(path.stat().st_size for path in shards(checkpoint))
    block = 1 << 30
    pinned = torch.empty(block, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(total, dtype=torch.uint8, device="cuda:0")

    def run() -> None:
        for begin in range(0, total, block):
            size = min(block, total - begin)
            target[begin : begin + size].copy_(pinned[:size], non_blocking=True)
        torch.cuda.synchronize()

    return run


def skyctl_reader(checkpoint: Path) -> Callable[[], None]:
    import torch

    files = shards(checkpoint)
    sizes = [path.stat().st_size for path in files]
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    target = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    reader = DeviceReader(0)
    ends = list(itertools.accumulate(sizes))
    reads = cut([Span(n, 0, sizes[n], ends[n] - sizes[n]) for n in range(len(sizes))])

    def run() -> None:
        batch = ReadBatch(reads, descriptors, target.data_ptr())
        reader.submit([batch])
        reader.wait(batch, 600)

    return run


def safetensors_reader(checkpoint: Path) -> Callable[[], None]:
    from safetensors import safe_open

    def run() -> None:
        import torch

        kept = []
        for path in shards(checkpoint):
            with safe_open(path, framework="pt", device="cuda:0") as file:
                kept += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        torch.cuda.synchronize()

    return run


def instanttensor_reader(checkpoint: Path) -> Callable[[], None]:
    import instanttensor

    files = [str(path) for path in shards(checkpoint)]

    def run() -> None:
        import torch

        with instanttensor.safe_open(files, framework="pt", device=0) as file:
            for _, tensor in file.tensors():
                tensor.clone()
        torch.cuda.synchronize()

    return run


def runai_reader(checkpoint: Path) -> Callable[[], None]:
    from runai_model_streamer import SafetensorsStreamer

    files = [str(path) for path in shards(checkpoint)]

    def run() -> None:
        import torch

        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files)
            kept = [tensor.to("cuda:0") for _, tensor in streamer.get_tensors()]
        torch.cuda.synchronize()
        del kept

    return run


def fastsafetensors_reader(checkpoint: Path) -> Callable[[], None]:
    from fastsafetensors import SafeTensorsFileLoader

    files = [str(path) for path in shards(checkpoint)]

    def run() -> None:
        import torch

        loader = SafeTensorsFileLoader(None, "cuda:0", nogds=True)
        loader.add_filenames({0: files})
        buffers = loader.copy_files_to_device()
        torch.cuda.synchronize()
        buffers.close()
        loader.close()

    return run


READERS: dict[str, Callable[[Path], Callable[[], None]]] = {
    "pinned copy (limit)": pinned_limit,
    "skyctl": skyctl_reader,
    "instanttensor": instanttensor_reader,
    "fastsafetensors": fastsafetensors_reader,
    "runai-model-streamer": runai_reader,
    "safetensors": safetensors_reader,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    import torch

    total = sum(path.stat().st_size for path in shards(options.checkpoint))
    table: dict[str, Any] = {}
    for name, make in READERS.items():
        try:
            run = make(options.checkpoint)
            run()  # warm-up
            seconds = []
            for _ in range(options.runs):
                torch.cuda.empty_cache()
                began = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - began)
        except Exception as error:
            print(f"{name:22} left out: {error!r:.150}", flush=True)
            continue
        finally:
            run = None  # type: ignore[assignment]
            torch.cuda.empty_cache()
        rate = total / statistics.median(seconds) / 1e9
        table[name] = {"gb_s": round(rate, 1), "runs_s": [round(s, 3) for s in seconds]}
        print(f"{name:22} {rate:6.1f} GB/s", flush=True)
    result = {
        "benchmark": "read-to-gpu",
        "gpu": torch.cuda.get_device_name(0),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "bytes": total,
        "readers": table,
        "read_to_gpu_gb_s": table["skyctl"]["gb_s"],
        "pinned_limit_gb_s": table["pinned copy (limit)"]["gb_s"],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "read-to-gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What staging a checkpoint takes on a GPU: the reader alone, beside the look for NaN,
beside the numbers that servers must come to, and both, as in a push.

    python -m benchmarks.stage CHECKPOINT [--runs 7] [--threads 12 16] [--piece-mib 4 5]
    python -m benchmarks.stage CHECKPOINT --to 1       each chunk goes on to a server's GPU, as
                                                       with NCCL

In one process, as the sender does it: files opened, slots allocated, chunks of 1 GiB filled and
looked through. Medians in milliseconds; `first` is to the first chunk, `tail` from the last chunk
looked through to its report, `own` the CPU time of the process. Writes nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.dtypes import torch_name
from skyctl.checkpoints.header import Tensor
from skyctl.transfer.gpu import reader as gpu_reader
from skyctl.transfer.gpu.carrier import DeviceCarrier
from skyctl.transfer.pace import Pace
from skyctl.transfer.plan import ChunkPlan, order_for_runtime, plan_chunks, program_for
from skyctl.transfer.reader import Filled, Piece, ShardFiles
from skyctl.wire.layouts import LayoutReport, ParameterLayout, Part, Program

CHUNK_BYTES = 1 << 30


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def report_of(tensors: Sequence[Tensor]) -> LayoutReport:
    """As of a server whose parameters are the checkpoint's tensors, but for experts, which lie in
    two parameters of a layer."""
    parts: dict[str, list[Part]] = {}
    for tensor in tensors:
        size = prod(tensor.shape)
        name, target = tensor.name, 0
        if expert := _EXPERT.fullmatch(name):
            number, kind = int(expert[2]), expert[3]
            name = f"{expert[1]}.{'w2' if kind == 'down' else 'w13'}_weight"
            target = size * (number if kind == "down" else 2 * number + (kind == "up"))
        run = (1, size, 0, size, target, size)
        parts.setdefault(name, []).append(Part(tensor.name, tensor.shape, *run))
    dtype = torch_name(tensors[0].dtype, "")
    of = {name: (sum(part.row for part in made),) for name, made in parts.items()}
    parameters = (
        ParameterLayout(name, dtype, of[name], tuple(made)) for name, made in parts.items()
    )
    return LayoutReport(0, parameters=tuple(parameters))


def pieces_of(plan: ChunkPlan, *, scan: bool) -> list[list[Piece]]:
    return [
        [
            Piece(p.tensor.shard, p.tensor.begin, p.tensor.nbytes, p.offset, p.tensor.dtype * scan)
            for p in chunk.placed
        ]
        for chunk in plan.chunks
    ]


def stage(
    carrier: DeviceCarrier,
    shards: Any,
    chunks: list[list[Piece]],
    slot_bytes: int,
    *,
    program: Program | None,
) -> dict[str, float]:
    """One push's staging, in milliseconds."""
    cpu, began = time.process_time(), time.perf_counter()
    files = ShardFiles(shards)
    opened = time.perf_counter()
    chunk_reader = carrier.open_reader(
        files,
        chunks,
        slots=2,
        slot_bytes=slot_bytes,
        threads=8,
        pace=Pace(),
        shown=bool(carrier.server_gpus),
    )
    if program is not None:
        carrier.number([program])
    allocated = time.perf_counter()
    read: list[float] = []
    mirror = carrier.slots.mirror
    carrier.slots.mirror = lambda slot: (read.append(time.perf_counter()), mirror(slot))[1]  # type: ignore[method-assign,func-returns-value]
    chunk_reader.after_fill = carrier.slots.mirror

    first = 0.0

    def filled(chunk: Filled) -> None:
        nonlocal first
        first = first or time.perf_counter()
        carrier.numbers(chunk.chunk, chunk.slot)

    chunk_reader.run(filled)
    ended = time.perf_counter()
    carrier.free_slots()
    files.close()
    return {
        "open": (opened - began) * 1e3,
        "allocate": (allocated - opened) * 1e3,
        "first": (first - allocated) * 1e3,
        "read": (ended - allocated) * 1e3,
        "tail": (ended - read[-1]) * 1e3,
        "whole": (ended - began) * 1e3,
        "own": (time.process_time() - cpu) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="*", default=[gpu_reader.THREADS])
    parser.add_argument("--depth", type=int, nargs="*", default=[gpu_reader.DEPTH])
    parser.add_argument("--piece-mib", type=int, nargs="*", default=[gpu_reader.PIECE_BYTES >> 20])
    parser.add_argument("--switch-us", type=int, nargs="*", default=[500])
    parser.add_argument("--to", type=int, nargs="*", default=[], metavar="GPU")
    options = parser.parse_args()
    checkpoint = read_checkpoint(str(options.checkpoint))
    report = report_of(checkpoint.tensors)
    plan = plan_chunks(
        checkpoint.tensors, CHUNK_BYTES, order=lambda tensors: order_for_runtime([report], tensors)
    )
    program = program_for(report, plan)
    print(
        f"{plan.total_bytes / 1e9:.1f} GB, {len(plan.tensors)} tensors, {os.cpu_count()} processors"
    )
    for threads, depth, piece, switch in product(
        options.threads, options.depth, options.piece_mib, options.switch_us
    ):
        sys.setswitchinterval(switch / 1e6)
        gpu_reader.PIECE_BYTES = piece << 20
        gpu_reader.DEPTH = depth
        carrier = DeviceCarrier([0], [[gpu] for gpu in options.to])
        carrier._reader.close()
        carrier._reader = gpu_reader.DeviceReader(0, threads=threads)
        print(f"threads {threads}, depth {depth}, piece {piece} MiB, switch {switch} us")
        for name, scan, numbered in (
            ("alone", False, None),
            ("finite", True, None),
            ("numbers", False, program),
            ("both", True, program),
        ):
            chunks = pieces_of(plan, scan=scan)
            seen = [
                stage(carrier, checkpoint.shards, chunks, plan.slot_bytes, program=numbered)
                for _ in range(options.runs + 1)
            ][1:]
            medians = {key: statistics.median(run[key] for run in seen) for key in seen[0]}
            rate = plan.total_bytes / medians["read"] / 1e6
            row = "  ".join(f"{key} {value:6.1f}" for key, value in medians.items())
            print(f"  {name:8} {row}  {rate:5.1f} GB/s", flush=True)
        carrier.close()


if __name__ == "__main__":
    main()

"""Copy checkpoints into a running vLLM model in the layout its parameters have, without a server.

    python -m benchmarks.runtime_layout --shape qwen3-0.5b --shape qwen3-moe-0.6b

One engine per shape, with CUDA graphs, started on checkpoint a. This process is the sender: it
reads a checkpoint into slots on the same GPU, exports them, and numbers every parameter. Checked:
the numbers of a are those of what vLLM's own loader made; after b was copied in, numbers, digest
and answers are those of an engine started on b; back to a; a flipped bit is seen. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import two_checkpoints
from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.transfer.plan import (
    ChunkPlan,
    check_layouts,
    order_for_runtime,
    plan_chunks,
    program_for,
)
from skyctl.wire.layouts import LayoutReport, Program

CHUNK_BYTES = 1 << 30
EXTENSION = "skyctl.engines.vllm.inside.worker.SkyctlWorkerExtension"


class Clock:
    """Wall time of named steps, in milliseconds."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    def time(self, name: str, call: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = call(*arguments, **named)
        self.ms[name] = round(1000 * (time.perf_counter() - began), 2)
        return result


def engine(checkpoint: Path, options: argparse.Namespace) -> Any:
    from vllm import LLM

    return LLM(
        model=str(checkpoint),
        max_model_len=512,
        gpu_memory_utilization=options.memory,
        enforce_eager=options.eager,
        enable_prefix_caching=False,
        worker_extension_cls=EXTENSION,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
        tensor_parallel_size=1,
        seed=0,
    )


def answers(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for number in range(3):  # one by one: the sums of a batch depend on its size
        prompt = {"prompt_token_ids": [40 + number, 41, 42, 43 + number]}
        outputs = llm.generate([prompt], sampling, use_tqdm=False)
        found.append(list(outputs[0].outputs[0].token_ids))
    return found


def stage(checkpoint: Path, plan: ChunkPlan, programs: list[Program], clock: Clock) -> Any:
    """The checkpoint in slots on GPU 0, and the numbers of what is to become of it."""
    from skyctl.transfer.gpu.carrier import DeviceCarrier
    from skyctl.transfer.gpu.numbering import Numbering
    from skyctl.transfer.pace import Pace
    from skyctl.transfer.reader import Piece, ShardFiles

    carrier = DeviceCarrier([0], [[0]])
    files = ShardFiles(read_checkpoint(str(checkpoint)).shards)
    pieces = [
        [Piece(p.tensor.shard, p.tensor.begin, p.tensor.nbytes, p.offset) for p in chunk.placed]
        for chunk in plan.chunks
    ]
    count = len(plan.chunks)
    reader = carrier.open_reader(
        files, pieces, slots=count, slot_bytes=plan.slot_bytes, threads=8, pace=Pace(), shown=True
    )
    clock.time("read", reader.run, lambda filled: None)
    numbers: list[dict[str, int]] = [{} for _ in programs]

    def number() -> None:
        numbering = Numbering(programs, 0)
        for chunk in range(count):
            for of_program, more in zip(
                numbers, numbering.add(chunk, carrier.slots.view(0, chunk)), strict=True
            ):
                of_program.update(more)

    clock.time("number", number)
    files.close()
    return carrier, numbers


def rpc(llm: Any, method: str, **arguments: Any) -> Any:
    return llm.collective_rpc(method, kwargs=arguments)[0]


def push(llm: Any, carrier: Any, plan: ChunkPlan, program: Program, clock: Clock) -> None:
    count = len(plan.chunks)
    shown = clock.time("export", carrier.export)
    what = {"programs": [program.to_wire()], "payload": shown["handles"][0]}
    clock.time("open", rpc, llm, "skyctl_layout_open", offsets=shown["offsets"], **what)
    clock.time("load", rpc, llm, "skyctl_layout_load", chunks=list(range(count)), last=True)
    clock.time("close", rpc, llm, "skyctl_layout_close")


def try_shape(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    a, b = two_checkpoints(options.scratch, shape)
    row: dict[str, Any] = {"shape": shape}
    clock = Clock()
    llm = clock.time("start", engine, a, options)
    of_a = answers(llm)
    report = LayoutReport.from_wire(
        json.loads(json.dumps(clock.time("report", rpc, llm, "skyctl_layout")))
    )
    checkpoint = read_checkpoint(str(a))
    row["reasons"] = [report.reason] if report.reason else []
    row["reasons"] += [f"{p.name}: {p.reason}" for p in report.parameters if p.reason][:3]
    check_layouts([report], checkpoint.tensors)
    plan = plan_chunks(
        checkpoint.tensors,
        CHUNK_BYTES,
        alignment=1,
        order=lambda tensors: order_for_runtime([report], tensors),
    )
    program = clock.time("plan", program_for, report, plan)
    row |= {
        "GB": round(plan.total_bytes / 1e9, 2),
        "tensors": len(plan.tensors),
        "parameters": len(program.parameters),
        "copies": len(program.copies),
    }
    names = [[name for name, _, _ in program.parameters]]
    digest_a = clock.time("digest1", rpc, llm, "skyctl_weight_digest")["digest"]
    digest_a = clock.time("digest", rpc, llm, "skyctl_weight_digest")["digest"]
    numbers = clock.time("numbers", rpc, llm, "skyctl_weight_digest", numbered=names)["numbers"]
    carrier, expected = stage(a, plan, [program], clock)
    wrong = [name for name in numbers if expected[0].get(name) != numbers[name]]
    row["a: as vLLM's loader"] = wrong[:3] or True
    refused = False
    try:
        push(llm, carrier, plan, program, Clock())
    except Exception as error:
        refused = "not been proven" in repr(error)
    row["refused unproven"] = refused
    rpc(llm, "skyctl_layout_close")
    rpc(llm, "skyctl_layout_trust", layouts=[program.layout])
    carrier.free_slots()
    carrier, expected_b = stage(b, plan, [program], clock)
    push(llm, carrier, plan, program, clock)
    got = rpc(llm, "skyctl_weight_digest", numbered=names)["numbers"]
    row["b: numbers"] = got == expected_b[0]
    of_b = answers(llm)
    digest_b = rpc(llm, "skyctl_weight_digest")["digest"]
    slot = carrier.slots.view(0, len(plan.chunks) // 2)
    slot[slot.numel() // 3] ^= 1
    push(llm, carrier, plan, program, clock)
    bad = rpc(llm, "skyctl_weight_digest", numbered=names)["numbers"]
    row["flipped bit seen"] = [n for n in bad if bad[n] != expected_b[0][n]]
    carrier.free_slots()
    carrier, expected_a = stage(a, plan, [program], clock)
    push(llm, carrier, plan, program, clock)
    back = rpc(llm, "skyctl_weight_digest", numbered=names)["numbers"]
    row["a again: numbers"] = back == expected_a[0]
    row["a again: answers"] = answers(llm) == of_a
    row["a again: digest"] = rpc(llm, "skyctl_weight_digest")["digest"] == digest_a
    carrier.free_slots()
    carrier.close()
    row["b differs"] = of_b != of_a
    shut_down(llm)
    del llm
    if not options.no_second:
        other = engine(b, options)
        row["b: answers of one started on it"] = answers(other) == of_b
        row["b: digest of one started on it"] = (
            rpc(other, "skyctl_weight_digest")["digest"] == digest_b
        )
        shut_down(other)
    row["ms"] = clock.ms
    return row


def shut_down(llm: Any) -> None:
    import gc

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", required=True)
    parser.add_argument("--memory", type=float, default=0.3, help="gpu-memory-utilization")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--no-second", action="store_true", help="start none on b")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    options = parser.parse_args()
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    rows = []
    for shape in options.shape:
        try:
            rows.append(try_shape(shape, options))
            print("ROW", json.dumps(rows[-1]), flush=True)
        except BaseException as error:
            rows.append({"shape": shape, "error": repr(error)[-1500:]})
            if isinstance(error, KeyboardInterrupt):
                break
    print("\n==== runtime layout ====")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()

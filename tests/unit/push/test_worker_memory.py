"""Memory that workers take while they load: the arithmetic beside what was measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import pytest

from benchmarks.checkpoints import SHAPES, tensor_shapes
from skyctl.checkpoints.header import Tensor
from skyctl.push.forecast import Measured, Subject, forecast
from skyctl.push.worker_memory import (
    MIB,
    NCCL_GROUP_BYTES,
    bytes_beside,
    numbering_bytes,
    worker_bytes,
)
from skyctl.transfer.plan import (
    ChunkPlan,
    module_of,
    order_for_runtime,
    plan_chunks,
    program_for,
)
from skyctl.transfer.reader import BATCH_BYTES
from skyctl.wire.layouts import (
    Copy,
    LayoutReport,
    ParameterLayout,
    Part,
    Program,
)

GIB = 1 << 30


def tensors_of(shape: str) -> list[Tensor]:
    return [
        Tensor(name, "BF16", size, 0, 0, 2 * prod(size))
        for name, size in tensor_shapes(SHAPES[shape])
    ]


def plan_of(shape: str, chunk_size: int, transport: str) -> ChunkPlan:
    packing = "overflow" if transport == "nccl" else "fit"
    return plan_chunks(tensors_of(shape), chunk_size, packing=packing, alignment=1)


@pytest.mark.parametrize(
    ("transport", "chunk_size", "measured_mib"),
    # what a first push took from an H200 (benchmarks/memory.py), the sender's own left out
    [
        ("ipc", 4 * GIB, 5301),
        ("ipc", 1 * GIB, 2375),
        ("nccl", 1 * GIB, 9202),
        ("nccl", 256 * MIB, 6770),
    ],
)
def test_it_is_within_a_tenth_of_what_was_measured(
    transport: str, chunk_size: int, measured_mib: int
) -> None:
    told = worker_bytes(transport, plan_of("qwen3-8b", chunk_size, transport)) / MIB
    assert 0.9 < measured_mib / told < 1.1


def test_nothing_is_taken_from_a_gpu_without_one() -> None:
    assert worker_bytes("shm", plan_of("qwen3-0.5b", GIB, "shm")) == 0


def test_one_small_chunk_takes_a_buffer_and_the_module_that_is_put_together() -> None:
    tensors = [Tensor("norm.weight", "BF16", (4 * MIB,), 0, 0, 8 * MIB)]
    plan = plan_chunks(tensors, GIB, packing="overflow", alignment=1)
    assert worker_bytes("nccl", plan) == NCCL_GROUP_BYTES + 16 * MIB
    assert worker_bytes("ipc", plan) == 16 * MIB


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.qkv"),
        ("model.layers.3.self_attn.v_proj.bias", "model.layers.3.self_attn.qkv"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.gate_up"),
        ("model.layers.3.mlp.experts.11.down_proj.weight", "model.layers.3.mlp.experts"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
    ],
)
def test_a_module_is_what_vllm_loads_at_once(name: str, module: str) -> None:
    assert module_of(name) == module


@pytest.mark.parametrize(("gpus", "workers"), [([[0], [0, 1], [1]], 2), ([], 1), ([[]], 1)])
def test_the_fullest_gpu_counts_beside_a_sender(gpus: list[list[int]], workers: int) -> None:
    plan = plan_of("qwen3-0.5b", GIB, "ipc")
    assert bytes_beside("ipc", plan, gpus) == workers * worker_bytes("ipc", plan)


def test_parameters_that_lie_in_no_chunk_as_a_whole_are_built_beside_the_slots() -> None:
    whole = Copy(0, 0, 1, GIB, 0, 0, 0, 0)
    parts = [Copy(n, 1, 1, 300 * MIB, 0, 0, 300 * MIB * n, 0) for n in range(2)]
    small = [Copy(0, 1, 4, MIB, 0, MIB, 0, 2 * MIB)]

    def taken(copies: list[Copy]) -> int:
        return numbering_bytes([Program("", (), tuple(copies))])

    assert taken([whole]) == 0
    assert taken([whole, *parts]) == 1200 * MIB
    assert taken(small) == 7 * MIB + BATCH_BYTES


def fused(tensors: Sequence[Tensor]) -> LayoutReport:
    """A server of these tensors, whose q, k and v, and gate and up, are one parameter each."""
    parts: dict[str, list[Part]] = {}
    for tensor in tensors:
        name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", tensor.name)
        name = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)
        made, size = parts.setdefault(name, []), prod(tensor.shape)
        run = (1, size, 0, size, sum(part.row for part in made), size)
        made.append(Part(tensor.name, tensor.shape, *run))
    return LayoutReport(
        0,
        parameters=tuple(
            ParameterLayout(name, "bfloat16", (sum(part.row for part in made),), tuple(made))
            for name, made in parts.items()
        ),
    )


@pytest.mark.parametrize(
    ("transport", "slots", "measured_mib"),
    # the peak of a sender's GPU when it pushed qwen3-8b in chunks of 1 GiB (H200, vLLM 0.32)
    [("ipc", 0, 16760), ("ipc", 2, 3510), ("nccl", 0, 16312), ("nccl", 2, 3552)],
)
def test_a_sender_is_within_a_tenth_of_what_was_measured(
    transport: str, slots: int, measured_mib: int
) -> None:
    tensors = tensors_of("qwen3-8b")
    report = fused(tensors)
    packing = "overflow" if transport == "nccl" else "fit"
    plan = plan_chunks(
        order_for_runtime([report], tensors), GIB, packing=packing, alignment=1, order=list
    )
    subject = Subject(
        transport,
        tuple(chunk.size for chunk in plan.chunks),
        workers=1,
        numbering_bytes=numbering_bytes([program_for(report, plan)]),
        copied=True,
        grouped=transport == "ipc",
    )
    staged, streamed = forecast(subject, "stream", Measured())
    told = (streamed if slots else staged).sender_gpu_bytes
    assert 0.9 < measured_mib * MIB / told < 1.1

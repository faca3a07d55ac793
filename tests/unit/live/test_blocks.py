"""Blocks of ranks: their JSON, what is refused, and which of several ranks sends a block."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyctl.errors import PreflightError
from skyctl.live.blocks import Block, Target, described, refuse_unlike, senders

WEIGHT = Target("w", "bfloat16", (8, 6))
BIAS = Target("b", "float32", (3,))
BIAS_BLOCK = Block("b", "float32", (3,), (0,), (3,))


def block(start: tuple[int, ...], size: tuple[int, ...], **changes: Any) -> Block:
    return Block(
        **{
            "tensor": "w",
            "dtype": "bfloat16",
            "shape": (8, 6),
            "start": start,
            "size": size,
            **changes,
        }
    )


def test_blocks_and_targets_survive_json() -> None:
    for item in (block((2, 0), (3, 6)), WEIGHT, Target("scalar", "float32", ())):
        assert type(item).from_wire(json.loads(json.dumps(item.to_wire()))) == item


def test_bytes_are_counted_as_they_are_sent() -> None:
    assert block((0, 0), (2, 6)).nbytes == 24
    assert block((0, 0), (2, 6), dtype="float32").nbytes == 48


@pytest.mark.parametrize(
    "ranks",
    [
        [[block((0, 0), (8, 6)), BIAS_BLOCK]],
        [[block((0, 0), (3, 6)), BIAS_BLOCK], [block((3, 0), (5, 6))]],
        [[block((0, 0), (8, 4))], [block((0, 4), (8, 2)), BIAS_BLOCK], [BIAS_BLOCK]],
        [
            [block((0, 0), (4, 3)), BIAS_BLOCK],
            [block((0, 3), (4, 3)), BIAS_BLOCK],
            [block((4, 0), (4, 3))],
            [block((4, 3), (4, 3)), block((0, 0), (4, 3))],
        ],
    ],
    ids=["single", "uneven rows", "columns", "mesh with a replica"],
)
def test_ranks_that_cover_the_model_are_accepted(ranks: list[list[Block]]) -> None:
    refuse_unlike(ranks, [WEIGHT, BIAS])


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[block((0, 0), (8, 6))], []], "no rank sends b, which"),
        ([[block((0, 0), (3, 6)), BIAS_BLOCK], []], r"w: 1 rank \(0\) send 18 of its 48 elements"),
        (
            [[block((0, 0), (5, 6)), BIAS_BLOCK], [block((4, 0), (4, 6))]],
            r"w: rank 0 sends \[0:5, 0:6\] and rank 1 sends \[4:8, 0:6\], which overlap",
        ),
        (
            [[block((0, 0), (8, 6)), BIAS_BLOCK], [block((0, 0), (1, 6), tensor="x")]],
            "rank 1 sends x, which is not in the model",
        ),
        (
            [[BIAS_BLOCK], [block((0, 0), (8, 6), shape=(9, 6))]],
            r"rank 1 sends w as \[9, 6\], the servers run \[8, 6\]",
        ),
        (
            [[BIAS_BLOCK, block((0, 0), (4, 6))], [block((4, 0), (4, 6), dtype="float32")]],
            "rank 0 sends w as bfloat16, rank 1 as float32",
        ),
        ([[block((4, 0), (8, 6)), BIAS_BLOCK]], r"rank 0 sends w\[4:12, 0:6\], which reaches"),
        ([[block((0,), (8,)), BIAS_BLOCK]], r"rank 0 sends w\[0:8\], which reaches"),
    ],
)
def test_a_difference_names_tensor_and_rank(ranks: list[list[Block]], message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        refuse_unlike(ranks, [WEIGHT, BIAS])


def test_servers_that_say_nothing_are_taken_to_run_what_the_ranks_have() -> None:
    ranks = [[block((0, 0), (4, 6))], [block((4, 0), (4, 6)), BIAS_BLOCK]]
    assert described(ranks) == [WEIGHT, BIAS]
    with pytest.raises(PreflightError, match="24 of its 48 elements"):
        refuse_unlike(ranks[:1], described(ranks[:1]))


def test_of_equal_blocks_each_is_sent_by_a_single_rank_and_the_load_is_even() -> None:
    tensors = [Block(f"t{i}", "bfloat16", (100,), (0,), (100,)) for i in range(40)]
    own = Block("own", "bfloat16", (1000,), (0,), (1000,))
    ranks = [[*tensors, own], list(tensors), list(tensors)]
    chosen = senders(ranks)
    assert sorted(block.tensor for blocks in chosen for block in blocks) == sorted(
        block.tensor for block in ranks[0]
    )
    assert own in chosen[0]
    sent = [sum(block.nbytes for block in blocks) for blocks in chosen]
    assert max(sent) - min(sent) <= 200
    assert senders(ranks) == chosen

"""A plan fills every parameter with the bytes of the tensors that it is made of, wherever ranks
have them, and has each rank send about as much as the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyctl.errors import PreflightError
from skyctl.live.blocks import Block, Target, refuse_unlike
from skyctl.live.plan import SPLIT_BYTES, Piece, WorkerPlan, balance, plan_live
from skyctl.transfer.plan import NotInLayout
from skyctl.wire.layouts import Copy, LayoutReport, ParameterLayout, Part
from tests.unit.live.pieces import in_memory, parts, report, tensors


def whole(name: str, shape: tuple[int, ...], at: int = 0) -> Part:
    size = math.prod(shape)
    return Part(name, shape, 1, size, 0, size, at, size)


def carried_out(
    plan: WorkerPlan, exports: dict[tuple[int, int], Any], items: int = 2
) -> dict[str, Any]:
    """The parameters that the plan's program fills; what nothing is copied into stays 0xEE."""
    np = pytest.importorskip("numpy")
    filled = [np.full(math.prod(shape) * items, 0xEE, np.uint8) for _, _, shape in plan.parameters]
    for copy in plan.program.copies:
        source, target = exports[plan.sources[copy.chunk]], filled[copy.parameter]
        for run in range(copy.rows):
            begin = copy.source + run * copy.source_pitch
            at = copy.target + run * copy.target_pitch
            assert (target[at : at + copy.row] == 0xEE).all(), "copied twice"
            target[at : at + copy.row] = source[begin : begin + copy.row]
    return dict(zip([name for name, _, _ in plan.parameters], filled, strict=True))


@given(st.data(), tensors(), st.booleans(), st.integers(0, 5))
def test_each_parameter_is_filled_byte_for_byte(
    data: st.DataObject, shared: Any, together: bool, zeros: int
) -> None:
    ranks, exports, full = in_memory(shared, together)
    refuse_unlike(
        [[piece.block for piece in rank] for rank in ranks],
        [Target(name, "bfloat16", shape) for name, (shape, _) in shared.items()],
    )
    own, target = [], 0
    for name, (shape, _) in shared.items():
        for _ in range(data.draw(st.integers(1, 2))):
            own.append(data.draw(parts(name, shape, target)))
            target += own[-1].rows * own[-1].row
    parameter = ParameterLayout("p", "bfloat16", (target + zeros,), tuple(own), zeros)
    worker = report(parameter)
    plan = plan_live(ranks, [worker])[worker.layout]
    filled = carried_out(plan, exports)["p"].reshape(-1, 2)
    at = 0
    for part in own:
        flat = full[part.tensor].reshape(-1, 2)
        for run in range(part.rows):
            begin = part.source + run * part.source_pitch
            assert (filled[at : at + part.row] == flat[begin : begin + part.row]).all()
            at += part.row
    assert (filled[at:] == 0xEE).all()


def test_a_block_that_ranks_share_is_sent_once_and_by_all_of_them() -> None:
    shape = (8, SPLIT_BYTES // 4)
    block = Block("a", "bfloat16", shape, (0, 0), shape)
    ranks = [[Piece(block, 0)] for _ in range(4)]
    worker = report(ParameterLayout("p", "bfloat16", shape, (whole("a", shape),)))
    plan = plan_live(ranks, [worker])[worker.layout]
    sent = plan.bytes_by_rank()
    assert sum(sent.values()) == 2 * math.prod(shape)
    assert balance(sent, 4) == 1.0


def test_small_blocks_that_ranks_share_are_shared_out_among_them() -> None:
    names = [f"t{number}" for number in range(64)]
    blocks = [Block(name, "bfloat16", (512,), (0,), (512,)) for name in names]
    ranks = [[Piece(block, number) for number, block in enumerate(blocks)] for _ in range(4)]
    worker = report(
        *(ParameterLayout(name, "bfloat16", (512,), (whole(name, (512,)),)) for name in names)
    )
    plan = plan_live(ranks, [worker])[worker.layout]
    assert plan.bytes_by_rank() == dict.fromkeys(range(4), 16 * 1024)
    assert len(plan.rows) == 64


def test_what_lies_side_by_side_is_one_copy() -> None:
    """Experts that a trainer keeps in one tensor, as the servers do."""
    shape, count = (6, 4), 5
    pieces = [
        Piece(Block(f"experts.{number}", "bfloat16", shape, (0, 0), shape), 0, number * 24)
        for number in range(count)
    ]
    own = tuple(whole(f"experts.{n}", shape, at=n * 24) for n in range(count))
    worker = report(ParameterLayout("w13", "bfloat16", (count, *shape), own))
    plan = plan_live([pieces], [worker])[worker.layout]
    assert plan.program.copies == (Copy(0, 0, 1, 240, 0, 240, 0, 240),)


def test_each_rank_is_told_its_own_copies() -> None:
    top, bottom = (Block("a", "bfloat16", (4, 8), (row, 0), (2, 8)) for row in (0, 2))
    worker = report(ParameterLayout("p", "bfloat16", (4, 8), (whole("a", (4, 8)),)))
    plan = plan_live([[Piece(top, 3)], [Piece(bottom, 5, 10)]], [worker])[worker.layout]
    assert plan.rows_by_rank()[0] == [(3, 0, 1, 32, 0, 32, 0, 32)]
    assert plan.rows_by_rank()[1] == [(5, 0, 1, 32, 20, 32, 32, 32)]


A = Block("a", "bfloat16", (4, 8), (0, 0), (4, 8))
P = ParameterLayout("p", "bfloat16", (4, 8), (whole("a", (4, 8)),))


@pytest.mark.parametrize(
    ("pieces", "worker", "reason"),
    [
        ([], report(P), "no rank of the trainer has a, of which the servers make p"),
        (
            [Piece(A, 0), Piece(Block("b", "bfloat16", (2,), (0,), (2,)), 1)],
            report(P),
            "the trainer has b, of which the servers make no parameter",
        ),
        (
            [Piece(Block("a", "bfloat16", (8, 4), (0, 0), (8, 4)), 0)],
            report(P),
            "has a as bfloat16 \\[8, 4\\], the servers run bfloat16 \\[4, 8\\]",
        ),
        (
            [Piece(Block("a", "float16", (4, 8), (0, 0), (4, 8)), 0)],
            report(P),
            "has a as float16 .* the servers run bfloat16",
        ),
        (
            [Piece(Block("a", "bfloat16", (4, 8), (0, 0), (3, 8)), 0)],
            report(P),
            "p: the trainer's ranks have 24 of its 32 elements",
        ),
    ],
)
def test_a_trainer_that_does_not_fit_is_refused(
    pieces: list[Piece], worker: LayoutReport, reason: str
) -> None:
    with pytest.raises(PreflightError, match=reason):
        plan_live([pieces], [worker])


def test_a_parameter_that_only_the_loader_fills_is_not_planned() -> None:
    worker = report(ParameterLayout("p", "bfloat16", (4, 8), reason="quantized"))
    with pytest.raises(NotInLayout):
        plan_live([[Piece(A, 0)]], [worker])


def test_a_tied_output_layer_is_not_copied() -> None:
    tied = Piece(Block("lm_head.weight", "bfloat16", (4, 8), (0, 0), (4, 8)), 1)
    worker = report(P, ignored=("lm_head.weight",))
    assert plan_live([[Piece(A, 0), tied]], [worker])[worker.layout].sources == ((0, 0),)

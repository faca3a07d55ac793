"""Copy programs: the bytes that a report asks for, in as few copies as they can be."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyctl.checkpoints.header import Tensor
from skyctl.transfer.plan import (
    ChunkPlan,
    NotInLayout,
    check_layouts,
    merged,
    order_for_runtime,
    plan_chunks,
    program_for,
)
from skyctl.wire.layouts import (
    LAYOUT_VERSION,
    Copy,
    LayoutReport,
    ParameterLayout,
    Part,
    Program,
)


def tensor(name: str, *shape: int, dtype: str = "BF16") -> Tensor:
    return Tensor(name, dtype, shape, 0, 0, prod(shape) * 2)


def whole(name: str, *shape: int, at: int = 0) -> Part:
    size = prod(shape)
    return Part(name, shape, 1, size, 0, size, at, size)


def report(*parameters: ParameterLayout, ignored: tuple[str, ...] = ()) -> LayoutReport:
    return LayoutReport(0, "layout", parameters, ignored=ignored)


GATE_UP = ParameterLayout("gate_up", "bfloat16", (4, 3), (whole("g", 2, 3), whole("u", 2, 3, at=6)))
NORM = ParameterLayout("norm", "bfloat16", (3,), (whole("norm", 3),))
TENSORS = [tensor("u", 2, 3), tensor("norm", 3), tensor("g", 2, 3)]


def planned(worker: LayoutReport, tensors: list[Tensor], size: int = 1 << 20) -> ChunkPlan:
    return plan_chunks(
        tensors, size, alignment=1, order=lambda given: order_for_runtime([worker], given)
    )


def test_tensors_are_sent_in_the_order_in_which_parameters_hold_them() -> None:
    worker = report(GATE_UP, NORM, ignored=("lm_head.weight",))
    tensors = [tensor("lm_head.weight", 3), *TENSORS]
    check_layouts([worker], tensors)
    plan = planned(worker, tensors)
    assert [t.name for t in plan.tensors] == ["g", "u", "norm", "lm_head.weight"]
    program = program_for(worker, plan)
    assert program.copies == (
        Copy(0, 0, 1, 24, 0, 24, 0, 24),
        Copy(0, 1, 1, 6, 24, 6, 0, 6),
    )
    assert Program.from_wire(program.to_wire()) == program


def test_a_program_of_another_version_is_refused_before_its_numbers_are_compared() -> None:
    program = Program("layout", (("norm", "bfloat16", (3,)),), ()).to_wire()
    for version in ("3.3", None):
        with pytest.raises(ValueError, match=f"version {version}, not {LAYOUT_VERSION}"):
            Program.from_wire(program | {"version": version})


def test_a_parameter_whose_tensors_are_in_two_chunks_is_copied_in_two_parts() -> None:
    worker = report(GATE_UP)
    program = program_for(worker, planned(worker, [TENSORS[0], TENSORS[2]], size=12))
    assert program.copies == (
        Copy(0, 0, 1, 12, 0, 12, 0, 12),
        Copy(1, 0, 1, 12, 0, 12, 12, 12),
    )


@pytest.mark.parametrize(
    ("worker", "tensors", "reason"),
    [
        (LayoutReport(0, reason="asleep"), TENSORS, "asleep"),
        (report(GATE_UP, replace(NORM, parts=(), reason="quantized")), TENSORS, "norm: quantized"),
        (report(GATE_UP), TENSORS, "no parameter is made of norm"),
        (report(GATE_UP, NORM), TENSORS[:2], "made of g, which is not there"),
        (report(GATE_UP, NORM), [tensor("g", 3, 2), *TENSORS[:2]], "g has shape \\[3, 2\\]"),
        (
            report(GATE_UP, NORM),
            [tensor("g", 2, 3, dtype="F16"), *TENSORS[:2]],
            "g is float16, gate_up is bfloat16",
        ),
        (
            report(NORM, replace(GATE_UP, parts=(whole("g", 2, 3), whole("u", 2, 3, at=5)))),
            TENSORS,
            "do not lie one after another",
        ),
        (
            report(NORM, replace(GATE_UP, shape=(5, 3))),
            TENSORS,
            "3 elements of it are not described",
        ),
        (
            report(
                NORM,
                replace(GATE_UP, parts=(whole("g", 2, 3), Part("u", (2, 3), 1, 6, 1, 6, 6, 6))),
            ),
            TENSORS,
            "do not lie one after another",
        ),
    ],
)
def test_what_does_not_fit_goes_the_loaders_way(
    worker: LayoutReport, tensors: list[Tensor], reason: str
) -> None:
    with pytest.raises(NotInLayout) as error:
        check_layouts([worker], tensors)
    assert error.match(reason) or reason.replace("\\", "") in error.value.reason


def test_padding_is_described_and_not_copied() -> None:
    padded = replace(GATE_UP, shape=(5, 3), zeros=3)
    check_layouts([report(padded, NORM)], TENSORS)


@st.composite
def copies(draw: st.DrawFn) -> list[Copy]:
    """Of one parameter, its target filled from front to back, in chunks that do not go back."""
    made, chunk, target = [], 0, 0
    for _ in range(draw(st.integers(1, 8))):
        rows, row = draw(st.sampled_from([(1, 4), (1, 8), (2, 4), (3, 2), (1, 2)]))
        pitch = row if rows == 1 else draw(st.sampled_from([row, row + 2, 2 * row]))
        source = draw(st.sampled_from([None, *range(0, 64, 2)]))
        if source is None and made and made[-1].chunk == chunk:
            last = made[-1]
            source = last.source + (last.rows - 1) * last.source_pitch + last.row
        target_pitch = row
        made.append(Copy(chunk, 0, rows, row, source or 0, pitch, target, target_pitch))
        target += rows * row
        chunk += draw(st.sampled_from([0, 0, 0, 1]))
    return made


def bytes_of(copies: list[Copy]) -> dict[int, tuple[int, int]]:
    """Where each byte of the parameter comes from: (chunk, byte)."""
    return {
        copy.target + run * copy.target_pitch + byte: (
            copy.chunk,
            copy.source + run * copy.source_pitch + byte,
        )
        for copy in copies
        for run in range(copy.rows)
        for byte in range(copy.row)
    }


@given(copies())
def test_merged_copies_bring_the_same_bytes(given_copies: list[Copy]) -> None:
    joined = merged(given_copies)
    assert len(joined) <= len(given_copies)
    assert bytes_of(joined) == bytes_of(given_copies)
    assert sum(c.rows * c.row for c in joined) == sum(c.rows * c.row for c in given_copies)

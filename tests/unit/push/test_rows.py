"""Rows of the checkpoint that servers must hold: which are asked for, and what answers prove."""

from __future__ import annotations

import math
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.push.rows import KnownRows, Mismatch, compare, read_rows
from skyctl.wire.messages import RowAnswer, row_number
from tests.stub import rows as stub_rows
from tests.unit.push.checkpoints import filled, tiny_tensors, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return read_checkpoint(str(write_checkpoint(tmp_path / "c", shards=2)))


def worker(*answers: RowAnswer) -> dict[str, Any]:
    return {"rows": [asdict(answer) for answer in answers]}


def honest(checkpoint: Checkpoint, known: tuple[KnownRows, ...]) -> dict[str, Any]:
    """A worker that holds the checkpoint."""
    held = stub_rows.of_checkpoint(str(checkpoint.path))
    return {"rows": stub_rows.answers(held, [asdict(one.question) for one in known])}


def test_every_kind_of_tensor_and_every_layer_is_asked_for(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": [32, 8], "lm_head.weight": [32, 8]}
    parts = ["self_attn.q_proj", "self_attn.q_norm", "mlp.gate"]
    parts += [f"mlp.experts.{i}.{name}" for i in range(4) for name in ("gate_proj", "up_proj")]
    for layer in range(9):
        shapes |= {f"model.layers.{layer}.{part}.weight": [8, 8] for part in parts}
    tensors = {name: filled(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    known = read_rows(read_checkpoint(str(write_checkpoint(tmp_path / "moe", tensors))))
    names = [one.question.name for one in known]
    assert len(names) == len(set(names)) < 30
    for kind in ("embed_tokens", "lm_head", "q_proj", "q_norm", "gate.", "gate_proj", "up_proj"):
        assert any(kind in name for name in names), kind
    for layer in range(9):
        assert any(name.startswith(f"model.layers.{layer}.") for name in names), layer


def test_the_choice_is_the_checkpoints(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert read_rows(checkpoint) == read_rows(checkpoint)
    other = read_checkpoint(str(write_checkpoint(tmp_path / "other", tiny_tensors(2))))
    assert [one.question for one in read_rows(other)] != [
        one.question for one in read_rows(checkpoint)
    ]


def test_tensors_without_rows_are_left_out(tmp_path: Path) -> None:
    tensors = {
        "empty": ("F32", [0, 4], b""),
        "packed": ("F4", [4, 4], bytes(8)),
        "scalar": filled([], 1),
        "conv": filled([3, 5, 7], 2, "BF16"),
    }
    known = read_rows(read_checkpoint(str(write_checkpoint(tmp_path / "c", tensors))))
    assert {one.question.name for one in known} == {"scalar", "conv"}
    conv = next(one for one in known if one.question.name == "conv")
    assert conv.question.matrix == (3, 35) and len(conv.data[0]) == 35 * 2


def test_a_server_that_holds_the_checkpoint_proves_it(checkpoint: Checkpoint) -> None:
    known = read_rows(checkpoint)
    found = compare(known, [honest(checkpoint, known)])
    assert found.tensors == len(known) and not found.reasons
    assert found.bytes == sum(one.nbytes for one in known)


def question(known: tuple[KnownRows, ...], part: str) -> KnownRows:
    return next(one for one in known if part in one.question.name)


def pieces_of(one: KnownRows, begin: int, end: int, rows: list[int]) -> list[Any]:
    """Some of the columns of some of the rows, as they are."""
    made = []
    for row in rows:
        first = (begin - one.question.begin) * 4
        data = one.data[row][first : first + (end - begin) * 4]
        made.append((row, begin, end, row_number(data, one.question.dtype)))
    return made


def test_parts_that_tensor_parallel_workers_hold_are_put_together(checkpoint: Checkpoint) -> None:
    one = question(read_rows(checkpoint), "down_proj")
    name, rows = one.question.name, one.question.rows
    left = worker(RowAnswer(name, "float32", pieces_of(one, 0, 3, rows)))
    right = worker(RowAnswer(name, "float32", pieces_of(one, 3, 8, rows)))
    nobody = worker(RowAnswer(name, elsewhere=True))
    assert compare([one], [left, nobody, right]).tensors == 1
    with pytest.raises(Mismatch, match=f"no worker holds row {rows[0]}"):
        compare([one], [left, nobody])
    above = worker(RowAnswer(name, "float32", pieces_of(one, 0, 8, rows[:-1])))
    with pytest.raises(Mismatch, match=f"no worker holds row {rows[-1]}"):
        compare([one], [above])


def test_every_piece_counts_that_of_a_second_copy_too(checkpoint: Checkpoint) -> None:
    one = question(read_rows(checkpoint), "embed_tokens")
    pieces = pieces_of(one, 0, 8, one.question.rows)
    row, begin, end, number = pieces[0]
    answer = RowAnswer(one.question.name, "float32", [*pieces, (row, begin, end, number + 1)])
    with pytest.raises(Mismatch, match=r"embed_tokens.*columns 0 to 8 are not those of the check"):
        compare([one], [worker(answer)])


def test_what_cannot_be_compared_is_counted_with_its_reason(checkpoint: Checkpoint) -> None:
    known = read_rows(checkpoint)
    told = honest(checkpoint, known)
    for row in told["rows"][:3]:
        row.update(pieces=[], reason="quantized")
    found = compare(known, [told])
    assert found.tensors == len(known) - 3 and found.reasons == {"quantized": 3}
    assert found.why_not == "quantized"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows.pop(),
        lambda rows: rows.reverse(),
        lambda rows: rows[0].update(surprise=1),
        lambda rows: rows[0].update(pieces=[(0, 0)]),
        lambda rows: rows[0].update(pieces=[(99, 0, 8, 1)]),
        lambda rows: rows[0].update(pieces=[(rows[0]["pieces"][0][0], 0, 80, 1)]),
    ],
    ids=["too few", "another order", "another field", "a short piece", "another row", "too wide"],
)
def test_answers_of_another_shape_are_errors(checkpoint: Checkpoint, spoil: Any) -> None:
    known = read_rows(checkpoint)
    told = honest(checkpoint, known)
    spoil(told["rows"])
    with pytest.raises((TypeError, LookupError, ValueError)):
        compare(known, [told])


TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
EDGES = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 2**-14, 30000.0, -3.14159, 1e-3, 2**-133]


@pytest.mark.parametrize("held", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored", TORCH)
def test_a_server_of_another_type_is_compared_after_rounding(
    tmp_path: Path, stored: str, held: str
) -> None:
    torch.manual_seed(1)
    values = torch.cat([torch.tensor(EDGES), torch.randn(30)]).to(TORCH[stored])
    raw = values.view(torch.uint8).numpy().tobytes()
    tensors = {"norm.weight": (stored, [len(values)], raw)}
    [one] = read_rows(read_checkpoint(str(write_checkpoint(tmp_path / "c", tensors))))
    has = values.to(getattr(torch, held)).view(torch.uint8).numpy().tobytes()
    piece = (0, 0, len(values), row_number(has, held))
    assert compare([one], [worker(RowAnswer("norm.weight", held, [piece]))]).tensors == 1
    piece = (0, 0, len(values), row_number(has[::-1], held))
    with pytest.raises(Mismatch):
        compare([one], [worker(RowAnswer("norm.weight", held, [piece]))])


@pytest.mark.parametrize(
    ("stored", "value", "held"),
    [("F32", 1e6, "float16"), ("F32", math.inf, "bfloat16"), ("F64", 1.0, "float32")],
    ids=["too large", "not finite", "another type"],
)
def test_what_has_no_rounding_is_not_comparable(
    tmp_path: Path, stored: str, value: float, held: str
) -> None:
    raw = struct.pack("<d" if stored == "F64" else "<f", value)
    path = write_checkpoint(tmp_path / "c", {"scale": (stored, [1], raw)})
    [one] = read_rows(read_checkpoint(str(path)))
    found = compare([one], [worker(RowAnswer("scale", held, [(0, 0, 1, 7)]))])
    assert not found.tensors and "not comparable" in found.why_not

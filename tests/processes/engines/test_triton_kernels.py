"""The kernels, by Triton's interpreter and compiler: these need no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
_COMPARE = """
from skyctl.wire import triton_digest
from skyctl.wire.device_digest import digest_on_device
from skyctl.wire.messages import LANES
from skyctl.wire.finite import EXPONENTS
from tests.unit.engines.digest_cases import broken_in_places, for_the_kernel

triton_digest._RUN_WORDS = 2 * LANES
tensors = [*for_the_kernel(), *broken_in_places()]
numbers, broken = triton_digest.sum_words(tensors).tolist()
assert numbers == digest_on_device(tensors)
seen = [tensor.dtype in EXPONENTS for tensor in tensors]
finite = [bool(tensor.isfinite().all()) for tensor in tensors]
assert broken == [int(looked and not good) for looked, good in zip(seen, finite)]
"""
_COMPARE_PIECES = """
import itertools

from skyctl.live import sums
from tests.unit.live.pieces import COPIES, PARAMETERS, exports

cases = itertools.product((64, 4096), ("bfloat16", "float32"), (False, True))
for sums._RUN_WORDS, dtype, broken in cases:
    sums._BATCH_BYTES = sums._RUN_WORDS * 64
    weights = exports(dtype, broken=broken)
    plain = sums.Summer(PARAMETERS, COPIES, weights, by_kernel=False).sum(weights)
    kernel = sums.Summer(PARAMETERS, COPIES, weights, by_kernel=True).sum(weights)
    for partial in (plain, kernel):
        partial.edges.sort()
    assert kernel == plain, (kernel, plain)
    assert bool(plain.not_finite) == broken
"""
_COMPARE_COPIES = """
import torch

from skyctl.engines.vllm.inside import layout_memory
from skyctl.wire import triton_copies

triton_copies._PIECE_WORDS, triton_copies._PROGRAMS = 600, 3
memory = torch.arange(40_000, dtype=torch.int16)
begins = [(0, 4000), (4000, 4), (8000, 20_000)]
sources = [memory[begin:][:count] for begin, count in begins]
targets = [torch.zeros_like(source) for source in sources]
pairs = list(zip(targets, sources))
assert all(triton_copies.in_words(*pair) for pair in pairs)
odd = (memory[1:9], memory[:8]), (memory[:3], memory[:3]), (memory[:8:2], memory[:4])
for target, source in (*odd, (memory[:8].float(), memory[:8])):
    assert not triton_copies.in_words(target, source)
triton_copies.copy_pieces(triton_copies.pieces_of([]))
assert not any(target.any() for target in targets[1:])
cast = (torch.zeros(4), memory[:4])
layout_memory._on_another = lambda *_: [True, False]
prepared = layout_memory.PreparedCopies({0: [*pairs[:2], cast], 1: pairs[2:]}, [], None)
assert prepared._others == [cast, pairs[2]]
prepared.enqueue()
assert all(torch.equal(*pair) for pair in pairs) and cast[0].tolist() == [0, 1, 2, 3]
"""
_COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from skyctl.wire.messages import LANES
from skyctl.wire.triton_copies import _copy_pieces
from skyctl.wire.triton_digest import _sum_pieces

pointers = dict.fromkeys(("table", "sums", "broken"), "*i64")
numbers = {"base": "i64", "pieces": "i32", "GOLDEN": "i64", "MIX": "i64"}
for kernel, constants in (
    (_copy_pieces, {"BLOCK": 4096, "PROGRAMS": 32}),
    (_sum_pieces, {"LANES": LANES, "COLUMNS": 9}),
):
    types = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


@pytest.mark.parametrize(
    "compare",
    [_COMPARE, _COMPARE_PIECES, _COMPARE_COPIES],
    ids=["whole", "pieces", "copies"],
)
@needs_triton
def test_kernels_do_what_plain_code_does(compare: str) -> None:
    run(compare, TRITON_INTERPRET="1")  # read when triton is imported: a process of its own


@needs_triton
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    run(_COMPILE, TRITON_CACHE_DIR=str(tmp_path))


def run(program: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""The digest's kernel, by Triton's interpreter: it needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
from skyctl.live import sums
from tests.unit.live.pieces import COPIES, PARAMETERS, exports

sums._RUN_WORDS, sums._BATCH_BYTES = 64, 1 << 12
for dtype in ("bfloat16", "float32"):
    for broken in (False, True):
        weights = exports(dtype, broken=broken)
        plain = sums.Summer(PARAMETERS, COPIES, weights, by_kernel=False).sum(weights)
        kernel = sums.Summer(PARAMETERS, COPIES, weights, by_kernel=True).sum(weights)
        for partial in (plain, kernel):
            partial.edges.sort()
        assert kernel == plain, (kernel, plain)
        assert bool(plain.not_finite) == broken
"""


@pytest.mark.parametrize("compare", [_COMPARE, _COMPARE_PIECES], ids=["whole", "pieces"])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_gives_the_numbers_of_the_plain_code(compare: str) -> None:
    # the variable is read when triton is imported: a process of its own
    done = subprocess.run(
        [sys.executable, "-c", compare],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr

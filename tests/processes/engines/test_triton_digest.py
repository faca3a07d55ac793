"""The digest's kernel, by Triton's interpreter: it needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

_COMPARE = """
import torch
from skyctl.engines.vllm.inside import triton_digest
from skyctl.engines.vllm.inside.device_digest import digest_on_device
from skyctl.engines.vllm.inside.wire import BLOCK_WORDS

triton_digest._RUN_WORDS = 4096
torch.manual_seed(1)
tensors = [
    torch.randint(-(2**62), 2**62, (size,), dtype=torch.int64) for size in (1, 4095, 4096, 20001)
]
tensors.append(torch.randn(64, 32, dtype=torch.bfloat16))
tensors.append(torch.tensor(1.5))
tensors += [torch.arange(1, 1 + size, dtype=torch.uint8) for size in (1, 7, 13, 4096 * 8 + 3)]
assert triton_digest.sum_words(tensors).tolist() == digest_on_device(tensors)
large = torch.empty(3 * BLOCK_WORDS, dtype=torch.int64)
factors = {factor for *_, factor, _ in triton_digest._runs(0, large.data_ptr(), large.nbytes)}
assert len(factors) == 3
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_gives_the_numbers_of_the_plain_code() -> None:
    # the variable is read when triton is imported: a process of its own
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr

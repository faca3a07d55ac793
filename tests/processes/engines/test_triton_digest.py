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
from tests.unit.engines.digest_cases import for_the_kernel

triton_digest._RUN_WORDS = 2 * LANES
tensors = for_the_kernel()
assert triton_digest.sum_words(tensors).tolist() == digest_on_device(tensors)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_gives_the_numbers_of_the_plain_code() -> None:
    # the variable is read when triton is imported: a process of its own
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr

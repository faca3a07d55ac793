"""The push and its commands run without torch and vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import {module}
heavy = {{"torch", "vllm", "transformers", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "module",
    [
        "skyctl.push.transaction",
        "skyctl.transfer.sender",
        "skyctl.transfer.transports.shm",
        "skyctl.transfer.transports.gloo",
        "skyctl.cli.sync_weights",
        "skyctl.cli.jobs",
        "skyctl.cli.weights",
        "skyctl.wire.messages",
        "skyctl.engines.vllm.inside.plugin",
    ],
)
def test_importing_it_loads_neither_torch_nor_vllm(module: str) -> None:
    script = SCRIPT.format(module=module)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

"""The steps of `tests/gpu/sglang.py` on stub SGLang servers, which skyctl's own `serve` starts."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults.stub_fleet import ROOT
from tests.gpu.sglang import SGLangRun
from tests.tiny import make_tiny_checkpoint

# Stands in for an interpreter that has SGLang and the real router, and not skyctl.
_INTERPRETER = f"""#!/bin/sh
case "$1" in
*serve.py) PYTHONPATH={ROOT}/tests/stub/fake_sglang:{ROOT} exec {sys.executable} "$@" ;;
esac
case "$2" in
vllm_router*) exec {sys.executable} "$@" ;;
esac
"""


def stub_run(directory: Path) -> SGLangRun:
    """Both fleets, with the real router."""
    interpreter = directory / "python"
    interpreter.write_text(_INTERPRETER)
    interpreter.chmod(0o755)
    settings = {
        "python": str(interpreter),
        "device": "cpu",
        "args": {"enable-memory-saver": True, "enable-weights-cpu-backup": True},
        "restart": {"backoff_s": 0.05},
        "drain_timeout_s": 1,
        "stop_timeout_s": 5,
        "health": {"interval_s": 0.2, "timeout_s": 2, "startup_timeout_s": 30},
    }
    return SGLangRun(
        directory,
        extra=settings,
        router=True,
        transports=("disk",),
        held_tokens=1000,
        pushes=2,
        verbs=40,
        write=lambda path, seed: make_tiny_checkpoint(path, seed=seed),
    )

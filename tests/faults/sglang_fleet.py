"""The real `skyctl` on a fleet of stub SGLang servers, which skyctl's own `serve` starts."""

from __future__ import annotations

import sys
from pathlib import Path

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from tests.faults.stub_fleet import ROOT, StubFleet

# Stands in for an interpreter that has SGLang and the real router, and not skyctl.
_INTERPRETER = f"""#!/bin/sh
case "$1" in
*serve.py) PYTHONPATH={ROOT}/tests/stub/fake_sglang:{ROOT} exec {sys.executable} "$@" ;;
esac
case "$2" in
vllm_router*) exec {sys.executable} "$@" ;;
esac
"""
_FLEET = """
name: sgl
engine: sglang
model: ./a
served_model_name: tiny
python: ./python
device: cpu
replicas: {replicas}
health: {{interval_s: 0.2, timeout_s: 2, startup_timeout_s: 30}}
restart: {{backoff_s: 0.05}}
drain_timeout_s: 1
stop_timeout_s: 5
args: {{enable-memory-saver: true, enable-weights-cpu-backup: true}}
{extra}
"""


class SGLangFleet(StubFleet):
    """Checkpoints `a`, which it starts with, and `b`."""

    def write(
        self, replicas: int = 2, faults: str = "{}", extra: str = "", name: str = "sgl"
    ) -> None:
        for seed, checkpoint in enumerate("ab"):
            make_tiny_checkpoint(self.directory / checkpoint, seed=seed)
        interpreter = self.directory / "python"
        interpreter.write_text(_INTERPRETER)
        interpreter.chmod(0o755)
        (self.directory / "fleet.yaml").write_text(
            _FLEET.format(replicas=replicas, extra=extra or "router: {enabled: false}")
        )

    def path(self, checkpoint: str) -> Path:
        return self.directory / checkpoint

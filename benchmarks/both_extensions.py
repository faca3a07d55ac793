"""A worker extension with skyctl's methods and checkpoint-engine's: vLLM takes one class."""

from __future__ import annotations

from checkpoint_engine.worker import (  # type: ignore[import-not-found,unused-ignore]
    VllmColocateWorkerExtension,
)

from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension


class BothExtensions(SkyctlWorkerExtension, VllmColocateWorkerExtension):  # type: ignore[misc,unused-ignore]
    """For `benchmarks/checkpoint_engine.py`."""

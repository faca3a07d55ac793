"""Entry point `vllm.general_plugins`: what skyctl does in vLLM's processes before anything else."""

from __future__ import annotations

from skyctl.engines.vllm.inside.adapters import serve_adapters
from skyctl.engines.vllm.inside.idle import spin_less
from skyctl.engines.vllm.inside.wire import BACKEND


def register() -> None:
    """vLLM calls this in every process, possibly more than once. What a version lacks is left
    alone: a plugin must never keep a server from starting.
    """
    spin_less()
    serve_adapters()
    _register_backend()


def _register_backend() -> None:
    """Register the weight-transfer backend `skyctl`, whose module is imported once asked for."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    registry = getattr(WeightTransferEngineFactory, "_registry", {})
    if BACKEND in registry:
        return
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "skyctl.engines.vllm.inside.engine", "SkyctlWeightTransferEngine"
        )
    except ValueError:
        return  # registered by another thread meanwhile

"""Entry point `vllm.general_plugins`: what skyctl does in vLLM's processes before anything else."""

from __future__ import annotations

from contextlib import suppress

from skyctl.engines.vllm.inside.adapters import serve_adapters
from skyctl.engines.vllm.inside.idle import spin_less
from skyctl.wire.messages import BACKEND


def register() -> None:
    """vLLM calls this in every process, possibly more than once. What a version lacks is left
    alone: a plugin must never keep a server from starting.
    """
    spin_less()
    serve_adapters()
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    if BACKEND in getattr(WeightTransferEngineFactory, "_registry", {}):
        return
    with suppress(ValueError):  # registered by another thread first
        WeightTransferEngineFactory.register_engine(  # by name: imported once it is asked for
            BACKEND, "skyctl.engines.vllm.inside.engine", "SkyctlWeightTransferEngine"
        )

"""Entry point `vllm.general_plugins`: tell vLLM about the weight-transfer backend `skyctl`."""

from __future__ import annotations

from skyctl.engine.wire import BACKEND


def register() -> None:
    """Register the engine by name; its module is imported when a server asks for the backend.

    vLLM calls this in every process, possibly more than once. Versions without weight transfer
    are left alone: a plugin must never keep a server from starting.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    registry = getattr(WeightTransferEngineFactory, "_registry", {})
    if BACKEND in registry:
        return
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "skyctl.engine.engine", "SkyctlWeightTransferEngine"
        )
    except ValueError:
        return  # registered by another thread in between

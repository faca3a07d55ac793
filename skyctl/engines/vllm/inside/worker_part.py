"""What the classes that act on a worker's model have in common."""

from __future__ import annotations

from typing import Any

import torch


class WorkerPart:
    """Acts on one worker's model. Lives as long as the worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._worker.device
        return device

    def _reset_adapters(self) -> None:
        """As vLLM's own update does at its end."""
        if reset := getattr(self._worker.model_runner, "reset_lora_state", None):
            reset()

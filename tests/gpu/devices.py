"""The GPUs that tests may use: those that CUDA_VISIBLE_DEVICES leaves to them.

So runs on disjoint GPUs can go side by side.
"""

from __future__ import annotations

import os

from skyctl.launch.local.devices import discover_gpus, free_gpu_memory, visible_gpus


def available() -> list[int]:
    """Their indices, as nvidia-smi has them."""
    return [gpu.index for gpu in visible_gpus(discover_gpus(), os.environ)]


def free_mib() -> list[int]:
    """Free MiB on each of them."""
    free = free_gpu_memory()
    return [free[index] // 1024**2 for index in available()]

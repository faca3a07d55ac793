"""Time the weights digest of a model on a GPU: tensors of the shapes of Qwen3-8B, 16.4 GB.

    python -m benchmarks.digest [--layers 36] [--runs 20]

`kernel` is from an event before the kernel's launch to one behind the kernel, `numbers` from the
call of `digest_on_device` to its result. Medians in milliseconds. The kernel compiles before the
first run. Writes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from skyctl.wire.device_digest import digest_on_device
from skyctl.wire.triton_digest import sum_words

_HIDDEN, _INNER, _VOCABULARY, _FUSED = 4096, 12288, 151936, 6144
_LAYER = (
    (_HIDDEN,), (_FUSED, _HIDDEN), (128,), (128,), (_HIDDEN, _HIDDEN),
    (_HIDDEN,), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER),
)  # fmt: skip


def weights(layers: int) -> list[torch.Tensor]:
    """Random bfloat16 tensors on the current GPU, as vLLM fuses them."""
    shapes = [(_VOCABULARY, _HIDDEN), *_LAYER * layers, (_HIDDEN,), (_VOCABULARY, _HIDDEN)]
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def kernel_ms(tensors: list[torch.Tensor]) -> float:
    """Time between two events around the kernel."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    sum_words(tensors)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def numbers_ms(tensors: list[torch.Tensor]) -> float:
    """Wall time of a digest."""
    begin = time.perf_counter()
    digest_on_device(tensors)
    return (time.perf_counter() - begin) * 1000


def median(
    measure: Callable[[list[torch.Tensor]], float], tensors: list[torch.Tensor], runs: int
) -> str:
    """Median and range over runs after two that do not count."""
    times = sorted([measure(tensors) for _ in range(runs + 2)][2:])
    return f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    tensors = weights(options.layers)
    size = sum(tensor.nbytes for tensor in tensors)
    print(f"{torch.cuda.get_device_name()}: {size / 1e9:.1f} GB in {len(tensors)} tensors")
    for measure in (kernel_ms, numbers_ms):
        print(f"{measure.__name__.partition('_')[0]}: {median(measure, tensors, options.runs)} ms")


if __name__ == "__main__":
    main()

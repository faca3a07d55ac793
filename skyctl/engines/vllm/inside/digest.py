"""A digest of what a model really computes with, for comparing replicas.

On CPU, vLLM packs the weight of a linear layer into an opaque kernel and empties the parameter, so
hashing parameters alone proves nothing. There the layer's output for fixed probe inputs is hashed:
for narrow layers the products with every unit vector, which are the weights themselves, to the
last bit; for wide ones a few products with fixed mixed vectors, which costs as much as a prompt of
that many tokens and sees any change that is not lost in the rounding of a sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from skyctl.engines.vllm.inside.device_digest import digest_on_device

_EXACT_WIDTH = 512
_PROBE_ROWS = 64


def digest_model(model: torch.nn.Module) -> dict[str, Any]:
    """Digest over all parameters, persistent buffers and packed linears.

    Returns:
        `digest` (32 hex digits), `tensors` (how many were hashed from memory) and `probed` (how
        many packed layers were hashed by their output). Equal for equal weights on one machine
        with one version of vLLM; not comparable between kinds of processors.
    """
    total = hashlib.blake2b(digest_size=16)
    probed = 0
    with torch.inference_mode():
        named = list(_named_tensors(model))
        tensors = len(named)
        for (name, _), digest in zip(named, _digest_tensors([t for _, t in named]), strict=True):
            total.update(name.encode() + b"\0" + digest)
        for name, layer in model.named_modules():
            if _is_packed(layer):
                total.update(name.encode() + b"\0" + _digest_packed(layer))
                probed += 1
    return {"digest": total.hexdigest(), "tensors": tensors, "probed": probed}


def sample_tensors(model: torch.nn.Module, names: Sequence[str]) -> dict[str, list[Any]]:
    """[dtype, shape, number] of the tensors of these names that the model has and that hold
    something; numbers as in `engines/vllm/inside/device_digest.py`."""
    tensors = model.state_dict(keep_vars=True)
    found = [name for name in names if name in tensors and tensors[name].numel()]
    with torch.inference_mode():
        numbers = digest_on_device([tensors[name] for name in found])
    return {
        name: [str(tensors[name].dtype).removeprefix("torch."), list(tensors[name].shape), number]
        for name, number in zip(found, numbers, strict=True)
    }


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers that hold something, shared ones once."""
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if tensor.numel() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _digest_tensors(tensors: list[torch.Tensor]) -> list[bytes]:
    """A digest of each; tensors on an accelerator are not copied out for it."""
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    numbers = iter(digest_on_device(on_device))
    return [
        _digest_tensor(tensor)
        if tensor.device.type == "cpu"
        else f"{tensor.dtype}{tuple(tensor.shape)}{next(numbers)}".encode()
        for tensor in tensors
    ]


def _digest_tensor(tensor: torch.Tensor) -> bytes:
    """Digest of dtype, shape and bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(memoryview(flat.numpy()))
    return digest.digest()


def _is_packed(layer: torch.nn.Module) -> bool:
    """A linear layer whose weight went into `cpu_linear` (vLLM's dispatch_cpu_unquantized_gemm).

    An output layer (the one that can be tied) keeps its weight beside it, and computes with the
    packed copy; embeddings only look rows up.
    """
    weight = getattr(layer, "weight", None)
    return (
        callable(getattr(layer, "cpu_linear", None))
        and isinstance(weight, torch.Tensor)
        and (weight.numel() == 0 or hasattr(layer, "tie_weights"))
    )


def _digest_packed(layer: Any) -> bytes:
    """Digest of a packed layer's weight, read out through its own kernel."""
    width = _input_size(layer)
    dtype = layer.weight.dtype
    digest = hashlib.blake2b(f"{dtype}{width}".encode(), digest_size=16)
    for probe in _probes(width, dtype):
        digest.update(_digest_tensor(layer.cpu_linear(probe, layer.weight, None)))
    return digest.digest()


def _probes(width: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Batches of inputs, shape [at most _PROBE_ROWS, width]; together they reach every weight."""
    if width <= _EXACT_WIDTH:
        for begin in range(0, width, _PROBE_ROWS):
            rows = torch.arange(min(_PROBE_ROWS, width - begin))
            probe = torch.zeros(len(rows), width, dtype=dtype)
            probe[rows, rows + begin] = 1
            yield probe
        return
    columns = torch.arange(width)
    # different factors, so that exchanged columns do not cancel out; exact in any float type
    factors = 1 + (columns * 37 % 64) / 64
    probe = torch.zeros(_PROBE_ROWS, width, dtype=dtype)
    probe[columns % _PROBE_ROWS, columns] = factors.to(dtype)
    yield probe


def _input_size(layer: Any) -> int:
    for attribute in ("input_size_per_partition", "input_size", "embedding_dim"):
        size = getattr(layer, attribute, None)
        if isinstance(size, int):
            return size
    raise RuntimeError(f"{type(layer).__name__} does not say its input size")

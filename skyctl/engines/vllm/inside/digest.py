"""What a model really computes with: a digest, for comparing replicas, and rows of checkpoint
tensors, read back from the running model. Digests show whether servers agree; rows show whether
they agree on the checkpoint.

On CPU, vLLM packs the weight of a linear layer into an opaque kernel and empties the parameter, so
hashing parameters alone proves nothing. There the layer's output for fixed probe inputs is hashed.
For narrow layers these are the products with every unit vector, which are the weights themselves,
to the last bit.

For wide layers each span of columns is multiplied by two vectors whose factors all differ. In
bfloat16 and float16 an output has only 8 or 11 bits of such a sum, so a second product, with the
first one subtracted before rounding, has the next ones. A weight that changes by less than about
2^-16 (float32: 2^-23) of its span's sum goes unseen. Outputs of oneDNN's kernels do not depend on
the number of threads (checked with 1 to 4).

Rows of such a layer are read in the same way, by unit vectors; the packing of experts only changes
the order, which is learned by packing numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from skyctl.engines.vllm.inside.placement import NotComparable, Placement, Trace, Tracer, tracing
from skyctl.wire.copies import octets_of
from skyctl.wire.device_digest import as_it_lies, examined_on_device, plain_tensors
from skyctl.wire.finite import finite_flags
from skyctl.wire.messages import RowAnswer, RowQuestion, row_number

_EXACT_WIDTH = 512
_SPAN = 512
_PROBE_ROWS = 64
_EXPERTS = ".experts."
"""Marks parameters that the data-parallel ranks of a mixture of experts split between them."""
_MULTIPLIERS = (173, 397)  # odd: each maps the positions of a span to different factors
Examined = Mapping[int, tuple[int, bool | None]]
"""What `examined_on_device` returned of tensors, by `id`."""
_DIGIT = 256  # counts up to here are exact in every floating type a model is held in


def digest_model(
    model: torch.nn.Module, numbered: Sequence[str] = (), *, finite: bool = False
) -> dict[str, Any]:
    """Digest over all parameters, persistent buffers and packed linears.

    Returns:
        `digest` (32 hex digits), `tensors` (how many were hashed from memory) and `probed` (how
        many packed layers were hashed by their output). Equal for equal weights on one machine
        with one version of vLLM; not comparable between kinds of processors. `dense` is the digest
        of everything but experts. `numbers` has those of the parameters `numbered`
        (`wire/device_digest.py`), on an accelerator. `not_finite` names a parameter, or a packed
        layer, that holds NaN or infinity, "" if none does or if not `finite`.
    """
    total, dense = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    probed = 0
    with torch.inference_mode(), plain_tensors():
        state = sorted(model.state_dict(keep_vars=True).items())
        named = list(distinct(state))
        on_device = [tensor for _, tensor in named if tensor.device.type != "cpu"]
        results = examined_on_device([as_it_lies(tensor) for tensor in on_device])
        examined = dict(zip(map(id, on_device), results, strict=True))
        for name, tensor in named:
            number, _ = examined.get(id(tensor), (None, None))
            digest = name.encode() + b"\0" + _digest_tensor(tensor, number)
            total.update(digest)
            if _EXPERTS not in name:
                dense.update(digest)
        flags = _finite(named, examined) if finite else {}
        # only a CPU packs anything; walking through all layers takes longer than summing a GPU's
        # weights
        packs = not named or any(tensor.device.type == "cpu" for _, tensor in named)
        for name, layer in model.named_modules() if packs else ():
            if is_packed(layer):
                outputs = [*_read_out(layer)]
                packed = name.encode() + b"\0" + _digest_packed(layer, outputs)
                total.update(packed)
                dense.update(packed)
                probed += 1
                if finite:
                    floats = [output for output in outputs if output.is_floating_point()]
                    flags[name] = all(finite_flags(floats))
    tensors_of = dict(state)
    return {
        "digest": total.hexdigest(),
        "dense": dense.hexdigest(),
        "tensors": len(named),
        "probed": probed,
        "numbers": {name: examined[id(tensors_of[name])][0] for name in numbered},
        "not_finite": next((name for name, good in flags.items() if not good), ""),
    }


def distinct(tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Non-empty tensors, shared ones once."""
    seen: set[int] = set()
    for name, tensor in tensors:
        if tensor.numel() and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _digest_tensor(tensor: torch.Tensor, number: int | None = None) -> bytes:
    """Digest of dtype, shape and bytes, or of the number that stands for them."""
    form = f"{tensor.dtype}{tuple(tensor.shape)}"
    if number is not None:
        return f"{form}{number}".encode()
    from blake3 import blake3  # required by vLLM; two to four times as fast as hashlib's

    flat = octets_of(tensor.contiguous()).cpu()
    digest: bytes = blake3(form.encode()).update(memoryview(flat.numpy())).digest()
    return digest


def is_packed(layer: torch.nn.Module) -> bool:
    """Whether a linear layer's weight went into `cpu_linear` (vLLM's
    dispatch_cpu_unquantized_gemm).

    An output layer (the one that can be tied) keeps its weight beside it, and computes with the
    packed copy; embeddings only look rows up.
    """
    weight = getattr(layer, "weight", None)
    return (
        callable(getattr(layer, "cpu_linear", None))
        and isinstance(weight, torch.Tensor)
        and (weight.numel() == 0 or hasattr(layer, "tie_weights"))
    )


def input_size(layer: Any) -> int:
    """Columns of a packed layer's weight."""
    for attribute in ("input_size_per_partition", "input_size", "embedding_dim"):
        size = getattr(layer, attribute, None)
        if isinstance(size, int):
            return size
    raise RuntimeError(f"{type(layer).__name__} does not say its input size")


def _digest_packed(layer: Any, outputs: Sequence[torch.Tensor]) -> bytes:
    """Digest of a packed layer's weight, by what was read out of it."""
    digest = hashlib.blake2b(f"{layer.weight.dtype}{input_size(layer)}".encode(), digest_size=16)
    for output in outputs:
        digest.update(_digest_tensor(output))
    return digest.digest()


def _read_out(layer: Any) -> Iterator[torch.Tensor]:
    """Tensors that are determined by a packed layer's weight: those that its kernel keeps, if it
    keeps any, else products.
    """
    width, dtype = input_size(layer), layer.weight.dtype
    if kept := _kept_tensors(layer.cpu_linear):
        yield from kept
    elif width <= _EXACT_WIDTH:
        for probe in _units(width, dtype):
            yield layer.cpu_linear(probe, layer.weight, None)
    else:
        yield from _products(layer, width, dtype)


def _finite(named: Sequence[tuple[str, torch.Tensor]], examined: Examined) -> dict[str, bool]:
    """Whether each parameter is free of NaN and infinity."""
    parameters = {
        name: tensor
        for name, tensor in named
        if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
    }
    flags = {name: examined.get(id(tensor), (0, None))[1] for name, tensor in parameters.items()}
    unseen = [name for name, good in flags.items() if good is None]
    flags |= zip(unseen, finite_flags([parameters[name] for name in unseen]), strict=True)
    return {name: bool(good) for name, good in flags.items()}


def _kept_tensors(kernel: Any) -> list[torch.Tensor]:
    """Packed weights in the closure of a kernel that is a function over tensors (vLLM's kernels for
    AMX and zentorch). oneDNN's has a handle to memory that only it can read.
    """
    kept = [cell.cell_contents for cell in getattr(kernel, "__closure__", None) or ()]
    return [tensor for tensor in kept if isinstance(tensor, torch.Tensor)]


@cache
def _units(width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every unit vector, in batches of shape [at most _PROBE_ROWS, width]."""
    batches = []
    for begin in range(0, width, _PROBE_ROWS):
        rows = torch.arange(min(_PROBE_ROWS, width - begin))
        probe = torch.zeros(len(rows), width, dtype=dtype)
        probe[rows, rows + begin] = 1
        batches.append(probe)
    return batches


def _products(layer: Any, width: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Sums over spans of a wide layer, each in one or two parts of shape [1, height]."""
    for probe in _spans(width, dtype):
        product = layer.cpu_linear(probe, layer.weight, None)
        yield product
        if dtype.itemsize < 4:
            yield layer.cpu_linear(probe, layer.weight, -product[0])


@cache
def _spans(width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The factors of each span, by each multiplier, in rows of shape [1, width]. They cost as much
    as a product, and take a few MB for all widths of a model.
    """
    probes = []
    for begin in range(0, width, _SPAN):
        size = min(_SPAN, width - begin)
        for multiplier in _MULTIPLIERS:
            probe = torch.zeros(1, width, dtype=dtype)
            probe[0, begin : begin + size] = _factors(size, multiplier).to(dtype)
            probes.append(probe)
    return probes


def _factors(size: int, multiplier: int) -> torch.Tensor:
    """Distinct numbers of either sign from 1/2 up to 2, exact in every 16-bit floating type:
    weights that swap places change the sum.
    """
    code = torch.arange(size) * multiplier % _SPAN
    sign = 1 - 2 * (code & 1)
    scale = 1 - (code >> 1 & 1) * 0.5
    return sign * scale * (1 + (code >> 2) / 128)


def arrangement(config: Any) -> str:
    """How a server's workers hold the model, which decides whose digests can be equal.

    Parallel sizes other than one, dtype, quantization, whether layers are wrapped for LoRA, and on
    CPU the kind of processor, of a `VllmConfig`: `tp2-bfloat16-fp8`, `float32-avx512`.

    Processors of different kinds pack weights differently, and round sums of them differently.

    It follows from how the server was started, not from what its memory holds: a half-loaded server
    stays comparable with its siblings.
    """
    parallel, model = config.parallel_config, config.model_config
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
    }
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if parallel.enable_expert_parallel:
        parts.append("ep")
    parts.append(str(model.dtype).removeprefix("torch."))
    if model.quantization:
        parts.append(str(model.quantization))
    if config.lora_config is not None:
        parts.append("lora")
    if config.device_config.device_type == "cpu":
        parts.append(_processor())
    return "-".join(parts)


def _processor() -> str:
    """What vLLM's choice of CPU kernels depends on."""
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    if torch.cpu._is_avx512_bf16_supported():
        return "avx512bf16"
    return str(torch.backends.cpu.get_cpu_capability()).lower()


def answer_rows(model: Any, questions: Sequence[RowQuestion]) -> list[RowAnswer]:
    """One answer per question, in order. The model must not be in the middle of an update."""
    if not questions:
        return []
    try:
        with torch.inference_mode(), tracing(model) as tracer:
            traces = tracer.trace(questions)
            return [_answer(tracer, *each) for each in zip(questions, traces, strict=True)]
    finally:
        _places.cache_clear()  # 8 bytes for each weight of an expert


def _answer(tracer: Tracer, question: RowQuestion, trace: Trace) -> RowAnswer:
    try:
        placements = tracer.placements(question, trace)
        rows = [row for placement in placements for row in _read(placement, question)]
    except NotComparable as why:
        return RowAnswer(question.name, reason=str(why))
    except Exception as error:  # a version of vLLM that lacks what is read here
        return RowAnswer(question.name, reason=f"it cannot be read: {error!r}")
    if not rows:
        return RowAnswer(question.name, elsewhere=True)
    loaded_as = getattr(torch, question.dtype)
    own_dtype = rows[0][3].dtype
    dtype = (
        loaded_as if all(_holds_exactly(values, loaded_as) for *_, values in rows) else own_dtype
    )
    name = str(dtype).removeprefix("torch.")
    pieces = [
        (row, begin, end, row_number(_bytes(values.to(dtype)), name))
        for row, begin, end, values in rows
    ]
    return RowAnswer(question.name, name, pieces)


def _holds_exactly(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` can represent `values`: none of its numbers was rounded when loaded."""
    if dtype == values.dtype:
        return True
    try:
        if torch.promote_types(dtype, values.dtype) != values.dtype:
            return False
    except RuntimeError:  # float8 and unsigned integers are promoted to nothing
        return False
    return bool(torch.equal(values.to(dtype).to(values.dtype), values))


def _bytes(values: torch.Tensor) -> bytes:
    return bytes(octets_of(values.contiguous()).cpu().numpy())


def _read(placement: Placement, question: RowQuestion) -> list[tuple[int, int, int, torch.Tensor]]:
    """(row, first column, column after the last, values) of what was asked for and is on this
    worker.
    """
    begin = max(question.begin, placement.column)
    end = min(question.end, placement.column + placement.width)
    rows = [row for row in question.rows if 0 <= row - placement.row < placement.height]
    if begin >= end or not rows:
        return []
    held_rows = [row - placement.row + placement.held_row for row in rows]
    first = begin - placement.column + placement.held_column
    values = values_of(placement, held_rows, first, first + end - begin)
    return [(row, begin, end, values[number]) for number, row in enumerate(rows)]


def values_of(placement: Placement, rows: list[int] | slice, begin: int, end: int) -> torch.Tensor:
    """Shape [rows, end - begin], in the dtype that the layer computes with, or NotComparable."""
    layer = placement.layer
    parameter = getattr(layer, placement.attribute)
    if parameter.device.type == "meta":
        raise NotComparable("a weight update is open")
    if placement.expert is not None:
        return _expert_values(layer, parameter, placement.expert, rows, begin, end)
    if placement.attribute == "weight" and is_packed(layer):
        return packed_values(layer, rows, begin, end)
    matrix = parameter.data
    matrix = matrix.reshape(1, -1) if matrix.dim() < 2 else matrix.flatten(1)
    return matrix[rows, begin:end]


def packed_values(layer: Any, rows: list[int] | slice, begin: int, end: int) -> torch.Tensor:
    columns = torch.arange(end - begin)
    probe = torch.zeros(end - begin, input_size(layer), dtype=layer.weight.dtype)
    probe[columns, columns + begin] = 1
    products = layer.cpu_linear(probe, layer.weight, None)[:, rows]
    if not bool(products.isfinite().all()):  # a NaN in another column shows up in this one
        raise NotComparable("the packed layer holds values that are not finite")
    return products.T


def _expert_values(
    layer: Any, parameter: Any, expert: int, rows: list[int] | slice, begin: int, end: int
) -> torch.Tensor:
    weights = parameter.data[expert]
    method = layer.quant_method
    kernel = method.moe_kernel.fused_experts
    if parameter.device.type != "cpu":
        backend = method.unquantized_backend.name
        if backend not in ("TRITON", "BATCHED_TRITON"):
            raise NotComparable(f"experts are stored as {backend} wants them")
        return weights[rows, begin:end]
    if getattr(kernel, "_use_zentorch", False):
        return weights[rows, begin:end]
    places = _places(tuple(weights.shape), weights.dtype, kernel.isa)
    return weights.reshape(-1)[places[rows, begin:end]]


@cache
def _places(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Where the packing of an expert of this shape puts each element: shape [rows, columns]."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    count = shape[0] * shape[1]
    numbers = torch.arange(count).view(1, *shape)
    origin, scale = torch.zeros(count, dtype=torch.int64), 1
    while scale < count:
        digits = (numbers // scale % _DIGIT).to(dtype)
        origin += cpu_prepack_moe_weight(digits, isa).reshape(-1).to(torch.int64) * scale
        scale *= _DIGIT
    places = torch.full((count,), -1)
    within = bool(((origin >= 0) & (origin < count)).all())
    if within:
        places[origin] = numbers.view(-1)
    if not within or bool((places < 0).any()):
        raise NotComparable(f"packing for {isa} does more than reorder an expert's weights")
    return places.view(*shape)

"""Read which parts of the servers' model lie in this process, as blocks and their tensors.

A trainer gives its module, a mapping of names to tensors, or a function of slices. Tensors may be
DTensors; each rank reads its own shard, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyctl.checkpoints.header import safetensors_name
from skyctl.errors import PreflightError, UsageError
from skyctl.live.blocks import Block, Box, Target

Slices = Callable[[str, tuple[int, ...]], Iterable[tuple[Sequence[int], Any]]]
"""Called with the Hugging Face name and the shape of each tensor that the servers run; returns the
parts that this rank has of it: where each begins, and the tensor of its values (a view will do)."""

Weights = Any
"""A torch.nn.Module, a mapping of names to tensors, or a function of slices."""

Names = Mapping[str, str | Sequence[str] | None] | Callable[[str], str | Sequence[str] | None]
"""From a trainer's name to the Hugging Face name; to several names for a tensor in which these lie
one after the other (a fused projection, stacked experts); to None for one that is not sent. Names
that a mapping lacks stay as they are."""

Pair = tuple[Block, Any]
"""A block and the tensor of its values: a view of the trainer's memory, perhaps of another dtype
than the block is sent as."""

AS_IS, MATCH = "as-is", "match"
_WRAPPED = "_orig_mod."  # torch.compile puts it into names


@dataclass(frozen=True)
class _Part:
    """A box of a tensor, by the trainer's name or by that of the servers."""

    name: str
    """Of the tensor."""
    shape: tuple[int, ...]
    """The sizes of the whole tensor."""
    box: Box
    """Which part of it this process has; no element of it, perhaps."""
    local: Any
    """The values."""


def read_pairs(
    weights: Weights,
    targets: Sequence[Target],
    *,
    names: Names | None = None,
    dtype: str | None = MATCH,
) -> list[Pair]:
    """What this process has of the tensors that the servers run.

    Args:
        targets: the servers' tensors; empty if they are unknown, and then nothing is compared.
        names: how the trainer's names become Hugging Face names.
        dtype: what tensors are sent as: "match" (as the servers run each), "as-is", a torch dtype
            by name for all floating-point tensors, or None: another dtype than theirs is refused.

    Tensors of other names than the servers' are read, too: servers say which they do without.

    Raises:
        PreflightError: a tensor is not as the servers run it, or cannot be read.
        UsageError: these are not weights.
    """
    expected = {target.name: target for target in targets}
    if dtype == MATCH and not expected:
        raise UsageError(
            'dtype="match" needs the checkpoint the servers run on this machine',
            hint='name the dtype, such as dtype="bfloat16"',
        )
    if callable(weights) and not hasattr(weights, "state_dict"):
        parts = list(_sliced(weights, expected))
    else:
        parts = [
            renamed
            for name, tensor in _named(weights)
            for renamed in _renamed(_part(name, tensor), names, expected)
        ]
    return [
        (Block(part.name, _dtype(part, expected, dtype), part.shape, *part.box), part.local)
        for part in _without_tied(parts, expected)
        if math.prod(part.box[1]) or not math.prod(part.shape)
    ]


def dtype_name(dtype: object) -> str | None:
    """ "as-is", "match", or a torch dtype's name (given by name or as the dtype); None unchanged.

    Raises:
        UsageError: torch has no such dtype.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name in (AS_IS, MATCH):
        return name
    import torch

    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise UsageError(
            f"{name!r} is not a dtype of torch",
            hint='give one such as "bfloat16", or "match", or "as-is"',
        )
    return name


def addresses(weights: Weights) -> list[Any] | None:
    """Which tensors these weights are, under which names, and how and where they lie: while that is
    the same, nothing has moved. None for what must be called to know: a function, or another
    object's `state_dict`.
    """
    if (named := _own(weights)) is None:
        return None
    return [
        (name, id(tensor), part.data_ptr(), part.dtype, part.shape, part.stride())
        for name, tensor, part in named
    ]


def lie_in(pairs: Sequence[Pair], weights: Weights) -> bool:
    """Whether what was read of these weights is their own memory: a `state_dict` may make copies,
    which keep their values when the weights change.
    """
    storages = {part.untyped_storage().data_ptr() for _, _, part in _own(weights) or ()}
    return all(part.untyped_storage().data_ptr() in storages for _, part in pairs)


def _own(weights: Weights) -> list[tuple[str, Any, Any]] | None:
    """The named tensors of a module or a mapping, and this process's part of each."""
    if hasattr(weights, "_parameters"):
        named = _tensors_within(weights)
    elif isinstance(weights, Mapping):
        named = list(weights.items())
    else:
        return None
    local = ((name, tensor, getattr(tensor, "_local_tensor", tensor)) for name, tensor in named)
    return [row for row in local if hasattr(row[2], "data_ptr")]


def _tensors_within(module: Any) -> list[tuple[str, Any]]:
    """The named parameters and buffers of a module. Of thousands of modules, `modules()` takes
    longer than their tensors are summed in: its generators are as deep as the modules are nested.
    """
    tensors: list[tuple[str, Any]] = []
    seen: set[int] = set()
    remaining = [("", module)]
    while remaining:
        prefix, module = remaining.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        for named in (module._parameters, module._buffers):
            tensors += [(prefix + name, tensor) for name, tensor in named.items()]
        remaining += [(f"{prefix}{name}.", inner) for name, inner in module._modules.items()]
    return tensors


def _named(weights: Weights) -> Iterator[tuple[str, Any]]:
    """The named tensors of a module or a mapping. Raises UsageError, PreflightError."""
    if hasattr(weights, "state_dict"):
        if type(weights).__name__ == "DistributedDataParallel":
            weights = weights.module
        modules = weights.modules() if hasattr(weights, "modules") else ()
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
            raise PreflightError(
                "the model is wrapped by FSDP 1, whose flat parameters have no names",
                hint="shard it with torch.distributed.fsdp.fully_shard (FSDP 2)",
            )
        # unlike named_parameters() it has tied tensors under each of their names, and FSDP 2 puts
        # the sharded parameters back for it
        weights = weights.state_dict()
    if not isinstance(weights, Mapping):
        raise UsageError(
            f"{type(weights).__name__} is not a model",
            hint="give a torch.nn.Module, a state dict, or a function of slices",
        )
    for name, tensor in weights.items():
        require_tensor(name, tensor)
        yield str(name).replace(_WRAPPED, ""), tensor


def require_tensor(name: object, tensor: Any) -> None:
    """Raise UsageError for something that has no values to send."""
    if not isinstance(name, str) or not hasattr(tensor, "detach"):
        raise UsageError(
            f"weights are pairs of a name and a torch.Tensor, not of {type(name).__name__} and "
            f"{type(tensor).__name__}",
            hint="give model.state_dict() or model.named_parameters()",
        )
    if tensor.device.type == "meta":
        raise UsageError(f"{name} is on the meta device: it has no values")
    if str(tensor.layout) != "torch.strided":
        raise UsageError(f"{name} is {tensor.layout}", hint="give tensor.to_dense()")


def _part(name: str, tensor: Any) -> _Part:
    """What this process has of a tensor, which may be a DTensor."""
    shape = tuple(tensor.shape)
    local = tensor.detach()
    if not hasattr(tensor, "placements"):
        return _Part(name, shape, ((0,) * len(shape), shape), local)
    local = local.to_local()
    box = _shard(name, shape, tensor.device_mesh, tensor.placements)
    if math.prod(box[1]) and box[1] != tuple(local.shape):
        raise PreflightError(
            f"{name} is placed as {tensor.placements}: {list(box[1])} of {list(shape)} were "
            f"expected on this rank, and {list(local.shape)} are here",
            hint="give the parts yourself: a function of slices",
        )
    return _Part(name, shape, box, local)


def _shard(name: str, shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> Box:
    """The box of a DTensor that this process has, as torch.chunk cuts it along each mesh dimension.

    FSDP 2 shards what tensor parallelism has sharded before it, though it comes first in the mesh:
    torch says so by a strided shard.
    """
    start, size = [0] * len(shape), list(shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # the process is not in the mesh
        return tuple(start), (0,) * len(shape)
    cuts: list[tuple[bool, int, int, int]] = []
    for dimension, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        axis = getattr(placement, "dim", None)
        if axis is None:
            raise PreflightError(
                f"{name} is placed as {placement}, of which no rank has the values",
                hint="redistribute it first: Replicate() or Shard(dim)",
            )
        strided = hasattr(placement, "split_factor")
        cuts.append((strided, dimension, axis % len(shape), mesh.size(dimension)))
    for _, dimension, axis, count in sorted(cuts):
        length = -(-size[axis] // count)
        begin = min(size[axis], length * coordinate[dimension])
        start[axis] += begin
        size[axis] = min(length, size[axis] - begin)
    return tuple(start), tuple(size)


def _sliced(slices: Slices, expected: Mapping[str, Target]) -> Iterator[_Part]:
    """What a function of slices says of each tensor that the servers run."""
    if not expected:
        raise UsageError(
            "a function of slices needs the checkpoint the servers run on this machine",
            hint="give a torch.nn.Module or a state dict",
        )
    for target in expected.values():
        for start, tensor in slices(target.name, target.shape):
            require_tensor(target.name, tensor)
            box = tuple(map(int, start)), tuple(tensor.shape)
            yield _Part(target.name, target.shape, box, tensor.detach())


def _renamed(part: _Part, names: Names | None, expected: Mapping[str, Target]) -> Iterator[_Part]:
    """The part under the servers' name, or its share of each of several tensors."""
    given: str | Sequence[str] | None = part.name
    if names is not None:
        given = names(part.name) if callable(names) else names.get(part.name, part.name)
    if isinstance(given, str):
        yield replace(part, name=given)
        return
    at = 0
    for name in given or ():
        if name not in expected:
            raise PreflightError(
                f"names: {part.name} → {name}, which is not in the model the servers run"
            )
        whole = _within(part, name, expected[name].shape, at)
        yield _share(part, name, expected[name].shape, whole)
        at += math.prod(expected[name].shape)
    if given is not None and at != math.prod(part.shape):
        raise PreflightError(
            f"names: {part.name} has {math.prod(part.shape)} elements, the {len(given)} tensors "
            f"that it is split into have {at}"
        )


def _within(part: _Part, name: str, shape: tuple[int, ...], at: int) -> Box:
    """The box, in a fused tensor, of a tensor of this shape that begins at element `at`."""
    fused = part.shape
    extra = len(fused) - len(shape)
    start: list[int] = []
    for axis in range(len(fused)):
        inner = math.prod(fused[axis + 1 :])
        start.append(at // inner)
        at %= inner
    size = (1,) * extra + shape
    if extra < 0 or not shape or shape[1:] != fused[extra + 1 :] or any(start[extra + 1 :]):
        fits = False
    else:
        fits = all(a + b <= c for a, b, c in zip(start, size, fused, strict=True))
    if not fits:
        raise PreflightError(
            f"names: {name} {list(shape)} is not a run of rows of {part.name} {list(fused)}",
            hint="give the parts yourself: a function of slices",
        )
    return tuple(start), size


def _share(part: _Part, name: str, shape: tuple[int, ...], whole: Box) -> _Part:
    """What a part of a fused tensor has of a tensor that lies at `whole` in it."""
    begins = [max(a, b) for a, b in zip(part.box[0], whole[0], strict=True)]
    lengths = [
        max(0, min(a + c, b + d) - begin)
        for a, b, c, d, begin in zip(
            *(part.box[0], whole[0], part.box[1], whole[1]), begins, strict=True
        )
    ]
    extra = len(part.shape) - len(shape)
    start = tuple(begin - at for begin, at in zip(begins, whole[0], strict=True))[extra:]
    if not math.prod(lengths):
        return _Part(name, shape, ((0,) * len(shape), (0,) * len(shape)), part.local)
    spans = zip(begins, part.box[0], lengths, strict=True)
    local = part.local[tuple(slice(b - a, b - a + length) for b, a, length in spans)]
    return _Part(name, shape, (start, tuple(lengths[extra:])), local[(0,) * extra])


def _without_tied(parts: Sequence[_Part], expected: Mapping[str, Target]) -> list[_Part]:
    """The parts, but those that the servers do not run and that lie where another does: tied
    embeddings under their second name.

    Raises:
        PreflightError: a name differs from theirs by what a wrapper puts in front.
    """
    extra = [part for part in parts if expected and part.name not in expected]
    addresses = {part.local.data_ptr() for part in parts if part.name in expected}
    tied = {part.name for part in extra if part.local.data_ptr() in addresses}
    for part in extra:
        for ending in () if part.name in tied else expected:
            if part.name.endswith(f".{ending}"):
                prefix = part.name.removesuffix(ending)
                raise PreflightError(
                    f"{part.name} is not in the model the servers run; {ending} is",
                    hint=f"name it so: name.removeprefix({prefix!r})",
                )
    return [part for part in parts if part.name not in tied]


def _dtype(part: _Part, expected: Mapping[str, Target], dtype: str | None) -> str:
    """The torch dtype, by name, that a part is sent as. Raises PreflightError."""
    own = str(part.local.dtype).removeprefix("torch.")
    target = expected.get(part.name)
    if target is not None and target.shape != part.shape:
        raise PreflightError(
            f"{part.name} is {list(part.shape)} here, the servers run {list(target.shape)}"
        )
    theirs = own if target is None else target.dtype
    if dtype is None and theirs != own:
        raise PreflightError(
            f"{part.name} is {own} here, {theirs} in the checkpoint the servers run",
            hint='convert on purpose: dtype="match"; or let the servers cast: dtype="as-is"',
        )
    sent_as = own
    if dtype == MATCH:
        sent_as = theirs
    elif dtype not in (None, AS_IS) and part.local.is_floating_point():
        sent_as = str(dtype)
    safetensors_name(sent_as, part.name)
    return sent_as

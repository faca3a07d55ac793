"""Read a Hugging Face checkpoint directory by its headers: shards, index, config, identity. Of one
that is none, say what it is and what to pass instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from skyctl.checkpoints.header import (
    Shard,
    Tensor,
    digest_header,
    read_header,
    read_json,
    read_plain,
    remembered,
)
from skyctl.checkpoints.hub import MAIN, HubReference
from skyctl.errors import NotFoundError, PreflightError
from skyctl.store.paths import expanded

INDEX_NAME = "model.safetensors.index.json"
_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_layouts: dict[tuple[str, ...], str] = {}
"""Layout digests by the headers they follow from; the latest few."""
_indexes: dict[str, _Index] = {}
"""Indexes by the digests of their files; the latest few."""
_absent: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
"""Tensors that an index names and its shards lack, by their digests; the latest few."""
# torch.distributed.checkpoint, Megatron, DeepSpeed
_OF_TRAINERS = ("*.distcp", "*/*.distcp", "latest_checkpointed_iteration.txt", "global_step*")
_NO_CHECKPOINT = "give a Hugging Face directory: config.json and *.safetensors"


@dataclass(frozen=True)
class _Index:
    """`weight_map`: tensor name → shard file name. `digest`: of its file."""

    digest: str
    weight_map: Mapping[str, str]

    @cached_property
    def names(self) -> list[str]:
        """The shards' files, in the order in which they are numbered."""
        return sorted(set(self.weight_map.values()))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    `layout_digest` covers names, dtypes, shapes and sizes: equal for two checkpoints of one model.
    `identity_digest` adds each file's inode, size and times: it changes when a file is written or
    replaced. Neither reads the tensors' bytes.
    """

    path: Path
    """Its directory."""
    shards: tuple[Shard, ...]
    """Its safetensors files."""
    tensors: tuple[Tensor, ...]
    """Its tensors in shard order, and in file order within a shard."""
    config: Mapping[str, Any]
    """Its config.json."""
    absent: tuple[str, ...] = ()
    """Names that its index has and its shards have not: servers may not need them."""

    @property
    def name(self) -> str:
        """The directory's name; in a hub cache, where that is a commit, the model's."""
        if self.path.parent.name == "snapshots":
            return self.path.parent.parent.name.rpartition("--")[2]
        return self.path.name

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def headers(self) -> tuple[str, ...]:
        """The shards' header digests: equal headers mean equal layouts."""
        return tuple(shard.header_digest for shard in self.shards)

    @cached_property  # requested while servers are frozen, and covers a line per tensor
    def layout_digest(self) -> str:
        def digest() -> str:
            return _digest(sorted((t.name, t.dtype, t.shape, t.nbytes) for t in self.tensors))

        return remembered(_layouts, self.headers, digest)

    @cached_property
    def identity_digest(self) -> str:
        files = sorted((shard.name, *astuple(shard.identity)) for shard in self.shards)
        return _digest([self.layout_digest, files])


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def locate(path: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The local directory (or file) that `path` means: itself, or a hub id in the local hub cache,
    perhaps with a revision (`ORG/NAME@REVISION`).

    None if there is nothing local by that name. Never goes to the network.
    """
    candidate = expanded(path)
    if _exists(candidate):
        return Path(os.path.abspath(candidate))  # noqa: PTH100  (resolve() would lose the name)
    reference = HubReference.parse(path)
    return None if reference is None else reference.snapshot(environ)


def _exists(path: Path) -> bool:
    """False as well where this user may not look: servers name directories of theirs."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises


def absolute(path: str) -> str:
    """A checkpoint argument that means the same in another process: absolute, or a hub id.

    Raises:
        NotFoundError: there is nothing local by that name.
    """
    located = locate(path)
    if located is None:
        raise _not_here(path)
    return str(located) if _exists(expanded(path)) else path


def _not_here(path: str) -> NotFoundError:
    hint = f"give a local directory; this name means {expanded(path).absolute()}"
    reference = HubReference.parse(path)
    if reference is not None and "/" in reference.model and not _exists(Path(path).parent):
        revision = "" if reference.revision == MAIN else f" --revision {reference.revision}"
        hint = f"a hub id must be downloaded first: hf download {reference.model}{revision}"
    return NotFoundError(f"checkpoint {path} does not exist", hint=hint)


def read_checkpoint(path: str, *, check_index: bool = True) -> Checkpoint:
    """Read the headers of a checkpoint directory (or a hub id in the local cache). Without
    `check_index` the index only says which files belong to it.

    Raises:
        NotFoundError: there is no such path.
        PreflightError: it is not a complete safetensors checkpoint; names file and tensor.
    """
    directory = locate(path)
    if directory is None:
        raise _not_here(path)
    if not directory.is_dir():
        raise PreflightError(
            f"checkpoint {path} is a file",
            hint=f"give the directory that holds it: {directory.parent}",
        )
    config = read_config(directory)
    index = _read_index(directory)
    names = index.names if index is not None else _shard_names(directory)
    shards: list[Shard] = []
    tensors: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        try:
            shard, header = read_header(directory / name, number)
        except NotFoundError as error:
            raise PreflightError(
                f"checkpoint {path} lacks its shard {name}", hint="copy or download it completely"
            ) from error
        shards.append(shard)
        for tensor in header:
            if tensor.name in tensors:
                other = names[tensors[tensor.name].shard]
                raise PreflightError(f"{directory}: {tensor.name} is in both {other} and {name}")
            tensors[tensor.name] = tensor
    if not tensors:
        raise PreflightError(f"checkpoint {path} holds no tensors")
    checkpoint = Checkpoint(directory, tuple(shards), tuple(tensors.values()), config)
    if index is None or not check_index:
        return checkpoint
    check = partial(_check_index, directory, index, tensors)
    absent = remembered(_absent, (index.digest, checkpoint.headers), check)
    return replace(checkpoint, absent=absent) if absent else checkpoint


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint directory.

    Raises:
        PreflightError: it is missing or not a JSON object.
    """
    path = directory / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError as error:
        message, hint = mistaken_for(directory)
        raise PreflightError(message, hint=hint) from error
    except (OSError, ValueError, RecursionError) as error:
        raise PreflightError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise PreflightError(f"{path} is not a JSON object")
    return config


def config_of(*models: str | None) -> dict[str, Any] | None:
    """`config.json` of the first of these models, directories or hub ids, that this machine has it
    of; None if it has none.
    """
    for model in filter(None, models):
        directory = locate(model)
        with suppress(PreflightError):
            if directory is not None:
                return read_config(directory)
    return None


def _read_index(directory: Path) -> _Index | None:
    """None if the checkpoint has no index."""
    path = directory / INDEX_NAME
    if not path.exists():
        return None
    try:
        raw = read_plain(path)
    except OSError as error:
        raise PreflightError(f"{path} is not a valid index: {error!r}") from error
    digest = digest_header(raw)
    return remembered(_indexes, digest, lambda: _Index(digest, _parse_index(raw, path)))


def index_problem(directory: Path) -> str:
    """What keeps an engine from loading the files that an index names; "" if nothing does, or if
    there is no index.
    """
    try:
        index = _read_index(directory)
    except PreflightError as error:
        return error.message
    missing = [name for name in index.names if not _exists(directory / name)] if index else []
    return f"{directory} lacks {missing[0]}, which its index names" if missing else ""


def _parse_index(raw: bytes, path: Path) -> dict[str, str]:
    """Tensor name → shard file name."""
    try:
        weight_map = json.loads(raw.decode("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PreflightError(f"{path} is not a valid index: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise PreflightError(f"{path} is not a valid index: its weight_map is empty")
    good: set[str] = set()
    for tensor, name in weight_map.items():
        # a plain name: an index must not lead outside its own directory
        if not isinstance(name, str) or not (name in good or (name and Path(name).name == name)):
            raise PreflightError(f"{path}: {tensor!r} is in {name!r}, which is not a file name")
        good.add(name)
    return weight_map


def _shard_names(directory: Path) -> list[str]:
    """The shards of a checkpoint without an index, sorted by name."""
    names = sorted(entry.name for entry in directory.glob("*.safetensors"))
    # Mistral ships the same weights twice: a second copy under its own names
    ours = [name for name in names if not name.startswith("consolidated")] or names
    if not ours or ours == ["adapter_model.safetensors"]:
        message, hint = mistaken_for(directory)
        raise PreflightError(message, hint=hint)
    for name in ours:
        match = _NUMBERED.match(name)
        if match is None:
            continue
        for number in range(1, int(match["count"]) + 1):
            shard = f"{match['stem']}-{number:05d}-of-{match['count']}.safetensors"
            if shard not in names:
                raise PreflightError(
                    f"checkpoint {directory} lacks its shard {shard}",
                    hint="copy or download it completely",
                )
    return ours


def _check_index(directory: Path, index: _Index, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Check that the index has all tensors, in their files; returns the names of others in it."""
    for tensor, name in index.weight_map.items():
        stored = tensors.get(tensor)
        if stored is not None and index.names[stored.shard] != name:
            raise PreflightError(f"{directory}: the index puts {tensor} in {name}, it is not there")
    for tensor, found_tensor in tensors.items():
        if tensor not in index.weight_map:
            raise PreflightError(
                f"{directory}: {index.names[found_tensor.shard]} holds {tensor}, the index lacks it"
            )
    return tuple(name for name in index.weight_map if name not in tensors)


def mistaken_for(directory: Path) -> tuple[str, str]:
    """What a directory without config.json or without safetensors is, and a hint."""

    def has(*patterns: str) -> bool:
        return any(next(directory.glob(pattern), None) is not None for pattern in patterns)

    if has("adapter_config.json", "adapter_model.*"):
        return (
            f"{directory} is a PEFT adapter (LoRA){_base_note(directory)}, not a checkpoint of the "
            "whole model",
            "merge it into its model (peft: merge_and_unload) and give what that saves",
        )
    if has("snapshots/*/config.json"):
        revision = max(directory.glob("snapshots/*/config.json"), key=_age).parent
        return f"{directory} is a hub cache entry", f"give its snapshot: {revision}"
    if configs := sorted(directory.glob("*/config.json"), key=_age):
        return (
            f"{directory} is not a checkpoint: it has no config.json",
            f"there is a checkpoint in it: {configs[-1].parent}",
        )
    if not has("*.safetensors") and has("*.gguf"):
        return (
            f"{directory} holds GGUF files, which are quantized for llama.cpp",
            "give the model they were made of, as safetensors",
        )
    if has("original/*", "consolidated.*", "params.json") and not has("model*.safetensors"):
        return (
            f"{directory} holds a model in its maker's own format (original/, consolidated.*)",
            "download the *.safetensors of that repository as well, or convert it",
        )
    if has(*_OF_TRAINERS):
        return (
            f"{directory} is a trainer's sharded checkpoint, not a Hugging Face one",
            "save or convert it with save_pretrained (safetensors), and give that directory",
        )
    if has("*.bin", "*.pt", "*.pth"):
        return (
            f"checkpoint {directory} has no *.safetensors file: its weights are pickled",
            "save it again with safe_serialization=True",
        )
    if has(".gitattributes", ".git", "README.md") and not has("*.safetensors"):
        return (
            f"{directory} is a hub repository without its weights: it has no *.safetensors file",
            "download it completely: hf download OWNER/NAME --local-dir DIRECTORY",
        )
    missing = "config.json" if not has("config.json") else "*.safetensors file"
    return f"{directory} is not a checkpoint: it has no {missing}", _NO_CHECKPOINT


def _base_note(adapter: Path) -> str:
    """` of Qwen/Qwen3-0.6B`, if the adapter says so."""
    try:
        base = read_json(adapter / "adapter_config.json")["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f" of {base}" if isinstance(base, str) and base else ""


def _age(path: Path) -> float:
    return path.stat().st_mtime

"""Where the weights of a push come from (files that skyctl reads, a trainer that sends them, one in
whose memory they are, or another server), what their label means, and the digest over every byte of
them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.checkpoints.header import Tensor
from skyctl.errors import NotFoundError, PreflightError, UsageError, WeightsGone
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.rows import Compared, KnownRows, read_rows
from skyctl.transfer.reader import ShardFiles

if TYPE_CHECKING:
    from skyctl.live.offer import Live
    from skyctl.push.trainer import Trainer
    from skyctl.store.journal import PushRecord
    from skyctl.store.kept_weights import KeptWeights


BASE = "base"
"""What servers are started with, in place of a label."""


def reused_label(request: PushRequest, pushes: Sequence[PushRecord]) -> str:
    """A warning if the request's label has stood for another checkpoint until now, else "".

    `pushes` are newest first.
    """
    label = request.weight_version
    before = next((push for push in pushes if push.ok and push.version == label), None)
    if not label or before is None or before.checkpoint == request.checkpoint:
        return ""
    return (
        f"version {label} was {before.checkpoint} until now ({before.job}); "
        "a label of its own tells the two apart"
    )


def means(word: str, version: str) -> bool:
    """Whether `word` is the version, or its name without the digest."""
    return bool(word) and word in (version, version.rpartition("@")[0])


def full_version(word: str, versions: Iterable[str]) -> str:
    """The version that `word` means: itself, or the only `word@digest` among `versions`.

    A word that matches none is returned unchanged.

    Raises:
        NotFoundError: there is no word, as of a shell's variable that is not set.
        UsageError: it may be any of several.
    """
    distinct = dict.fromkeys(versions)
    if not word:
        names = ", ".join(distinct) or "none"
        raise NotFoundError("the name of a version is missing", hint=f"versions: {names}")
    matching = [version for version in distinct if means(word, version)]
    if word in distinct or not matching:
        return word
    if len(matching) > 1:
        raise UsageError(
            f"version {word} may be any of {len(matching)}", hint=f"one of: {', '.join(matching)}"
        )
    return matching[0]


def rollback(
    request: PushRequest,
    pushes: Sequence[PushRecord],
    kept: Sequence[KeptWeights] = (),
    version: str | None = None,
    base: str | None = None,
    base_digest: str | None = None,
) -> PushRequest:
    """`request` for the version before the current one, or for `version`; `pushes` and `kept` are
    newest first. A kept copy takes precedence over the directory that was pushed then. Before the
    first push it is `base`, the directory that servers are started with, as it was then.

    Two rollbacks return a fleet to where it was: the version it left is then the previous one.

    Raises:
        NotFoundError: no other version was ever pushed, or `version` never was.
        UsageError: `version` may be any of several.
    """
    done = [push for push in pushes if push.ok]
    had = [push for push in done if push.checkpoint]  # what a trainer sent itself is in no file
    pushed = dict.fromkeys([p.version for p in had if p.version] + [k.version for k in kept])
    if version is not None:
        version = full_version(version, pushed)
    current = next((_given(push) for push in pushes if _given(push)), None)
    if (target := version) is None:
        target = next((p.version for p in had if p.version != current), None)
    copy = next((weights for weights in kept if target and weights.version == target), None)
    before = copy or next((push for push in had if push.version == target), None)
    if before is not None:
        return replace(
            request,
            checkpoint=before.checkpoint,
            weight_version=before.version,
            expected_digest=before.checkpoint_digest,
            expected_content=before.content_digest,
            draft=request.draft or before.draft,
            expected_draft="" if request.draft else before.draft_digest,
        )
    first = {_given(push) for push in pushes} <= {None, current} and current not in (None, BASE)
    if base and (version == BASE or (version is None and first)):
        return replace(request, checkpoint=base, weight_version=BASE, expected_digest=base_digest)
    if version is not None:
        raise NotFoundError(
            f"no version {version} was pushed into this fleet",
            hint=f"its versions: {', '.join([*pushed, *([BASE] if base else [])]) or 'none'}",
        )
    have = f"{done[0].version} is the only version that was pushed" if done else "no push yet"
    or_base = "; or what servers were started with: skyctl sync-weights --rollback base"
    raise NotFoundError(
        f"there is nothing to roll back to: {have}",
        hint="push the checkpoint that you want by its path: skyctl sync-weights CKPT"
        + (or_base if base else ""),
    )


def _given(push: PushRecord) -> str | None:
    """The version that a push gave the fleet: one that failed gives it if some servers have it."""
    if push.ok:
        return push.version
    version: str | None = push.result.get("version")
    rows = push.result.get("servers", ()) if version else ()
    return version if any(row["ok"] and row["version"] == version for row in rows) else None


def refuse_changed(request: PushRequest, checkpoint: Checkpoint) -> None:
    """Raise WeightsGone if the files do not hold what was pushed under this version. Files that
    were only copied or touched since are read, and pass where the content of that push is known.
    """
    if request.expected_digest in (None, checkpoint.identity_digest):
        return
    if request.expected_content and request.expected_content == read_content(checkpoint):
        return
    version = request.weight_version
    pushed = f"pushed as {version}" if version else "last looked at"
    raise WeightsGone(
        f"{checkpoint.path} was overwritten since it was {pushed}",
        hint="push it as what it is now: skyctl sync-weights " + str(checkpoint.path),
    )


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Raise CheckpointChanged unless these are still the files whose headers were read. They are
    opened: a network file system may have cached the status of others.
    """
    ShardFiles(checkpoint.shards).close()


def refuse_changed_draft(digest: str, checkpoint: Checkpoint) -> None:
    """Raise WeightsGone if a draft model's files are not those with this digest; "" is any."""
    if digest not in ("", checkpoint.identity_digest):
        raise WeightsGone(
            f"the draft model {checkpoint.path} was overwritten since it was pushed",
            hint="push the model with what it is now: skyctl sync-weights CKPT --draft "
            f"{checkpoint.path}",
        )


@dataclass(frozen=True)
class Source:
    """The weights of one push, as far as skyctl knows them before they are sent."""

    identity: str
    """Names the files by their headers and sizes; random for weights that are in no file."""
    checkpoint: Checkpoint | None = None
    """The files; None for weights that are in no file."""
    trainer: Trainer | None = None
    """Sends the weights by itself: skyctl sees none of their bytes."""
    live: Live | None = None
    """In a trainer's memory, with the numbers that servers must hold."""
    compares_rows: bool = True
    """Whether rows of the files are compared with what servers hold afterwards."""

    @property
    def path(self) -> str:
        """The directory of the files; "" if there are none."""
        return str(self.checkpoint.path) if self.checkpoint is not None else ""

    @property
    def name(self) -> str:
        """What labels begin with."""
        return self.checkpoint.name if self.checkpoint is not None else ""

    @property
    def files(self) -> Checkpoint:
        """The checkpoint of a way that reads files."""
        assert self.checkpoint is not None
        return self.checkpoint

    @property
    def whole(self) -> Compared:
        """All tensors and all bytes, as far as skyctl sees them."""
        if self.live is not None:
            return Compared(self.live.tensors, self.live.total_bytes)
        if self.checkpoint is None:
            return Compared()
        return Compared(len(self.checkpoint.tensors), self.checkpoint.total_bytes)

    @cached_property
    def rows(self) -> tuple[KnownRows, ...]:
        """Rows that servers must hold after the engine's loader has filled them.

        Raises:
            PreflightError: a file cannot be read.
        """
        if self.checkpoint is None or not self.compares_rows:
            return ()
        try:
            return read_rows(self.checkpoint)
        except OSError as error:
            raise PreflightError(f"{self.path} cannot be read: {error}") from error


async def read_source(request: PushRequest, fleet: PushFleet) -> Source:
    """What is to be pushed.

    Raises:
        NotFoundError: there is no such checkpoint.
        PreflightError, WeightsGone: it cannot be read, or is not what it was.
    """
    if not request.checkpoint and fleet.trainer is not None:
        return Source(secrets.token_hex(16), trainer=fleet.trainer)
    if fleet.live is not None:
        return Source(secrets.token_hex(16), live=fleet.live)
    if fleet.sibling is not None:
        return Source(secrets.token_hex(16))
    checkpoint = await asyncio.to_thread(_read, request)
    compares_rows = fleet.verifies(request)
    return Source(
        checkpoint.identity_digest, checkpoint, fleet.trainer, compares_rows=compares_rows
    )


def _read(request: PushRequest) -> Checkpoint:
    checkpoint = read_checkpoint(request.checkpoint)
    refuse_changed(request, checkpoint)
    return checkpoint


_READ_BYTES = 8 * 1024 * 1024
_THREADS = 16


def content_digest(tensors: Sequence[Tensor], crc32: Mapping[str, int]) -> str:
    """Digest over names, types, shapes and the crc32 of every tensor; "" unless all are known."""
    if len(crc32) < len(tensors):
        return ""
    content = sorted((t.name, t.dtype, t.shape, crc32[t.name]) for t in tensors)
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def read_content(checkpoint: Checkpoint) -> str:
    """The content digest of the files; reads all of them. Raises CheckpointChanged."""
    files = ShardFiles(checkpoint.shards)

    def crc32(tensor: Tensor) -> int:
        checksum, buffer = 0, memoryview(bytearray(min(_READ_BYTES, max(tensor.nbytes, 1))))
        for at in range(0, tensor.nbytes, _READ_BYTES):
            part = buffer[: min(_READ_BYTES, tensor.nbytes - at)]
            files.read(tensor.shard, tensor.begin + at, [part])
            checksum = zlib.crc32(part, checksum)
        return checksum

    try:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
            names = (tensor.name for tensor in checkpoint.tensors)
            checksums = dict(zip(names, threads.map(crc32, checkpoint.tensors), strict=True))
        for number in range(len(checkpoint.shards)):
            files.check(number)
        return content_digest(checkpoint.tensors, checksums)
    finally:
        files.close()

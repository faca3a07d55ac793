"""Where the weights of a push come from: files that skyctl reads, a trainer that sends them, or one
in whose memory they are.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from functools import cached_property

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.errors import PreflightError
from skyctl.live.offer import Live
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.rows import Compared, KnownRows, read_rows
from skyctl.push.trainer import Trainer
from skyctl.push.versions import refuse_changed


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
    checkpoint = await asyncio.to_thread(_read, request)
    return Source(
        checkpoint.identity_digest, checkpoint, fleet.trainer, compares_rows=request.verify
    )


def _read(request: PushRequest) -> Checkpoint:
    checkpoint = read_checkpoint(request.checkpoint)
    refuse_changed(request, checkpoint)
    return checkpoint

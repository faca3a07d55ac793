"""What a trainer's ranks send a worker: received in a thread, beside the worker's own work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch

from skyctl.engines.inside.ended import GRACE_S
from skyctl.wire.batches import Batch, batches
from skyctl.wire.copies import octets_of
from skyctl.wire.device_digest import digest_on_device
from skyctl.wire.group_store import GroupStoreClient
from skyctl.wire.layouts import Copy, Program
from skyctl.wire.messages import RowQuestion
from skyctl.wire.peer_group import Meeting, PeerGroup
from skyctl.wire.peers import connected, join

Targets = Mapping[int, torch.Tensor]
"""Flat bytes, by the number of the parameter."""
Steps = Sequence[Sequence[tuple[int, Batch]]]
"""What arrives in each step: from which ranks, and what from each."""


class Arrivals:
    """This worker's place in the group. Each call begins something in a thread, once the one before
    has ended.

    Args:
        place: of this worker in the group.
        steps: what each push sends it.
        trainer_ended: is called, in a thread, some seconds after the trainer's rank 0 has ended, or
            has left the group, or anything here has failed, unless `close` was called. May be
            called twice.
    """

    def __init__(
        self,
        meeting: Meeting,
        place: int,
        device: torch.device,
        steps: Steps,
        trainer_ended: Callable[[], None],
    ) -> None:
        self._group: PeerGroup | None = None
        self._store: GroupStoreClient | None = None
        self._trainer_ended = trainer_ended
        self._problem = ""
        self._thread = threading.Thread()
        self._steps = steps
        # allocated before a push begins: memory that ran out in one would leave half of the weights
        self._landing = torch.empty(landing_bytes(steps), dtype=torch.uint8, device=device)
        self._timeout_s = meeting.transfer_timeout_s
        self._leaving = False
        """By `close`: nobody is to hear of the trainer any more."""
        self._then(lambda: self._join(meeting, place, device))

    def receive(self, targets: Targets, check: Callable[[], None] = lambda: None) -> None:
        """Begin to receive all into the targets, and check it."""
        self._then(lambda: self._receive(targets, check))

    def have_come(self) -> bool:
        """Whether what was begun has ended. Raises RuntimeError: it has failed."""
        if self._thread.is_alive():
            return False
        if self._problem:
            raise RuntimeError(self._problem)
        return True

    def wait(self) -> None:
        """Return once it has ended. Raises RuntimeError."""
        self._thread.join(2 * self._timeout_s)
        if not self.have_come():
            raise RuntimeError("the trainer's ranks have not sent all in time")

    def close(self) -> None:
        """Leave the group; what is under way ends by itself."""
        self._leaving = True
        self._disconnect()

    def _disconnect(self) -> None:
        group, self._group = self._group, None
        store, self._store = self._store, None
        for member in (group, store):
            if member is not None:
                member.close()

    def _then(self, act: Callable[[], None]) -> None:
        before = self._thread

        def run() -> None:
            if before.ident is not None:
                before.join()
            if self._problem:
                return
            try:
                act()
            except Exception as error:
                self._problem = f"{error}" or repr(error)
                self._disconnect()
                # not in this thread, which a load may wait for with the lock that letting go takes;
                # nor is the store's end enough, which is watched only once the group has formed
                threading.Thread(target=self._ended, name="skyctl-ended", daemon=True).start()

        self._thread = threading.Thread(target=run, name="skyctl-arrivals", daemon=True)
        self._thread.start()

    def _join(self, meeting: Meeting, place: int, device: torch.device) -> None:
        self._store = store = connected(meeting)
        self._group = join(meeting, place, device, store)
        store.stay(self._ended)
        if self._leaving:
            self._disconnect()

    def _ended(self) -> None:
        if not self._leaving:
            time.sleep(GRACE_S)
        if not self._leaving:
            self._trainer_ended()

    def _receive(self, targets: Targets, check: Callable[[], None]) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("the group with the trainer is closed")
        with group.context(), torch.inference_mode():  # parameters may be of that mode
            for step in self._steps:
                landing, end = [], 0
                for rank, batch in step:
                    begin, end = end, end + batch.packed_bytes
                    messages = batch.landing(self._landing[begin:end], targets)
                    landing.append((rank, batch, messages))
                group.transfer([], [(rank, m) for rank, _, messages in landing for m in messages])
                for _, batch, messages in landing:
                    batch.unpack(messages, targets)
            group.finish()
            check()


def landing_bytes(steps: Steps) -> int:
    """What all that is packed in any of these steps takes."""
    return max((sum(batch.packed_bytes for _, batch in step) for step in steps), default=0)


def steps_of(copies: Sequence[Copy], sources: Sequence[Sequence[int]]) -> Steps:
    """What arrives of these copies. Each rank has cut the same, in the order of its exports.
    `sources`: of each chunk of the program, the rank that sends it and its number there.
    """
    by_rank: dict[int, list[tuple[int, Copy]]] = {}
    for copy in copies:
        rank, export = sources[copy.chunk]
        by_rank.setdefault(int(rank), []).append((int(export), copy))
    columns = []
    for rank, sent in sorted(by_rank.items()):
        sent.sort(key=lambda pair: pair[0])
        columns.append([(rank, batch) for batch in batches((c for _, c in sent), len(by_rank))])
    rows = zip_longest(*columns)
    return [[pair for pair in row if pair is not None] for row in rows]


def empty_tensors(program: Program) -> dict[str, torch.Tensor]:
    """Memory for the tensors of a program, by name."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, dtype, shape in program.parameters
    }


def require_numbers(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int]) -> None:
    """Raise RuntimeError unless every byte is what the ranks have."""
    for name, number in zip(tensors, digest_on_device(list(tensors.values())), strict=True):
        if numbers.get(name) != number:
            raise RuntimeError(f"{name} was damaged on its way")


def rows_of(tensor: torch.Tensor, question: RowQuestion) -> dict[str, str]:
    """The asked columns of each row, in hexadecimal digits, by its number."""
    height, width = question.matrix
    size = tensor.dtype.itemsize
    matrix = octets_of(tensor).view(height, width * size)
    columns = slice(question.begin * size, question.end * size)
    return {str(row): bytes(matrix[row, columns].tolist()).hex() for row in question.rows}

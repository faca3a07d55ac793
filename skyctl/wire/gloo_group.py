"""A gloo group of its own, next to whatever groups torch has, of ranks that know a secret.

gloo takes the first process that connects for the rank it waits for. So each rank proves to each
other, over the very connection that weights will take, that it knows the secret: before that none
are sent.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from skyctl.wire.group_store import GroupStore, GroupStoreClient
from skyctl.wire.proofs import proof_of

Store = GroupStore | GroupStoreClient

_TAG = 1


def form_group(
    store: Store, secret: bytes, *, address: str, rank: int, world_size: int, timeout_s: float
) -> dist.ProcessGroupGloo:
    """Join the group from `address`, one of this machine; returns when every rank has.

    No rank needs the store any more when rank 0 has returned.

    Raises:
        RuntimeError: a rank did not come, or a process came that does not know the secret.
        OSError: the store is gone, or took too long.
    """
    deadline = time.monotonic() + timeout_s
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    shown = _Store(store)  # the group itself does not keep it alive
    group = dist.ProcessGroupGloo(shown, rank, world_size, options)
    try:
        _prove(group, secret, rank, world_size, deadline)
    except BaseException:
        group.shutdown()
        raise
    return group


class _Store(dist.Store):  # type: ignore[misc]
    """The store as torch asks it: these three calls are all that gloo makes."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._store.get(key)


def _prove(
    group: dist.ProcessGroupGloo, secret: bytes, rank: int, world_size: int, deadline: float
) -> None:
    others = [other for other in range(world_size) if other != rank]
    proofs = {
        other: torch.tensor(list(_proof(secret, rank, other)), dtype=torch.uint8)
        for other in others
    }
    heard = {other: torch.zeros_like(proof) for other, proof in proofs.items()}
    hearing = {other: group.recv([heard[other]], other, _TAG) for other in others}
    telling = [group.send([proof], other, _TAG) for other, proof in proofs.items()]
    for other, work in hearing.items():
        work.wait(_remaining(deadline))
        if not hmac.compare_digest(bytes(heard[other].tolist()), _proof(secret, other, rank)):
            raise RuntimeError(
                f"another process took the place of rank {other} in this push's group"
            )
    for work in telling:
        work.wait(_remaining(deadline))


def _proof(secret: bytes, teller: int, hearer: int) -> bytes:
    return proof_of(secret, f"rank {teller} to rank {hearer}".encode())


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))

"""Joining a group of a trainer's ranks and servers' workers (`peer_group.py`), and the group over
gloo.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from skyctl.wire.gloo_group import form_group
from skyctl.wire.group_store import GroupStore, GroupStoreClient
from skyctl.wire.nccl_peers import NcclPeers
from skyctl.wire.peer_group import Meeting, Messages, PeerGroup

_TAG = 2


def join(
    meeting: Meeting,
    rank: int,
    device: torch.device,
    store: GroupStore | GroupStoreClient | None = None,
) -> PeerGroup:
    """Join a group, which has formed when this returns. `store` is that of rank 0, or this member's
    connection to it; without one, a connection is made, and ends with the meeting.

    Raises:
        RuntimeError: a member did not come, or another process came in its place.
        OSError: the store is gone, or took too long.
    """
    secret = bytes.fromhex(meeting.secret)
    client = store or connected(meeting)
    try:
        if meeting.transport == "nccl":
            return NcclPeers(meeting, rank, device, client)
        address = client.address if isinstance(client, GroupStoreClient) else meeting.host
        return _GlooPeers(meeting, rank, client, secret, address)
    finally:
        if store is None:
            client.close()


def connected(meeting: Meeting) -> GroupStoreClient:
    """A member's connection to rank 0's store. Raises as `join`."""
    secret = bytes.fromhex(meeting.secret)
    return GroupStoreClient(meeting.host, meeting.port, secret, timeout_s=meeting.meet_timeout_s)


class _GlooPeers(PeerGroup):
    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        store: GroupStore | GroupStoreClient,
        secret: bytes,
        address: str,
    ) -> None:
        self._timeout_s = meeting.transfer_timeout_s
        self._group: Any = form_group(
            store,
            secret,
            address=address,
            rank=rank,
            world_size=meeting.members,
            timeout_s=meeting.meet_timeout_s,
        )
        self._group.set_timeout(timedelta(seconds=self._timeout_s))

    def transfer(self, sends: Messages, receives: Messages) -> None:
        group, until = self._group, time.monotonic() + self._timeout_s
        if group is None:
            raise RuntimeError("the group with the trainer is closed")
        works = [group.recv([message], member, _TAG) for member, message in receives]
        works += [group.send([message], member, _TAG) for member, message in sends]
        for work in works:
            work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))

    def close(self) -> None:
        self._group = None  # its connections end with the last transfer

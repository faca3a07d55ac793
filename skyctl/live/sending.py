"""One rank's end of the group in which a trainer's ranks send to servers' workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from skyctl.kill_points import reached
from skyctl.wire.batches import Batch, batches
from skyctl.wire.layouts import Copy
from skyctl.wire.peer_group import Meeting, PeerGroup
from skyctl.wire.peers import join

if TYPE_CHECKING:
    from skyctl.wire.group_store import GroupStore

_log = logging.getLogger(__name__)


@dataclass
class _Membership:
    """In one group. A thread that sends in a group that was left has this one, and no later one."""

    group: str = ""
    """Its name, once the group has formed."""
    peers: PeerGroup | None = None
    """The group."""
    closed: bool = False
    """It was left: a group that forms after that is closed at once."""

    def join(
        self, meeting: Meeting, rank: int, device: torch.device, store: GroupStore | None
    ) -> PeerGroup:
        """The group of this meeting, instead of the one before it. Raises as `join`."""
        if self.group != meeting.name:
            self.group = ""
            if self.peers is not None:
                self.peers.close()
            try:
                self.peers = join(meeting, rank, device, store)
            except BaseException:
                if store is not None:
                    store.close()  # members that wait in it learn that the group does not form
                raise
            if store is not None:
                store.seal()
            self.group = meeting.name
            if self.closed:
                self.peers.close()
        assert self.peers is not None
        return self.peers

    def close(self) -> None:
        """Close the group, or what is forming by now."""
        self.closed, self.group = True, ""
        if self.peers is not None:
            self.peers.close()


@dataclass
class _Sending:
    """What one push sends, in a thread."""

    thread: threading.Thread
    problem: str = ""
    """Why it was not sent."""


class Sender:
    """Sends the same parts again and again, in a thread for each push. Keeps no tensor alive."""

    def __init__(self) -> None:
        self._now = _Membership()
        self._steps: dict[str, list[Batch]] = {}
        self._dtypes: dict[str, list[torch.dtype]] = {}
        self._sending: _Sending | None = None

    @property
    def group(self) -> str:
        """The name of the group that stands; "" without one."""
        return self._now.group

    def prepare(self, layouts: Sequence[Mapping[str, Any]]) -> None:
        """Cut what each worker of these layouts gets from this rank into steps."""
        for layout in layouts:
            name = layout["layout"]
            copies = (Copy(*row) for row in layout["rows"])
            self._steps[name] = list(batches(copies, layout["senders"]))
            self._dtypes[name] = [getattr(torch, dtype) for _, dtype, _ in layout["parameters"]]

    def send(
        self,
        rank: int,
        group: Mapping[str, Any],
        exports: Sequence[torch.Tensor],
        store: GroupStore | None,
    ) -> None:
        """Begin to send. `group`: its `meeting`, and the layout of each of its `workers`."""
        if self._now.closed:  # a member has failed in it
            self._now = _Membership()
        meeting, now = Meeting.from_wire(group["meeting"]), self._now

        def run() -> None:
            try:
                with torch.no_grad():
                    device = exports[0].device if exports else torch.device("cpu")
                    peers = now.join(meeting, rank, device, store)
                    reached("rank.sending")
                    ranks = meeting.members - len(group["workers"])
                    self._send(peers, ranks, group["workers"], exports)
            except Exception as error:
                sending.problem = f"{error}" or repr(error)
                if not now.closed:  # of a push that fails, workers only report that the group ended
                    _log.warning("rank %d has not sent its weights: %s", rank, sending.problem)
                now.close()  # what a member has failed in is of no use to any

        thread = threading.Thread(target=run, name="skyctl-sending", daemon=True)
        self._sending = sending = _Sending(thread)
        thread.start()

    def wait(self, timeout_s: float) -> None:
        """Return once all is sent. Raises RuntimeError: it is not, or not within this time; the
        group is left.
        """
        sending, self._sending = self._sending, None
        if sending is None:
            return
        sending.thread.join(timeout_s)
        if sending.thread.is_alive() or sending.problem:
            self.leave_group()
            raise RuntimeError(sending.problem or "the servers have not taken all that was sent")

    def leave_group(self) -> None:
        """Leave the group; the next push forms another. What is under way ends by itself."""
        before, self._now = self._now, _Membership()
        self._sending = None
        before.close()

    def _send(
        self,
        peers: PeerGroup,
        ranks: int,
        workers: Sequence[str],
        exports: Sequence[torch.Tensor],
    ) -> None:
        if exports and exports[0].is_cuda:
            torch.cuda.synchronize(exports[0].device)  # the trainer's other streams may still write
        with peers.context():
            for step in range(max(map(len, self._steps.values()), default=0)):
                sends = []
                for layout in dict.fromkeys(workers):
                    if step >= len(self._steps[layout]):
                        continue
                    messages = self._steps[layout][step].sent(exports, self._dtypes[layout])
                    places = [ranks + n for n, given in enumerate(workers) if given == layout]
                    sends += [(place, message) for message in messages for place in places]
                peers.transfer(sends, [])
            peers.finish()

"""A rank is in one group at a time, and closes each that it was in."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("torch")

from skyctl.live import sending
from skyctl.live.sending import Sender
from skyctl.wire.peer_group import Meeting, Messages, PeerGroup


class Group(PeerGroup):
    closed = False

    def __init__(self, *, breaks: bool = False) -> None:
        self._breaks = breaks

    def finish(self) -> None:
        if self._breaks:
            raise RuntimeError("a member has failed")

    def transfer(self, sends: Messages, receives: Messages) -> None: ...

    def close(self) -> None:
        self.closed = True


def wire(name: str) -> dict[str, Any]:
    meeting = Meeting(name, "nccl", "127.0.0.1", 1, "00", 2, 1.0, 1.0)
    return {"meeting": meeting.to_wire(), "workers": []}


def test_a_group_that_forms_again_replaces_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[Group] = []

    def join(*_: Any) -> Group:
        assert all(group.closed for group in formed)  # one communicator's memory at a time
        formed.append(Group())
        return formed[-1]

    monkeypatch.setattr(sending, "join", join)
    sender = Sender()
    for name in ("first", "first", "second"):
        sender.send(1, wire(name), [], None)
        sender.wait(30)
        assert sender.group == name
    assert [group.closed for group in formed] == [True, False]
    sender.leave_group()
    assert formed[1].closed and sender.group == ""


def test_a_group_that_was_left_while_it_formed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    group, joining, departed = Group(), threading.Event(), threading.Event()

    def join(*_: Any) -> Group:
        joining.set()
        assert departed.wait(30)
        return group

    monkeypatch.setattr(sending, "join", join)
    sender = Sender()
    sender.send(1, wire("group"), [], None)
    sending_first = sender._sending
    assert sending_first is not None and joining.wait(30)
    sender.leave_group()
    departed.set()
    sending_first.thread.join(30)
    assert group.closed


def test_a_rank_says_itself_why_it_has_not_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers, whose push fails, only learn that the group has ended."""
    monkeypatch.setattr(sending, "join", lambda *_: Group(breaks=True))
    sender = Sender()
    sender.send(3, wire("group"), [], None)
    with pytest.raises(RuntimeError, match="a member has failed"):
        sender.wait(30)
    assert caplog.messages == ["rank 3 has not sent its weights: a member has failed"]


@pytest.mark.parametrize("waits", [True, False])
def test_what_one_push_could_not_send_is_not_reported_by_the_next(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[Group] = []

    def join(*_: Any) -> Group:
        groups.append(Group(breaks=not groups))
        return groups[-1]

    monkeypatch.setattr(sending, "join", join)
    sender = Sender()
    sender.send(1, wire("group"), [], None)
    if waits:
        with pytest.raises(RuntimeError, match="a member has failed"):
            sender.wait(30)
    elif sender._sending is not None:
        sender._sending.thread.join(30)
    assert groups[0].closed and sender.group == ""
    sender.send(1, wire("group"), [], None)
    sender.wait(30)
    assert sender.group == "group" and not groups[1].closed

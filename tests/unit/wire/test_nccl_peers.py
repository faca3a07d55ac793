"""A communicator is not used once it is aborted, and NCCL's groups end. The library is a fake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from skyctl.wire import nccl_peers
from skyctl.wire.nccl_peers import NcclPeers
from skyctl.wire.peer_group import Meeting

_INVALID = 4


class Library:
    """Notes its calls, and answers them with success; `on` has what else some do, or answer."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.on: dict[str, Callable[..., int | None]] = {
            "ncclCommInitRankConfig": lambda made, *_: setattr(made._obj, "value", 1)
        }
        self.ncclGetErrorString = lambda code: b"invalid argument"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return self.on.get(name, lambda *_: 0)(*arguments) or 0

        setattr(self, name, call)
        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    monkeypatch.setattr(nccl_peers, "_library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=0))
    return fake


@pytest.fixture
def peers(library: Library) -> NcclPeers:
    store: Any = SimpleNamespace(set=lambda key, value: None)
    meeting = Meeting("group", "nccl", "127.0.0.1", 1, "00", 1, 30.0, 30.0)
    formed = NcclPeers(meeting, 0, torch.device("cpu"), store)
    library.calls.clear()
    return formed


def test_a_communicator_is_aborted_only_between_its_uses(
    library: Library, peers: NcclPeers
) -> None:
    closing, aborted = threading.Thread(target=peers.close), threading.Event()

    def receive(*_: Any) -> None:
        closing.start()
        aborted.wait(0.5)  # time enough for one that may be aborted now

    library.on |= {"ncclRecv": receive, "ncclCommAbort": lambda *_: aborted.set()}
    with pytest.raises(RuntimeError, match="is closed"):
        while True:
            peers.transfer([], [(1, torch.zeros(1, dtype=torch.uint8))])
            library.on.pop("ncclRecv", None)
    closing.join(30)
    assert library.calls[:3] == ["ncclGroupStart", "ncclRecv", "ncclGroupEnd"]
    assert library.calls[-1] == "ncclCommAbort" and library.calls.count("ncclCommAbort") == 1
    before = list(library.calls)
    with pytest.raises(RuntimeError, match="is closed"):
        peers.transfer([], [])
    assert library.calls == before


def test_a_call_that_fails_ends_its_group(library: Library, peers: NcclPeers) -> None:
    library.on |= dict.fromkeys(("ncclSend", "ncclGroupEnd"), lambda *_: _INVALID)
    with pytest.raises(RuntimeError, match="ncclSend: invalid argument"):
        peers.transfer([(1, torch.zeros(1, dtype=torch.uint8))], [])
    assert library.calls == ["ncclGroupStart", "ncclSend", "ncclGroupEnd"]
    peers.close()
    assert library.calls[-1] == "ncclCommAbort"

"""A sender that is told to rest while it reads: what is freed, nobody writes to."""

from __future__ import annotations

import io
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.transfer.carrier import CpuCarrier, GpuCarrier
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.sender import Channel, Sender
from skyctl.transfer.sender_client import SenderProcess
from tests.unit.push.checkpoints import write_checkpoint


class Slots(CpuCarrier):
    """Slots in this process; notes who still reads when they are freed."""

    def __init__(self) -> None:
        self.readers: list[str] = []
        self.exported: list[int] = []

    def allocate(self, slots: int, slot_bytes: int) -> list[memoryview]:
        return [memoryview(bytearray(slot_bytes)) for _ in range(slots)]

    def extra(self, slot: int) -> dict[str, Any]:
        self.exported.append(slot)
        return {}

    def close(self) -> None: ...

    def free_slots(self) -> None:
        self.readers = [one.name for one in threading.enumerate() if one.name == "reader"]


def test_slots_are_freed_once_nobody_reads_into_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = Slots()
    module = SimpleNamespace(open_carrier=lambda session, options: carrier)
    monkeypatch.setitem(sys.modules, "skyctl.transfer.transports.slots", module)
    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "a")))
    plan = plan_chunks(checkpoint.tensors, 300)
    told = io.StringIO()
    sender = Sender(Channel(told))
    opening: dict[str, Any] = {
        "shards": [asdict(shard) for shard in checkpoint.shards],
        "chunks": [
            [(p.tensor.shard, p.tensor.begin, p.tensor.nbytes, p.offset, "") for p in chunk.placed]
            for chunk in plan.chunks
        ],
        "slots": 1,
        "slot_bytes": plan.slot_bytes,
        "ring_only": True,
        "reserve_bytes": 0,
        "programs": [],
        "shown": False,
        "exports": False,
        "elsewhere": False,
        "relay_rank": None,
        "bytes_per_s": 1,  # what reads at a pace does not keep it waiting either
    }
    sender.obey({"op": "warm", "transport": "slots", "session": "s", "carrier": {}})
    for chunks in (opening["chunks"], None):  # the second push finds everything as the first did
        sender.obey({"op": "open", "carrier": None, **opening, "chunks": chunks})
        sender.obey({"op": "free_slots"})  # while it waits for the release of its only slot
        assert carrier.readers == carrier.exported == []
    events = [json.loads(line)["event"] for line in told.getvalue().splitlines()]
    assert [event for event in events if event != "filled"] == [
        *("warmed", "opened", "freed", "opened", "freed")
    ]


class Recording(SenderProcess):
    """Notes what a sender is told, with no process behind it."""

    def __init__(self) -> None:
        self._events = {}
        self._node = None
        self._read_last = None
        self.told: list[dict[str, Any]] = []

    async def _command(self, **command: Any) -> None:
        self.told.append(json.loads(json.dumps(command)))


async def test_a_sender_is_told_once_what_to_read_of_versions_of_a_model(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "a")))
    plan, other = plan_chunks(checkpoint.tensors, 300), plan_chunks(checkpoint.tensors, 600)
    sender = Recording()
    for of, scan in ((plan, True), (plan, True), (plan, False), (other, False), (plan, False)):
        await sender.open(
            transport="shm",
            session="s",
            checkpoint=checkpoint,
            plan=of,
            slots=1,
            carrier=None,
            scan=scan,
        )
    chunks = [told["chunks"] for told in sender.told]
    assert chunks[1] is None
    counts = [len(told) for told in chunks if told is not None]
    assert counts == [len(of.chunks) for of in (plan, plan, other, plan)]
    typed = [any(piece[-1] for chunk in told for piece in chunk) for told in chunks if told]
    assert typed == [True, False, False, False]


class Relays(GpuCarrier):
    """Notes the groups that it is in."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, int, str]] = []

    def relay(self) -> Self:
        return self

    def form(self, rank: int, world_size: int, unique_id: str) -> None:
        self.groups.append((rank, world_size, unique_id))

    def stand(self) -> None:
        self.groups.append(self.groups[-1])


def test_rank_0_says_the_id_of_a_group_before_it_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from skyctl.transfer.gpu import relay

    monkeypatch.setattr(relay, "new_group", lambda: "id")
    told = io.StringIO()
    sender = Sender(Channel(told))
    sender._carrier = carrier = Relays()
    sender.obey({"op": "relay", "rank": 0, "world_size": 2, "id": ""})
    sender.obey({"op": "relay", "rank": 0, "world_size": 0, "id": ""})
    assert carrier.groups == [(0, 2, "id"), (0, 2, "id")]
    events = [json.loads(line) for line in told.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["relaying", "relayed", "relayed"]
    assert events[0]["id"] == "id"
    sender._carrier = other = Relays()
    sender.obey({"op": "relay", "rank": 1, "world_size": 2, "id": "id"})
    assert other.groups == [(1, 2, "id")]

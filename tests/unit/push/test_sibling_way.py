"""A server that copies the weights of its sibling: what both are asked, and where it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.errors import PreflightError, ServerError
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushFleet, Sibling
from skyctl.push.servers import Holds, PushedServer
from skyctl.push.sibling_way import SiblingDelivery, sibling_way
from tests.unit.push.deliveries import site

OFFER = {"form": "a form", "reason": "", "total_bytes": 25, "buffer_bytes": 10, "sources": []}


class Workers:
    """One worker; `fails` maps methods to the call from which on they fail."""

    def __init__(self, calls: list[str], name: str, offer: dict[str, Any], **fails: int) -> None:
        self.target = ServerTarget(name, "http://127.0.0.1:1")
        self._calls, self._offer, self._fails = calls, offer, fails

    async def is_paused(self) -> bool:
        return True

    async def ask_workers(self, method: str, kwargs: dict[str, Any], **_: Any) -> list[Any]:
        step = method.removeprefix("skyctl_weights_")
        shown = [str(kwargs[key]) for key in ("chunk", "free") if key in kwargs]
        self._calls.append(" ".join([self.target.name, step, *shown]))
        if kwargs.get("chunk", 0) >= self._fails.get(step, 99):
            raise ServerError("it is gone")
        return [self._offer if step == "share" else None]


def delivery(
    *, sibling: dict[str, int] | None = None, server: dict[str, int] | None = None, **offer: Any
) -> tuple[SiblingDelivery, PushedServer, list[str]]:
    calls: list[str] = []
    source: Any = Workers(calls, "b", {**OFFER, **offer}, **(sibling or {}))
    pushed = site(Workers(calls, "a", {}, **(server or {})))
    return SiblingDelivery(Sibling(source, "/dev/shm/x"), PushFleet("demo", ())), pushed, calls


async def carried_out(delivery: SiblingDelivery, pushed: PushedServer) -> None:
    await delivery.open([pushed])
    await delivery.start([pushed])
    await delivery.update([pushed], lambda done: None)
    await delivery.finish([pushed], lambda: "step-1")
    await delivery.close()


async def test_the_sibling_fills_a_buffer_while_the_server_copies_the_other() -> None:
    copying, pushed, calls = delivery()
    await carried_out(copying, pushed)
    assert calls[:3] == ["b share", "a open", "b fill 0"]
    assert [sorted(calls[3:5]), sorted(calls[5:7])] == [
        ["a copy 0", "b fill 1"],
        ["a copy 1", "b fill 2"],
    ]
    assert calls[7:] == ["a copy 2", "a close True", "b close True"]
    assert pushed.holds is Holds.NEW and pushed.proof.copied and not pushed.failure


@pytest.mark.parametrize(
    ("fails", "last"),
    [
        ({"sibling": {"fill": 1}}, ["a close True", "b close True"]),
        ({"server": {"copy": 1, "close": 0}}, ["a close True", "b close False"]),
    ],
    ids=["the sibling", "the server"],
)
async def test_a_server_is_half_updated_when_either_dies_amid_the_copy(
    fails: dict[str, dict[str, int]], last: list[str]
) -> None:
    """The sibling keeps buffers that a server may still map, and uses them again."""
    copying, pushed, calls = delivery(**fails)
    await carried_out(copying, pushed)
    assert pushed.holds is Holds.UNKNOWN and "it is gone" in pushed.failure
    assert calls[-2:] == last


@pytest.mark.parametrize(
    ("fails", "calls_at_end"),
    [
        ({"reason": "it is quantized"}, ["b close True"]),
        ({"server": {"open": 0}}, ["a close True", "b close True"]),
    ],
)
async def test_workers_that_cannot_copy_are_refused_before_a_server_is_touched(
    fails: dict[str, Any], calls_at_end: list[str]
) -> None:
    copying, pushed, calls = delivery(**fails)
    with pytest.raises(PreflightError, match="it is"):
        await copying.open([pushed])
    await copying.close()
    assert calls[-len(calls_at_end) :] == calls_at_end
    assert pushed.holds is Holds.OLD


def test_a_server_that_drafts_by_weights_of_its_own_does_not_copy() -> None:
    question: Any = SimpleNamespace(facts=[SimpleNamespace(process=SimpleNamespace(drafts="mtp"))])
    sibling: Any = None
    with pytest.raises(PreflightError, match="drafts tokens"):
        sibling_way(sibling, question)

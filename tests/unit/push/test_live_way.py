"""Servers that copy out of a trainer's memory: what they are asked, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.base import Refusal
from skyctl.errors import NotMapped, PreflightError, ServerError
from skyctl.live.blocks import Block
from skyctl.live.offer import CHANGED, NCCL, Live, Offer, piece_row, planned
from skyctl.push.live_way import LiveDelivery, LiveWay
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.servers import Holds, PushedServer
from skyctl.transfer.sender_pool import SenderPool
from skyctl.wire.layouts import LayoutReport
from tests.unit.push.deliveries import site
from tests.unit.push.layouts import LAYOUT, NUMBERS, PARAMETERS, Workers, report

BLOCKS = [Block(name, "bfloat16", (4, 8), (0, 0), (4, 8)) for name in "gud"]
OFFER = Offer(
    ([piece_row(block, (number, 0)) for number, block in enumerate(BLOCKS)],),
    ([[f"export {number}"] for number in range(3)],),
    (4321,),
)
FLEET = PushFleet("demo", ())
FROZEN = ["skyctl_layout_arrived", "skyctl_layout_load"]


class Server(Workers):
    """Workers that map and load; `failing` names the method that fails."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes
        self.status = 500
        """Of the answer by which the method fails; 0: it does not answer."""
        self.stages = False
        self.arrivals = [True]

    async def ask_workers(self, method: str, kwargs: Any = None, **_: Any) -> list[Any]:
        self.calls.append((method, kwargs or {}))
        if method == self.failing:
            raise ServerError("out of memory", status=self.status)
        answers = {
            "skyctl_layout": report(**self.changes),
            "skyctl_layout_map": self.stages,
            "skyctl_layout_arrived": self.arrivals[0],
        }
        if method == "skyctl_layout_arrived" and len(self.arrivals) > 1:
            self.arrivals.pop(0)
        return [answers.get(method)]

    async def finish_weight_update(self) -> None:
        error = ServerError("without a matching start", status=500)
        error.refusal = Refusal.NO_SESSION
        raise error


def live() -> Live:
    worker = LayoutReport(0, LAYOUT, PARAMETERS)
    return replace(planned(OFFER, [worker]), numbers={LAYOUT: NUMBERS})


async def delivered(
    server: Server, way: LiveWay | None = None, **request: Any
) -> tuple[LiveDelivery, PushedServer]:
    """A delivery that is open, and its server."""
    pushed = site(server)
    question: Any = SimpleNamespace(request=PushRequest("", **request))
    way, _ = await (way or LiveWay(live(), FLEET)).plan(question, [pushed])
    delivery = way.delivery(SenderPool())
    assert isinstance(delivery, LiveDelivery)
    await delivery.open([pushed])
    return delivery, pushed


async def carried_out(delivery: LiveDelivery, pushed: PushedServer) -> None:
    await delivery.start([pushed])
    await delivery.update([pushed], lambda done: None)
    await delivery.finish([pushed], lambda: "step-1")
    await delivery.close()


async def test_the_first_push_maps_what_later_ones_copy_out_of() -> None:
    server = Server()
    delivery, pushed = await delivered(server)
    await carried_out(delivery, pushed)
    mapped = dict(server.calls)["skyctl_layout_map"]
    assert mapped["exports"] == [OFFER.exports[0]] and mapped["pids"] == [4321]
    assert mapped["key"] == OFFER.key and mapped["staged"] is None
    assert server.asked == ["skyctl_layout", "skyctl_layout_map", *FROZEN]
    assert pushed.holds is Holds.NEW and pushed.proof.copied
    [(program, numbers)] = pushed.proof.expected
    assert (program.layout, numbers) == (LAYOUT, NUMBERS)
    again = Server(opened=OFFER.key)
    await carried_out(*await delivered(again))
    assert again.asked == ["skyctl_layout", *FROZEN]
    assert again.calls[0][1]["key"] == OFFER.key


async def test_what_is_staged_has_arrived_before_the_freeze() -> None:
    server = Server()
    server.stages, server.arrivals = True, [False, False, True]
    await carried_out(*await delivered(server))
    assert server.asked[1:] == [
        *("skyctl_layout_map", "skyctl_layout_stage"),
        *["skyctl_layout_arrived"] * 3,
        *FROZEN,
    ]


@pytest.mark.parametrize("forms", [True, False])
@pytest.mark.parametrize("second", [True, False])
async def test_what_ranks_send_all_servers_stage_or_none(forms: bool, second: bool) -> None:
    opened = {} if forms else {"opened": f"{OFFER.key}-group"}
    servers = [Server(**opened, stages=not forms and stages) for stages in (True, second)]
    for server, stages in zip(servers, (True, second), strict=True):
        server.stages = stages
    names = {"demo-0": (LAYOUT,), "demo-1": (LAYOUT,)}
    group = {"group": {"name": "group"}, "transport": NCCL, "servers": names, "forms": forms}
    sites = [site(server, name=name) for server, name in zip(servers, names, strict=True)]
    question: Any = SimpleNamespace(request=PushRequest(""))
    way, _ = await LiveWay(replace(live(), **group), FLEET).plan(question, sites)
    await way.delivery(SenderPool()).open(sites)
    assert [("skyctl_layout_stage" in server.asked) for server in servers] == [second] * 2
    assert all(("skyctl_layout_map" in server.asked) is forms for server in servers)


async def test_a_trainer_that_ends_while_servers_drain_leaves_them_as_they_were() -> None:
    server = Server()
    delivery, pushed = await delivered(server)
    server.failing = "skyctl_layout_arrived"  # it has let go of the trainer
    await delivery.start([pushed])
    assert pushed.failure.startswith("start: ") and pushed.holds is Holds.OLD
    assert server.calls[-1][1] == {"key": OFFER.key}


@pytest.mark.parametrize(
    ("stage", "stages", "maps"),
    [("auto", True, False), ("gpu", True, False), ("gpu", False, True), ("stream", True, True)],
)
async def test_a_worker_that_is_to_stage_otherwise_maps_again(
    stage: str, stages: bool, maps: bool
) -> None:
    server = Server(opened=OFFER.key, stages=stages)
    await delivered(server, stage=stage)
    assert ("skyctl_layout_map" in server.asked) is maps


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"proven": False}, "the layout of demo-0 is not proven yet"),
        ({"reason": "its model is not on a GPU"}, "demo-0: its model is not on a GPU"),
        ({"layout": "other", "proven": ("other",)}, f"demo-0 {CHANGED}"),
    ],
)
async def test_what_cannot_be_copied_into_is_refused(changes: dict[str, Any], reason: str) -> None:
    server = Server(**changes)
    if "proven" in changes and changes["proven"] is not False:
        server.changes = {"layout": "other"}
        server.ask_workers = _other_layout  # type: ignore[method-assign, assignment]
    with pytest.raises(PreflightError, match=reason) as refusal:
        await delivered(server)
    assert CHANGED in refusal.value.message  # the trainer offers again, and goes through a file


async def _other_layout(method: str, kwargs: Any = None, **_: Any) -> list[Any]:
    parameters = PARAMETERS[:1]
    return [LayoutReport(0, "other", parameters, ("other",)).to_wire()]


@pytest.mark.parametrize("status", [500, 0])
async def test_a_server_that_cannot_map_refuses_the_push_and_is_as_it_was(status: int) -> None:
    server = Server()
    server.failing, server.status = "skyctl_layout_map", status
    pushed = site(server)
    question: Any = SimpleNamespace(request=PushRequest(""))
    way, _ = await LiveWay(live(), FLEET).plan(question, [pushed])
    with pytest.raises(PreflightError, match=r"demo-0: map: .*out of memory") as refusal:
        await way.delivery(SenderPool()).open([pushed])
    assert isinstance(refusal.value, NotMapped) is (status == 500)
    assert not pushed.failure and pushed.holds is Holds.OLD


async def test_a_server_that_fails_midway_lets_go_and_is_mended_by_the_next_push() -> None:
    server = Server()
    delivery, pushed = await delivered(server)
    server.failing = "skyctl_layout_load"
    await carried_out(delivery, pushed)
    assert pushed.failure and pushed.holds is Holds.UNKNOWN and not delivery.can_retry
    assert server.asked[-1] == "skyctl_layout_close"
    server.failing = ""
    question: Any = SimpleNamespace(request=PushRequest(""))
    half = replace(site(server), holds=Holds.UNKNOWN)
    way, _ = await LiveWay(live(), FLEET).plan(question, [half])
    delivery = LiveDelivery(way)
    await delivery.open([half])
    await carried_out(delivery, half)
    assert half.holds is Holds.NEW

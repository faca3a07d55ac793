"""Pushes point to point are made into the servers that their group was planned for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyctl.errors import PreflightError
from skyctl.launch.base import Node
from skyctl.live.offer import CHANGED, GLOO, IPC, NCCL, Live
from skyctl.push.peers import as_planned, joining, unsuited
from skyctl.push.request import PushRequest
from skyctl.wire.layouts import LayoutReport
from skyctl.wire.messages import NOT_ON_GPU
from tests.unit.push.deliveries import site

LIVE = Live(
    "key",
    transport=GLOO,
    pids=(1, 2),
    servers={"demo-0": ("tensors",), "demo-1": ("tensors",)},
    group={"name": "group"},
)
IN_GROUP = {
    name: (LayoutReport(0, reason=NOT_ON_GPU, opened="key-group"),) for name in LIVE.servers
}
OUTSIDE = {**IN_GROUP, "demo-1": (LayoutReport(0, reason=NOT_ON_GPU),)}


def test_servers_get_the_layout_and_the_place_that_were_planned() -> None:
    planned = as_planned(LIVE, PushRequest(""), IN_GROUP, None)
    assert [ranks[0].layout for ranks in planned.values()] == ["tensors", "tensors"]
    assert [LIVE.place(name) for name in planned] == [2, 3]
    assert (
        as_planned(replace(LIVE, forms=True), PushRequest(""), OUTSIDE, None).keys()
        == planned.keys()
    )


def test_workers_of_another_machine_watch_no_process_there() -> None:
    """The trainer's pids are other processes' on it."""
    near = joining(LIVE, site(None))
    away = joining(LIVE, site(None, node=Node("b", "b", "python", (), 60.0)))
    assert "pids" not in near and away == {**near, "pids": ()}


@pytest.mark.parametrize(
    ("request_fields", "reports", "reason"),
    [
        ({}, OUTSIDE, f"demo-1 {CHANGED}"),
        ({}, {"demo-0": IN_GROUP["demo-0"]}, CHANGED),
        ({}, {**IN_GROUP, "demo-2": IN_GROUP["demo-0"]}, CHANGED),
        ({"rolling": 1}, IN_GROUP, "goes into all servers at once"),
    ],
)
def test_other_servers_or_fewer_are_refused(
    request_fields: dict[str, Any], reports: Any, reason: str
) -> None:
    with pytest.raises(PreflightError, match=reason):
        as_planned(LIVE, PushRequest("", **request_fields), reports, None)


@pytest.mark.parametrize(
    ("transport", "report", "reason"),
    [
        (GLOO, {"reason": NOT_ON_GPU}, ""),
        (GLOO, {"layout": "a"}, "gloo is for CPU servers"),
        (NCCL, {"layout": "a"}, ""),
        (NCCL, {"reason": NOT_ON_GPU}, NOT_ON_GPU),
        (NCCL, {"layout": "a", "spare_bytes": 7}, "its layers process their weights"),
        (IPC, {"layout": "a", "spare_bytes": 7}, ""),
    ],
)
def test_a_transport_is_for_one_kind_of_worker(
    transport: str, report: dict[str, Any], reason: str
) -> None:
    problem = unsuited(transport, LayoutReport(0, **report))
    assert problem.startswith(reason) and bool(problem) is bool(reason)

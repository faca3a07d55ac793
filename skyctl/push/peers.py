"""What a push point to point asks of servers: who is in the group, and what was received.

GPU workers copy what arrives into their parameters. On CPU vLLM packs weights, so there its loader
takes the tensors, of which every byte is compared before; rows of them are compared after.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from skyctl.errors import PreflightError
from skyctl.live.offer import CHANGED, GLOO, IPC, Live, Offer, whole_tensors
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.rows import KnownRows, questions_about
from skyctl.push.servers import PushedServer
from skyctl.wire.layouts import LayoutReport
from skyctl.wire.messages import NOT_ON_GPU, RowQuestion


def reports_for(
    offer: Offer, reports: Mapping[str, tuple[LayoutReport, ...]]
) -> dict[str, tuple[LayoutReport, ...]]:
    """The layouts that this offer is planned for: of CPU workers, the tensors as they are."""
    if offer.transport != GLOO:
        return dict(reports)
    tensors = whole_tensors(offer, 0)
    return {
        name: tuple(replace(tensors, rank=report.rank, opened=report.opened) for report in ranks)
        for name, ranks in reports.items()
    }


def unsuited(transport: str, report: LayoutReport) -> str:
    """Why a worker takes nothing by this transport; "" if it does."""
    if transport == GLOO:
        if report.reason == NOT_ON_GPU:
            return ""
        return report.reason or "gloo is for CPU servers, and its model is on a GPU"
    if report.reason:
        return report.reason
    if transport != IPC and report.spare_bytes:
        return "its layers process their weights, ahead of a freeze only with ipc"
    return ""


def as_planned(
    live: Live,
    request: PushRequest,
    reports: Mapping[str, tuple[LayoutReport, ...]],
    staged: bool | None,
) -> dict[str, tuple[LayoutReport, ...]]:
    """The workers' reports, each with the layout that was planned for it: of CPU workers that of
    the trainer's tensors. With a group that has formed, none may have left it.

    Raises:
        PreflightError: these are not the group's servers, or are not all of them.
    """
    if request.rolling:
        raise PreflightError(
            f"a push by {live.transport} from a trainer's memory goes into all servers at once",
            hint="leave rolling out",
        )
    counts = {name: len(ranks) for name, ranks in reports.items()}
    if counts != {name: len(layouts) for name, layouts in live.servers.items()}:
        raise PreflightError(f"the fleet's servers: one {CHANGED}", hint="push once more")
    planned = {}
    for name, ranks in reports.items():
        if live.transport == GLOO:
            ranks = tuple(
                replace(report, reason="", layout=layout, stages=True)
                for report, layout in zip(ranks, live.servers[name], strict=True)
            )
        planned[name] = ranks
        for report in () if live.forms else ranks:
            if report.opened != live.mapped_key or staged not in (None, report.stages):
                raise PreflightError(f"{name} {CHANGED}", hint="push once more")
    return planned


def joining(live: Live, server: PushedServer) -> dict[str, Any]:
    """What a server's workers are told to join the group. Those of another machine do not watch
    the ranks: their pids are this one's.
    """
    joined = {"group": live.group, "place": live.place(server.name)}
    return joined if server.given.node is None else joined | {"pids": ()}


def questions(live: Live) -> list[RowQuestion]:
    """Rows that servers must hold after their loaders have taken the tensors."""
    layout = next(iter(live.plans))
    return questions_about(live.tensors_of(layout), secrets.token_hex(8))


def known_rows(
    row_questions: Sequence[RowQuestion], answer: Sequence[Mapping[str, str]]
) -> tuple[KnownRows, ...]:
    """The rows with what a worker has received of them, in hexadecimal digits."""
    return tuple(
        KnownRows(question, {int(row): bytes.fromhex(data) for row, data in rows.items()})
        for question, rows in zip(row_questions, answer, strict=True)
    )


def to_wire(row_questions: Sequence[RowQuestion]) -> list[dict[str, Any]]:
    """The questions as they travel."""
    return [asdict(question) for question in row_questions]


def machine_of(fleet: PushFleet) -> str:
    """The address of the first machine that is not this one."""
    return next((server.node.address for server in fleet.servers if server.node is not None), "")

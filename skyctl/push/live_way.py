"""Weights that lie in the memory of a trainer's GPUs: servers copy them out of there.

    offer   the trainer's exports and pieces ─► plans for the layouts of the servers' workers
    open    workers map the exports, which stay mapped; where they stage, they begin to copy
    update  frozen: each worker copies all that it needs into its parameters

Workers compare every byte with the sums that the trainer's ranks made of their own parts. Only
layouts that a push from files or a rehearsal has proven are filled so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyctl import engines
from skyctl.errors import PreflightError
from skyctl.http.client import ControlClient
from skyctl.kill_points import reached
from skyctl.live.offer import CHANGED, Live, Offer, planned
from skyctl.push.layouts import ask_layouts
from skyctl.push.request import PushFleet
from skyctl.push.server_facts import ask_servers
from skyctl.push.servers import Before, Holds, PushedServer, alive, ask_all, each, require_paused
from skyctl.push.way import Delivery, Plan, Question
from skyctl.states import LIVE
from skyctl.transfer.plan import NotInLayout
from skyctl.transfer.sender_pool import SenderPool
from skyctl.wire.layouts import LayoutReport
from skyctl.wire.worker import WorkerMethod

_CLOSE_TIMEOUT_S = 5.0
_BYTES_PER_S = 350e9
"""Over NVLink; how long staging is waited for before it is asked about."""
_POLL_S = 0.004

Reports = dict[str, tuple[LayoutReport, ...]]


async def take_offer(offer: Offer, fleet: PushFleet, client: ControlClient) -> Live:
    """Plan how the workers of a fleet copy what a trainer offers. Changes nothing.

    Raises:
        PreflightError: they cannot, or trainer and servers do not fit each other.
        ServerError: one does not answer.
    """
    facts = await ask_servers(fleet, client=client)
    servers = [
        replace(server, before=Before(fact.dialect, fact.world_size, asleep=fact.asleep))
        for server, fact in zip(_servers(fleet, client), facts, strict=True)
    ]
    reports = await _reports(servers, "")
    try:
        every = [report for ranks in reports.values() for report in ranks]
        return await asyncio.to_thread(planned, offer, every)
    except NotInLayout as error:
        raise _refused(error.reason) from error
    except (TypeError, ValueError) as error:
        raise PreflightError(f"an offer that is not understood: {error}") from error


def _servers(fleet: PushFleet, client: ControlClient) -> list[PushedServer]:
    timeout_s = fleet.control_timeout_s
    return [
        PushedServer(given, engines.server(client, given.target, timeout_s=timeout_s))
        for given in fleet.servers
    ]


async def _reports(servers: Sequence[PushedServer], key: str) -> Reports:
    """Every worker's layout, by server; proven, or there is none to copy into."""
    if away := [server.name for server in servers if server.given.node is not None]:
        raise _refused(f"{away[0]} is on another machine")
    try:
        # a push that copies everything mends one that broke off while it copied
        reports = await ask_layouts(servers, key=key, or_half_updated=True)
    except NotInLayout as error:
        raise _refused(error.reason) from error
    for name, ranks in reports.items():
        if reason := next((report.reason for report in ranks if report.reason), ""):
            raise _refused(f"{name}: {reason}")
        if any(report.layout not in report.proven for report in ranks):
            raise _refused(f"the layout of {name} is not proven yet; a push from files proves it")
    return reports


def _refused(reason: str) -> PreflightError:
    return PreflightError(
        f"servers cannot copy out of the trainer's memory: {reason}",
        hint="push from files, or from a file in memory",
    )


@dataclass(frozen=True)
class LiveWay:
    """Servers copy out of the trainer's memory."""

    live: Live
    """What the trainer offered, with the numbers of this push."""
    fleet: PushFleet
    """The servers, and the bounds to keep."""
    reports: Reports = field(default_factory=dict)
    """The layouts of the servers' workers, and what they have mapped."""
    staged: bool | None = None
    """Whether workers copy beside their parameters first; None: each where it suits."""

    name = LIVE
    reason = "servers copy out of the trainer's memory"
    reads_every_byte = True
    layout_only_by_loader = False

    async def plan(
        self, question: Question, servers: Sequence[PushedServer]
    ) -> tuple[LiveWay, Plan]:
        reports = await _reports(servers, self.live.key)
        for name, ranks in reports.items():
            if not all(report.layout in self.live.numbers for report in ranks):
                raise PreflightError(
                    f"{name} {CHANGED}",
                    hint="offer it again, and push once more",
                )
        staged = {"gpu": True, "stream": False}.get(question.request.stage)
        mapped = self.live.total_bytes if staged else 0
        return LiveWay(self.live, self.fleet, reports, staged), Plan(1, mapped)

    def delivery(self, senders: SenderPool, *, by_loader: bool = False) -> Delivery:
        return LiveDelivery(self)


class LiveDelivery(Delivery):
    """One attempt. A second is not made: a server that failed midway is whole again after the next
    push, or after recovery.
    """

    def __init__(self, way: LiveWay) -> None:
        self._way = way
        self._live = way.live
        self._fleet = way.fleet
        self._stages: dict[str, bool] = {}
        self._opened: list[PushedServer] = []

    async def open(self, servers: Sequence[PushedServer]) -> None:
        self._opened = list(servers)
        await self._all(
            [server for server in servers if not self._has_mapped(server)],
            WorkerMethod.LAYOUT_MAP,
            self._mapping,
        )
        staging = [server for server in servers if self._is_staged(server)]
        await self._all(staging, WorkerMethod.LAYOUT_STAGE, lambda server: {})
        await asyncio.gather(*map(self._wait_staged, staging))
        for server in servers:
            server.proof.expected = [
                (self._live.plans[report.layout].program, dict(self._live.numbers[report.layout]))
                for report in self._way.reports[server.name]
            ]

    def _has_mapped(self, server: PushedServer) -> bool:
        staged = self._way.staged
        return all(
            report.opened == self._live.key and staged in (None, report.stages)
            for report in self._way.reports[server.name]
        )

    def _is_staged(self, server: PushedServer) -> bool:
        reports = self._way.reports[server.name]
        return self._stages.get(server.name, any(r.stages or r.spare_bytes for r in reports))

    def _mapping(self, server: PushedServer) -> dict[str, Any]:
        layouts = [report.layout for report in self._way.reports[server.name]]
        return {
            "programs": [self._live.plans[layout].program.to_wire() for layout in layouts],
            "exports": [self._live.rows(layout) for layout in layouts],
            "key": self._live.key,
            "pids": self._live.pids,
            "staged": self._way.staged,
        }

    async def _wait_staged(self, server: PushedServer) -> None:
        """Return once its workers have staged all; they serve meanwhile."""
        wait_s = self._live.total_bytes / server.before.world_size / _BYTES_PER_S
        async with asyncio.timeout(self._fleet.update_timeout_s):
            while True:
                await asyncio.sleep(wait_s)
                if all(await server.control.ask_workers(WorkerMethod.LAYOUT_ARRIVED)):
                    return
                wait_s = _POLL_S

    async def _all(
        self,
        servers: Sequence[PushedServer],
        method: str,
        arguments: Callable[[PushedServer], dict[str, Any]],
    ) -> None:
        """Have all of these servers get ready, or none. Raises PreflightError."""

        async def ask(server: PushedServer) -> None:
            answers = await server.control.ask_workers(method, arguments(server))
            if method == WorkerMethod.LAYOUT_MAP:
                self._stages[server.name] = any(answers)

        await each(servers, ask, timeout_s=self._fleet.update_timeout_s, call_name="map")
        if failed := [server for server in servers if server.failure]:
            reason = f"{failed[0].name}: {failed[0].failure}"
            for server in servers:
                server.failure = ""  # nothing has happened to it
            raise _refused(reason)

    async def start(self, servers: Sequence[PushedServer], *, scrubbing: bool = False) -> None:
        timeout_s = self._fleet.control_timeout_s
        await each(alive(servers), require_paused, timeout_s=timeout_s, call_name="start")

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        async def load(server: PushedServer) -> None:
            server.proof.copied = True
            server.holds = Holds.UNKNOWN
            reached("push.update.call")
            with server.spans.loading():
                await server.control.collective_rpc(
                    WorkerMethod.LAYOUT_LOAD,
                    kwargs={"chunks": None, "last": True},
                    timeout_s=self._fleet.update_timeout_s,
                )
            reached("push.update.sent")

        timeout_s = self._fleet.update_timeout_s
        await each(alive(servers), load, timeout_s=timeout_s, call_name="update")
        on_progress(self._live.total_bytes)

    async def finish(self, servers: Sequence[PushedServer], version: Callable[[], str]) -> None:
        for server in alive(servers):
            server.holds = Holds.NEW

    async def close(self) -> None:
        """Servers that failed let go of the trainer's memory; others keep it for its next push."""
        opened, self._opened = self._opened, []
        await release([server for server in opened if server.failure])


async def release_all(fleet: PushFleet, client: ControlClient) -> None:
    """Have a fleet's servers let go of a trainer's memory. Never raises for a server."""
    await release(_servers(fleet, client))


async def release(servers: Sequence[PushedServer]) -> None:
    """Have servers let go of a trainer's memory. Never raises."""
    await ask_all(
        servers,
        lambda server: server.control.collective_rpc(
            WorkerMethod.LAYOUT_CLOSE, timeout_s=_CLOSE_TIMEOUT_S
        ),
        timeout_s=_CLOSE_TIMEOUT_S,
    )

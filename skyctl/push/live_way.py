"""Weights that lie in the memory of a trainer's ranks: servers copy them out of there, or get them
from the ranks point to point (`push/peers.py`).

    offer   the trainer's exports and pieces ─► plans for the layouts of the servers' workers
    open    workers map the exports, or join the group; where they stage, they begin to copy
    update  frozen: each worker copies all that it needs into its parameters

Every byte is compared with the sums that the trainer's ranks made of their own parts. Only layouts
that a push from files or a rehearsal has proven are filled so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyctl import engines
from skyctl.errors import NotMapped, PreflightError, ServerError
from skyctl.http.client import ControlClient
from skyctl.kill_points import reached
from skyctl.live.offer import CHANGED, GLOO, IPC, Live, Offer, planned
from skyctl.push import peers
from skyctl.push.layouts import ask_layouts
from skyctl.push.request import PushFleet
from skyctl.push.server_facts import ask_servers
from skyctl.push.servers import Before, Holds, PushedServer, alive, all_or_none, ask_all, each
from skyctl.push.way import Delivery, Plan, Question
from skyctl.states import LIVE
from skyctl.transfer.plan import NotInLayout
from skyctl.transfer.sender_pool import SenderPool
from skyctl.wire.layouts import LayoutReport
from skyctl.wire.worker import WorkerMethod

_CLOSE_TIMEOUT_S = 5.0
_BYTES_PER_S = 380e9
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
        replace(server, before=Before(fact.dialect, fact.process.ranks[0], asleep=fact.asleep))
        for server, fact in zip(_servers(fleet, client), facts, strict=True)
    ]
    reports = peers.reports_for(offer, await _reports(servers, "", offer.transport))
    try:
        every = [report for ranks in reports.values() for report in ranks]
        live = await asyncio.to_thread(planned, offer, every)
    except NotInLayout as error:
        raise _refused(error.reason) from error
    except (TypeError, ValueError) as error:
        raise PreflightError(f"an offer that is not understood: {error}") from error
    layouts = {name: tuple(r.layout for r in ranks) for name, ranks in reports.items()}
    machine, timeout_s = peers.machine_of(fleet), fleet.timeouts.update_s
    return replace(live, servers=layouts, machine=machine, update_timeout_s=timeout_s)


def _servers(fleet: PushFleet, client: ControlClient) -> list[PushedServer]:
    timeout_s = fleet.timeouts.control_s
    return [
        PushedServer(given, engines.server(client, given.target, timeout_s=timeout_s))
        for given in fleet.servers
    ]


async def _reports(servers: Sequence[PushedServer], key: str, transport: str) -> Reports:
    """Every worker's layout, by server; proven, or there is none to copy into. On CPU there is
    none, and none is needed.
    """
    away = [server.name for server in servers if server.given.node is not None]
    if away and transport == IPC:
        raise _refused(f"{away[0]} is on another machine")
    try:
        # a push that copies everything mends one that broke off while it copied
        reports = await ask_layouts(servers, key=key, or_half_updated=True)
    except NotInLayout as error:
        raise _refused(error.reason) from error
    for name, ranks in reports.items():
        if reason := next(filter(None, (peers.unsuited(transport, r) for r in ranks)), ""):
            raise _refused(f"{name}: {reason}")
        if transport != GLOO and any(report.layout not in report.proven for report in ranks):
            raise _refused(f"the layout of {name} is not proven yet; a push from files proves it")
    return reports


def _refused(reason: str, kind: type[PreflightError] = PreflightError) -> PreflightError:
    return kind(
        f"servers cannot copy out of the trainer's memory: {reason}",
        hint="push from files, or from a file in memory",
    )


@dataclass(frozen=True)
class LiveWay:
    """Servers get the weights out of the trainer's memory."""

    live: Live
    """What the trainer offered, with the numbers of this push."""
    fleet: PushFleet
    """The servers, and the bounds to keep."""
    reports: Reports = field(default_factory=dict)
    """The layouts of the servers' workers, and what they have mapped."""
    staged: bool | None = None
    """Whether workers copy beside their parameters first; None: each where it suits."""

    name = LIVE
    reads_every_byte = True
    layout_only_by_loader = False

    @property
    def reason(self) -> str:
        if self.live.transport == IPC:
            return "servers copy out of the trainer's memory"
        return f"the trainer's ranks send to servers point to point, by {self.live.transport}"

    async def plan(
        self, question: Question, servers: Sequence[PushedServer]
    ) -> tuple[LiveWay, Plan]:
        live, request = self.live, question.request
        try:
            reports = await _reports(servers, live.mapped_key, live.transport)
        except PreflightError as error:  # nothing was in the way when they took the offer
            raise PreflightError(f"{error.message}; it {CHANGED}", hint=error.hint) from error
        staged = {"gpu": True, "stream": False}.get(request.stage)
        if live.transport == GLOO:
            staged = None  # a loader takes what has arrived
        if live.transport != IPC:
            reports = peers.as_planned(live, request, reports, staged)
        for name, ranks in reports.items():
            if not all(report.layout in live.numbers for report in ranks):
                raise PreflightError(
                    f"{name} {CHANGED}",
                    hint="offer it again, and push once more",
                )
        mapped = live.total_bytes if staged else 0
        notes = () if live.transport == IPC else (self.reason,)
        return LiveWay(live, self.fleet, reports, staged), Plan(1, mapped, notes)

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
        self._stages: dict[str, list[bool]] = {}
        self._opened: list[PushedServer] = []
        self._ready = False
        by_loader = way.live.transport == GLOO
        self._questions = peers.questions(way.live) if by_loader else []

    async def open(self, servers: Sequence[PushedServer]) -> None:
        self._opened = list(servers)
        mapping = [server for server in servers if not self._has_mapped(server)]
        await self._all(mapping, WorkerMethod.LAYOUT_MAP, self._mapping)
        staging, began = self._that_stage(servers), time.monotonic()
        await self._all(staging, WorkerMethod.LAYOUT_STAGE, self._staging)
        joining = [] if self._live.group is None else mapping
        arriving = {server.name: server for server in (*joining, *staging)}.values()
        await self._arrived(arriving, began)
        for server in () if self._questions else servers:
            server.proof.expected = [
                (self._live.plans[report.layout].program, dict(self._live.numbers[report.layout]))
                for report in self._way.reports[server.name]
            ]
        self._ready = True

    def _has_mapped(self, server: PushedServer) -> bool:
        staged = self._way.staged
        return all(
            report.opened == self._live.mapped_key and staged in (None, report.stages)
            for report in self._way.reports[server.name]
        )

    def _that_stage(self, servers: Sequence[PushedServer]) -> list[PushedServer]:
        """Those that copy beside their parameters first. Ranks send to all workers at once, so that
        of a group all do, or none.
        """
        workers = {
            name: self._stages.get(name, [bool(r.stages or r.spare_bytes) for r in reports])
            for name, reports in self._way.reports.items()
        }
        if self._live.group is not None and not all(map(all, workers.values())):
            return []
        return [server for server in servers if any(workers[server.name])]

    def _mapping(self, server: PushedServer) -> dict[str, Any]:
        live = self._live
        layouts = [report.layout for report in self._way.reports[server.name]]
        arguments = {
            "programs": [live.plans[layout].program.to_wire() for layout in layouts],
            "exports": [live.rows(layout) for layout in layouts],
            "key": live.mapped_key,
            "pids": [pid for pid in live.pids if pid],
            "staged": self._way.staged,
        }
        return arguments if live.group is None else arguments | peers.joining(live, server)

    def _staging(self, server: PushedServer) -> dict[str, Any]:
        if not self._questions:
            return {}
        layouts = [report.layout for report in self._way.reports[server.name]]
        return {"numbers": [dict(self._live.numbers[layout]) for layout in layouts]}

    async def _arrived(self, servers: Iterable[PushedServer], began: float) -> None:
        """Return once these have what they stage, and are in the group; they serve meanwhile.
        `began`: when they were told to.
        """
        try:
            async with asyncio.timeout(self._fleet.timeouts.update_s):
                await asyncio.gather(*(self._wait_arrived(server, began) for server in servers))
        except TimeoutError:
            raise _refused("the weights have not arrived in time") from None
        except ServerError as error:
            raise _refused(error.message) from error

    async def _wait_arrived(self, server: PushedServer, began: float) -> None:
        least_s = self._live.total_bytes / server.before.world_size / _BYTES_PER_S
        wait_s = max(began + least_s - time.monotonic(), 0.0)
        while True:
            await asyncio.sleep(wait_s)
            if await self._has_arrived(server):
                return
            wait_s = _POLL_S

    async def _has_arrived(self, server: PushedServer) -> bool:
        """Raises ServerError: it has failed, or a worker has let go of the trainer."""
        arguments = {"key": self._live.mapped_key}
        return all(await server.control.ask_workers(WorkerMethod.LAYOUT_ARRIVED, arguments))

    async def _all(
        self,
        servers: Sequence[PushedServer],
        method: str,
        arguments: Callable[[PushedServer], dict[str, Any]],
    ) -> None:
        """Have all of these servers get ready, or none.

        Raises:
            NotMapped: one answers that it cannot map.
            PreflightError: anything else fails.
        """
        maps, kind = method == WorkerMethod.LAYOUT_MAP, PreflightError

        async def ask(server: PushedServer) -> None:
            nonlocal kind
            try:
                answers = await server.control.ask_workers(method, arguments(server))
            except ServerError as error:
                if maps and error.status:  # one that does not answer may be able to
                    kind = NotMapped
                raise
            if maps:
                self._stages[server.name] = answers

        timeout_s = self._fleet.timeouts.update_s
        if reason := await all_or_none(servers, ask, timeout_s=timeout_s, call_name="map"):
            raise _refused(reason, kind)

    async def start(self, servers: Sequence[PushedServer], *, scrubbing: bool = False) -> None:
        """Fail servers that have let go of the trainer: it may have ended while they drained, and
        until now everything can be undone.
        """
        await super().start(servers)
        timeout_s = self._fleet.timeouts.control_s
        await each(alive(servers), self._has_arrived, timeout_s=timeout_s, call_name="start")

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        timeout_s = self._fleet.timeouts.update_s
        arguments: dict[str, Any] = {"chunks": None, "last": True}
        if self._questions:
            arguments["rows"] = peers.to_wire(self._questions)

        async def load(server: PushedServer) -> None:
            server.proof.copied = not self._questions
            server.holds = Holds.UNKNOWN
            reached("push.update.call")
            with server.spans.loading():
                answers = await server.control.ask_workers(
                    WorkerMethod.LAYOUT_LOAD, arguments, timeout_s=timeout_s
                )
            if self._questions:
                server.proof.rows = peers.known_rows(self._questions, answers[0])
            reached("push.update.sent")

        await each(alive(servers), load, timeout_s=timeout_s, call_name="update")
        on_progress(self._live.total_bytes)

    async def close(self) -> None:
        """Servers that failed let go of the trainer's memory; others keep it for its next push. A
        group of which one has failed is left by all.
        """
        opened, self._opened = self._opened, []
        failed = [server for server in opened if server.failure]
        if self._live.group is not None and (failed or not self._ready):
            failed = opened
        await release(failed)


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

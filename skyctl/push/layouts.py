"""The layout in which a push goes into servers, and whether servers hold what that layout predicts.

    checkpoint  vLLM's loader takes checkpoint tensors one by one: any model, slow for many tensors
    runtime     chunks are copied into the running parameters: fast, for parameters that are pieces
                of checkpoint tensors, and only after the servers' processes have seen it proven

A layout is proven in a process once vLLM's loader has left in every parameter, byte for byte, what
the layout predicts: in a push, or as the server started (`push/rehearsal.py`); where layers process
their weights, only in the rehearsal. The sender computes the numbers by which every byte is
compared from what it reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.header import Tensor, remembered
from skyctl.engines.base import lacks_method
from skyctl.errors import PreflightError, ServerError
from skyctl.push.request import Layout
from skyctl.push.rows import Compared
from skyctl.push.servers import Holds, PushedServer
from skyctl.push.verify import can_compare
from skyctl.transfer.plan import (
    ChunkPlan,
    LacksTensors,
    NotInLayout,
    check_layouts,
    order_for_runtime,
    order_tensors,
    program_for,
)
from skyctl.wire.layouts import LayoutReport, ParameterLayout, Program
from skyctl.wire.worker import WorkerMethod

_TRANSPORTS = ("ipc", "nccl")
_KEPT = 16

_spelt_out: dict[str, tuple[ParameterLayout, ...]] = {}
"""Layouts reported by the workers of this process's pushes, by digest; the latest few."""


_programs: dict[object, Program] = {}
"""The latest programs, by what they follow from; those of a mixture of experts take 0.1 s each."""
_checked: dict[object, bool] = {}
"""Pairs of checkpoint and layouts that fit each other, by headers and digests."""


@dataclass(frozen=True)
class LayoutChoice:
    """`name` is "runtime" or "checkpoint". `workers` are the servers' reports by rank, empty where
    nothing can be numbered; `programs` follow from them and the plan. `note` is one line on why it
    is not the runtime layout, "" if nobody asked for it.
    """

    name: str = "checkpoint"
    workers: Mapping[str, tuple[LayoutReport, ...]] = field(default_factory=dict)
    programs: Mapping[str, tuple[Program, ...]] = field(default_factory=dict)
    note: str = ""

    @property
    def reports(self) -> list[LayoutReport]:
        """The reports of all servers."""
        return [report for reports in self.workers.values() for report in reports]

    @property
    def spare_bytes(self) -> int:
        """Bytes a worker takes on its GPU to process weights before the freeze; 0 if it processes
        none.
        """
        return max((report.spare_bytes for report in self.reports), default=0)

    @property
    def order(self) -> tuple[str, ...]:
        """What the order of tensors follows from: the layouts of all workers, by digest."""
        return tuple(report.layout for report in self.reports)

    def ordered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The checkpoint's tensors in the order in which parameters hold them, if there are any
        reports.
        """
        return order_for_runtime(self.reports, tensors) if self.workers else order_tensors(tensors)

    def planned(self, plan: ChunkPlan, checkpoint: Checkpoint) -> LayoutChoice:
        """The choice with its programs for a plan of the checkpoint's tensors in that order."""
        made: dict[str, Program] = {}  # servers with the same layout share a program
        ends = tuple(chunk.size for chunk in plan.chunks)
        for report in self.reports:
            # equal headers, in the same order and cut alike, make equal plans
            key = (report.layout, checkpoint.headers, self.order, ends)
            if report.layout not in made:
                made[report.layout] = remembered(_programs, key, partial(program_for, report, plan))
        programs = {
            name: tuple(made[report.layout] for report in reports)
            for name, reports in self.workers.items()
        }
        return replace(self, programs=programs)


async def choose_layout(
    requested: Layout,
    transport: str,
    servers: Sequence[PushedServer],
    checkpoint: Checkpoint,
    *,
    names_compared: bool = True,
) -> LayoutChoice:
    """Settle the layout of a push. `names_compared`: with a checkpoint that the servers loaded.

    Raises:
        PreflightError: `requested` is "runtime", and it cannot be used; or parameters would keep
            the old weights.
    """
    could = transport in _TRANSPORTS and all(can_compare(server.target) for server in servers)
    if requested == "checkpoint" or (requested == "auto" and not could):
        return LayoutChoice()
    try:
        if transport not in _TRANSPORTS:
            raise NotInLayout(f"transport {transport} has no such way")
        workers = await ask_layouts(servers)
        reports = [report for of_server in workers.values() for report in of_server]
        await asyncio.to_thread(_check, reports, checkpoint)
        if transport != "ipc" and (processed := _processed(reports)):
            raise NotInLayout(f"{processed} is processed, ahead of a freeze only with ipc")
    except NotInLayout as refusal:
        # vLLM's own engines only log which layers got nothing
        if isinstance(refusal, LacksTensors) and not names_compared:
            raise PreflightError(
                f"{checkpoint.path} does not fit the running model: {refusal.reason}",
                hint="push a checkpoint that has all tensors of the model",
            ) from refusal
        return _refused(requested, LayoutChoice(), refusal.reason)
    unproven = [
        name
        for name, ranks in workers.items()
        if any(report.layout not in report.proven for report in ranks)
    ]
    if unproven:
        proves = "a rehearsal" if _processed(reports) else "this push"
        reason = f"not proven yet on {', '.join(unproven)}; {proves} proves it, if it holds"
        return _refused(requested, LayoutChoice(workers=workers), reason)
    return LayoutChoice("runtime", workers)


def _check(reports: Sequence[LayoutReport], checkpoint: Checkpoint) -> None:
    """Raise NotInLayout if checkpoint and layouts do not fit each other."""

    def check() -> bool:
        check_layouts(reports, checkpoint.tensors)
        return True

    reported = tuple((report.layout, report.ignored, report.reason) for report in reports)
    remembered(_checked, (reported, checkpoint.headers), check)


def _processed(reports: Sequence[LayoutReport]) -> str:
    """The first parameter that its layer processes into another form; "" if there is none."""
    return next((p.name for report in reports for p in report.parameters if p.processed), "")


def _refused(requested: Layout, choice: LayoutChoice, reason: str) -> LayoutChoice:
    if requested == "runtime":
        raise PreflightError(
            f"--layout runtime: {reason}",
            hint="push with --layout auto: it is used where it can be",
        )
    return replace(choice, note=f"by vLLM's loader, not in the runtime's layout: {reason}")


async def ask_layouts(
    servers: Sequence[PushedServer], *, key: str = "", or_half_updated: bool = False
) -> dict[str, tuple[LayoutReport, ...]]:
    """Every worker's report, by server and rank. What they have mapped stays mapped if it is a
    trainer's of this `key`.

    Raises:
        NotInLayout: one sleeps, does not answer, or an earlier push broke off there.
    """
    for server in servers:
        if server.before.asleep or server.given.recorded.weights_awake:
            raise NotInLayout(f"{server.name} sleeps")
    # ask them even after a push that broke off: a worker that is asked releases what the old sender
    # had shown it
    asking = (_ask_one(server, key) for server in servers)
    answers = await asyncio.gather(*asking, return_exceptions=True)
    for server in () if or_half_updated else servers:
        if server.holds is not Holds.OLD:
            raise NotInLayout(f"an earlier push broke off in {server.name}")
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    reports = [answer for answer in answers if not isinstance(answer, BaseException)]
    return dict(zip([server.name for server in servers], reports, strict=True))


async def _ask_one(server: PushedServer, key: str) -> tuple[LayoutReport, ...]:
    spelt_out = dict(_spelt_out)  # other answers may push these out meanwhile
    try:
        arguments: dict[str, Any] = {"described": list(spelt_out)}
        if key:
            arguments["key"] = key
        answers = await server.control.ask_workers(WorkerMethod.LAYOUT, arguments)
        reports = tuple(_spelled(LayoutReport.from_wire(answer), spelt_out) for answer in answers)
    except ServerError as error:
        if lacks_method(error):
            raise NotInLayout(f"the workers of {server.name} do not know layouts") from error
        raise NotInLayout(f"{server.name} does not tell its layout: {error.message}") from error
    except (TypeError, ValueError, LookupError) as error:
        raise NotInLayout(f"{server.name} tells a layout that is not understood") from error
    if [report.rank for report in reports] != list(range(server.before.world_size)):
        raise NotInLayout(
            f"{len(reports)} of {server.before.world_size} workers of {server.name} tell their "
            "layout"
        )
    return reports


def _spelled(
    report: LayoutReport, spelt_out: Mapping[str, tuple[ParameterLayout, ...]]
) -> LayoutReport:
    if report.parameters:
        _spelt_out.pop(report.layout, None)
        _spelt_out[report.layout] = report.parameters
        while len(_spelt_out) > _KEPT:
            del _spelt_out[next(iter(_spelt_out))]
        return report
    if report.reason:
        return report
    return replace(report, parameters=spelt_out[report.layout])


def numbered(server: PushedServer) -> list[list[str]]:
    """Names of the parameters whose numbers are expected, by rank; [] if none are."""
    return [[name for name, _, _ in program.parameters] for program, _ in server.proof.expected]


async def settle_parameters(
    server: PushedServer,
    answered: Mapping[int, Mapping[str, int]],
    whole: Compared,
    *,
    timeout_s: float,
) -> str:
    """Compare every byte of a server's parameters with what the sender read.

    If vLLM's loader filled them and they are what the layout predicts, the layout counts as proven
    from here on.

    Args:
        answered: numbers of the parameters, by rank.
        whole: what they are seen to hold if all numbers are right.

    Returns:
        A line for the operator if the layout turned out not to hold; "" otherwise.

    Raises:
        ServerError: they were filled in the runtime layout, and hold something else.
    """
    wrong = [
        name
        for rank, (program, expected) in enumerate(server.proof.expected)
        for name, _, _ in program.parameters
        if name not in expected or answered.get(rank, {}).get(name) != expected[name]
    ]
    if wrong and server.proof.copied:
        raise ServerError(
            f"{server.name}: {wrong[0]} is not what was sent ({len(wrong)} parameters differ)"
        )
    if wrong:
        return (
            f"{server.name}: vLLM's loader fills {wrong[0]} in a way that is not known "
            f"({len(wrong)} such parameters); pushes go on by it"
        )
    if not server.proof.copied:
        layouts = [program.layout for program, _ in server.proof.expected]
        await server.control.ask_workers(
            WorkerMethod.LAYOUT_PROVEN, {"layouts": layouts}, timeout_s=timeout_s
        )
    server.proof.compared = whole
    return ""

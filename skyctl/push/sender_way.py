"""A way with a sender process: which transport, from where, in which layout and which chunks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from skyctl.checkpoints.header import remembered
from skyctl.errors import PreflightError
from skyctl.launch.base import Node
from skyctl.launch.local.devices import available_memory
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.forecast import refusal, slots_of
from skyctl.push.layouts import LayoutChoice, choose_layout
from skyctl.push.machine_facts import forecast_push, free_gpu, subject_of
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.runtime_delivery import RuntimeDelivery
from skyctl.push.server_facts import (
    ServerFacts,
    common_nccl_settings,
    nccl_pace_notes,
    refuse_shared_gpus,
    refuse_without_nccl,
)
from skyctl.push.servers import PushedServer
from skyctl.push.source import Source
from skyctl.push.way import Delivery, Plan, Question, sizes_of
from skyctl.transfer.plan import ChunkPlan, plan_chunks
from skyctl.transfer.sender_pool import SenderPool
from skyctl.transfer.transports import Choice, load_transport
from skyctl.transfer.transports.base import Transport
from skyctl.units import LEAST_STAGE_RATE, format_bytes

_plans: dict[tuple[object, ...], ChunkPlan] = {}
"""The latest plans, by what they follow from. A sender that has just got one knows it again."""


@dataclass(frozen=True)
class SenderPlace:
    """Where the sender runs, and by which rules it forms a group."""

    gpu: int = -1
    """A GPU that no server uses; -1: it has no GPU of its own."""
    node: Node | None = None
    """The machine of that GPU; None for this one."""
    nccl_settings: Mapping[str, str] | None = None
    """NCCL's variables that all members share; None: unknown, or there is no group."""


@dataclass(frozen=True)
class SenderWay:
    """Chunks that a sender reads from files and a transport moves."""

    choice: Choice
    """The transport's name and the reason for it."""
    transport: Transport
    """Its half in this process, in the dialect of the servers."""
    request: PushRequest
    """What was typed."""
    fleet: PushFleet
    """The servers, and the bounds to keep."""
    source: Source
    """The files."""
    place: SenderPlace = field(default_factory=SenderPlace)
    """Where the sender runs."""
    chunks: ChunkPlan = field(default_factory=lambda: ChunkPlan((), 1, ()))
    """What it sends, in order; empty until planned."""
    layout: LayoutChoice = field(default_factory=LayoutChoice)
    """How the weights get into the parameters; settled when planned."""

    reads_every_byte = True

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def reason(self) -> str:
        return self.choice.reason

    @property
    def layout_only_by_loader(self) -> bool:
        return self.layout.name == "checkpoint"  # of copied weights every byte is compared

    async def plan(
        self, question: Question, servers: Sequence[PushedServer]
    ) -> tuple[SenderWay, Plan]:
        request, fleet, files = self.request, self.fleet, self.source.files
        layout = await choose_layout(
            request.layout,
            self.name,
            servers,
            files,
            names_compared=question.names_compared,
        )
        chunks = self._cut(layout)
        layout = layout.planned(chunks, files)
        workers = sum(fact.process.ranks[0] for fact in question.facts)
        slots = slots_of(request.stage, len(chunks.chunks))
        memory_bytes = (slots + workers) * chunks.slot_bytes
        if not fleet.leaves_machine and all(server.device == "cpu" for server in fleet.servers):
            check_memory(memory_bytes)
        planned = Plan(
            len(chunks.chunks),
            memory_bytes,
            tuple(([layout.note] if layout.note else []) + grown_notes(chunks)),
            sizes=sizes_of(chunks),
        )
        if request.dry_run and not fleet.leaves_machine:
            subject = await subject_of(
                fleet,
                chunks,
                self.transport,
                layout,
                workers=workers,
                idle=question.idle,
                sender_gpu=self.place.gpu,
            )
            forecasts, assumptions = await forecast_push(request, fleet, files, subject)
            planned = replace(planned, forecasts=forecasts, assumptions=assumptions)
        return replace(self, chunks=chunks, layout=layout), planned

    def _cut(self, layout: LayoutChoice) -> ChunkPlan:
        """The checkpoint in chunks, in the order that the layout asks for."""
        files, chunk_size = (
            self.source.files,
            self.request.chunk_size or self.fleet.reading.chunk_size,
        )
        cut = (chunk_size, self.transport.packing, self.transport.alignment)
        plan = functools.partial(
            plan_chunks,
            files.tensors,
            chunk_size=chunk_size,
            packing=self.transport.packing,
            alignment=self.transport.alignment,
            order=layout.ordered,
        )
        # equal headers, in the same order and cut alike, make equal plans
        return remembered(_plans, (files.headers, layout.order, *cut), plan)

    def delivery(self, senders: SenderPool, *, by_loader: bool = False) -> Delivery:
        copied = self.layout.name == "runtime" and not by_loader
        spare_bytes = self.layout.spare_bytes
        copying = functools.partial(RuntimeDelivery, spare_bytes=spare_bytes)
        deliver = functools.partial(
            copying if copied else ChunkDelivery,
            self.transport,
            self.source.files,
            self.chunks,
            self.fleet,
            sender_gpu=self.place.gpu,
            sender_node=self.place.node,
            nccl_settings=self.place.nccl_settings,
            stage=self.request.stage,
            # what vLLM's loader makes of a processed weight cannot be numbered
            programs=self.layout.programs if copied or not spare_bytes else None,
            scan=self.request.scan_nan is None,
            stage_rate=self.request.stage_rate or self.fleet.reading.stage_rate,
        )
        nodes = dict.fromkeys(server.node for server in self.fleet.servers)
        if set(nodes) == {None} or self.transport.collective:
            return deliver(senders=senders)
        from skyctl.push.machines_delivery import MachinesDelivery

        parts = {node: deliver(senders=senders) for node in nodes}
        # a second attempt is inside the freeze, where no machine waits for another
        return MachinesDelivery(parts, one_reader=self.fleet.reading.one_reader and not by_loader)


async def sender_way(question: Question, choice: Choice) -> tuple[SenderWay, list[str]]:
    """The way by a transport that fits these servers, and notes about it.

    Raises:
        PreflightError: it does not fit them; says what to change.
    """
    request, fleet, facts = question.request, question.fleet, question.facts
    relays = refuse_readers(fleet, choice.name)
    transport, dialect = load_transport(choice.name), facts[0].dialect
    if dialect is not None:
        if problem := dialect.refuses(question.source.files.config):
            raise PreflightError(problem, hint="push with --transport disk")
        transport = transport.speaking(dialect)
    refuse_stage_rate(request, choice.name)
    place, notes = SenderPlace(), list[str]()
    if choice.name == "nccl":
        place = await _place_of_group(fleet, facts)
        notes += nccl_pace_notes(place.nccl_settings or {})
    if relays:  # the senders' group, too, goes by what `env:` says
        place = replace(place, nccl_settings=common_nccl_settings(facts))
        machines = len({server.node for server in fleet.servers})
        reader = fleet.servers[0].name
        notes.append(f"readers: one: the sender beside {reader} reads for {machines} machines")
    return SenderWay(choice, transport, request, fleet, question.source, place), notes


async def _place_of_group(fleet: PushFleet, facts: Sequence[ServerFacts]) -> SenderPlace:
    """A GPU for the sender of a push by NCCL. Raises PreflightError."""
    refuse_without_nccl(facts)
    if facts[0].dialect is not None and facts[0].dialect.takes_buckets:
        refuse_shared_gpus(fleet.servers)  # their group fails only in the first update
    settings = common_nccl_settings(facts)
    if fleet.leaves_machine:
        _refuse_stores(facts)
    node, gpu = await free_gpu(fleet.servers)
    return SenderPlace(gpu, node, settings)


def _refuse_stores(facts: Sequence[ServerFacts]) -> None:
    """Raise PreflightError where a group would meet in a store on the network, which unpickles what
    it is sent."""
    for fact in facts:
        if fact.dialect is None or not fact.dialect.joins_by_id:
            raise PreflightError(
                f"transport nccl over machines needs vLLM 0.32 or newer; {fact.name} has "
                f"{fact.process.vllm_version or 'an unknown version'}",
                hint="push with --transport disk",
            )


def refuse_stage(request: PushRequest, transport: str) -> None:
    """Raise PreflightError for a way of staging that the transport does not have."""
    if problem := refusal(request.stage, transport):
        raise PreflightError(
            f"--stage {request.stage}: {problem}", hint="leave --stage out: it is chosen then"
        )


def refuse_readers(fleet: PushFleet, transport: str) -> bool:
    """Whether one sender reads for several machines. Raises PreflightError where the transport
    passes nothing on.
    """
    relays = fleet.reading.one_reader and len({server.node for server in fleet.servers}) > 1
    if relays and transport != "ipc":
        raise PreflightError(
            "weight_transfer.readers: one: a reader passes weights on from GPU to GPU, which "
            f"transport {transport} does not use",
            hint="set transport to ipc, or readers to all",
        )
    return relays


def refuse_stage_rate(request: PushRequest, transport: str) -> None:
    """Raise PreflightError for a stage rate that cannot be kept."""
    if request.stage_rate is None:
        return
    if request.stage_rate < LEAST_STAGE_RATE:
        raise PreflightError(
            f"--stage-rate {request.stage_rate}: at least {LEAST_STAGE_RATE} bytes per second",
            hint="write it like 500MB or 2GB",
        )
    if problem := refusal("stream", transport):
        raise PreflightError(f"--stage-rate: {problem}", hint="leave --stage-rate out")


def grown_notes(plan: ChunkPlan) -> list[str]:
    """A note when tensors are larger than the chunk size."""
    if not plan.grown:
        return []
    size, first = format_bytes(plan.chunk_size), plan.largest
    subject = f"{len(plan.grown)} tensors are" if len(plan.grown) > 1 else f"{plan.grown[0]} is"
    return [
        f"{subject} larger than the chunk size of {size}: the largest chunk is "
        f"{format_bytes(plan.slot_bytes)} for {first.name}"
    ]


def check_memory(needed_bytes: int) -> None:
    """Raise PreflightError if the machine, or this container, has not that much to spare."""
    available = available_memory()
    if available is not None and needed_bytes > available:
        raise PreflightError(
            f"the push needs {format_bytes(needed_bytes)} of memory, "
            f"{format_bytes(available)} are available",
            hint="take a smaller --chunk-size, or --transport disk",
        )

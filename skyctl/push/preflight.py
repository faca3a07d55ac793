"""Every check that can refuse a push before a server is touched."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from skyctl import engines
from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.checkpoints.finite import refuse_not_finite
from skyctl.checkpoints.header import remembered
from skyctl.errors import PreflightError
from skyctl.fleetfile.schema import LEAST_STAGE_RATE
from skyctl.http.client import ControlClient
from skyctl.launch.base import Node
from skyctl.launch.local.devices import available_memory
from skyctl.push.delivery import ChunkDelivery, Delivery
from skyctl.push.expected import refuse_broken
from skyctl.push.fit import check_fit
from skyctl.push.forecast import Forecast, refusal, slots_of
from skyctl.push.layouts import LayoutChoice, choose_layout
from skyctl.push.machine_facts import forecast_push, free_gpu, subject_of
from skyctl.push.machines_delivery import MachinesDelivery
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.rows import KnownRows, read_rows
from skyctl.push.runtime_delivery import RuntimeDelivery
from skyctl.push.senderless_delivery import DiskDelivery, TrainerDelivery
from skyctl.push.server_facts import (
    ServerFacts,
    ask_servers,
    check_servers,
    common_nccl_settings,
    nccl_pace_notes,
    refuse_dummy,
    refuse_shared_gpus,
    refuse_update_problems,
    refuse_without_nccl,
)
from skyctl.push.sites import Site, Weights, ask_all
from skyctl.push.verify import HOW_TO_DIGEST, CannotDigest, can_compare, weights_digest
from skyctl.push.versions import refuse_changed
from skyctl.store.state import TRAINER
from skyctl.transfer.plan import ChunkPlan, plan_chunks
from skyctl.transfer.sender_pool import Lease, SenderPool
from skyctl.transfer.transports import Choice, choose, load_transport
from skyctl.transfer.transports.base import Transport
from skyctl.units import format_bytes

_plans: dict[tuple[object, ...], ChunkPlan] = {}
"""The latest plans, by what they follow from. A sender that has just got one knows it again."""


@dataclass(frozen=True)
class Prepared:
    """A push that may begin. `memory_bytes` is the most memory it needs on this machine.
    `identity` names the files, or weights that are in no file.
    """

    request: PushRequest
    checkpoint: Checkpoint
    plan: ChunkPlan
    choice: Choice
    transport: Transport | None
    facts: tuple[ServerFacts, ...]
    sites: tuple[Site, ...]
    memory_bytes: int
    notes: tuple[str, ...]
    sender_gpu: int = -1
    sender_node: Node | None = None
    nccl_settings: Mapping[str, str] | None = None
    layout: LayoutChoice = field(default_factory=LayoutChoice)
    forecasts: tuple[Forecast, ...] = ()
    assumptions: tuple[str, ...] = ()
    identity: str = ""

    @property
    def source(self) -> str:
        """The checkpoint's directory; "" for weights that are in no file."""
        return str(self.checkpoint.path) if self.checkpoint.shards else ""

    def delivery(
        self, fleet: PushFleet, senders: SenderPool, *, by_loader: bool = False
    ) -> Delivery:
        """A new attempt, with a sender from the pool; with `by_loader`, all of it goes through
        vLLM's loader.
        """
        if fleet.trainer is not None:
            return TrainerDelivery(fleet.trainer, self.facts, fleet, senders)
        if self.transport is None:
            return DiskDelivery(self.checkpoint, fleet)
        copied = self.layout.name == "runtime" and not by_loader
        spare_bytes = self.layout.spare_bytes
        copying = functools.partial(RuntimeDelivery, spare_bytes=spare_bytes)
        deliver = functools.partial(
            copying if copied else ChunkDelivery,
            self.transport,
            self.checkpoint,
            self.plan,
            fleet,
            sender_gpu=self.sender_gpu,
            sender_node=self.sender_node,
            nccl_settings=self.nccl_settings,
            stage=self.request.stage,
            # what vLLM's loader makes of a processed weight cannot be numbered
            programs=self.layout.programs if copied or not spare_bytes else None,
            scan=self.request.scan_nan is None,
            stage_rate=self.request.stage_rate or fleet.stage_rate,
        )
        nodes = dict.fromkeys(server.node for server in fleet.servers)
        if set(nodes) == {None} or self.transport.collective:
            return deliver(senders=senders)
        parts = {node: deliver(senders=senders) for node in nodes}
        # a second attempt is inside the freeze, where no machine waits for another
        return MachinesDelivery(parts, one_reader=fleet.one_reader and not by_loader)

    @cached_property
    def rows(self) -> tuple[KnownRows, ...]:
        """Rows of the checkpoint that servers must hold after vLLM's loader has filled them.

        Raises:
            PreflightError: a file cannot be read.
        """
        try:
            return read_rows(self.checkpoint) if self.request.verify else ()
        except OSError as error:
            raise PreflightError(f"{self.checkpoint.path} cannot be read: {error}") from error

    @property
    def engine(self) -> str:
        """The servers' engine version: they share one, or there is no push."""
        return self.facts[0].vllm_version

    @property
    def chunks(self) -> int:
        """Chunks to send: 0 where servers read the checkpoint themselves."""
        return len(self.plan.chunks) if self.transport is not None else 0

    def to_json(self) -> dict[str, Any]:
        """The plan as `--dry-run` shows it. Sizes in bytes."""
        largest = self.plan.largest
        return {
            "checkpoint": str(self.checkpoint.path),
            "total_bytes": self.checkpoint.total_bytes,
            "tensors": len(self.checkpoint.tensors),
            "shards": len(self.checkpoint.shards),
            "transport": self.choice.name,
            "reason": self.choice.reason,
            "chunks": self.chunks,
            "chunk_size": self.plan.chunk_size,
            "largest_chunk": self.plan.slot_bytes,
            "largest_tensor": largest.name,
            "largest_tensor_bytes": largest.nbytes,
            "memory_bytes": self.memory_bytes,
            "forecasts": [one.to_json() for one in self.forecasts],
            "assumptions": list(self.assumptions),
            "servers": [facts.to_json() for facts in self.facts],
            "notes": list(self.notes),
        }


async def preflight(
    request: PushRequest, fleet: PushFleet, *, client: ControlClient, idle: Lease | None = None
) -> Prepared:
    """Check the checkpoint, the servers, and that they fit each other. Changes nothing.

    `idle` is the sender of the last push, if it is still alive.

    Raises:
        NotFoundError: there is no such checkpoint.
        PreflightError: the push cannot be made; says why and what to change.
        ServerError: a server does not answer (PartialFailure when only some do).
    """
    if not fleet.servers:
        raise PreflightError("the fleet has no servers")
    _refuse_unspeakable(request)
    if fleet.trainer is not None:
        return await _preflight_update(request, fleet, client=client)
    asked = asyncio.create_task(ask_servers(fleet, client=client))
    try:
        checkpoint = await asyncio.to_thread(_read, request)
        facts = await asked
    finally:
        asked.cancel()
    may_sleep = {s.name for s in fleet.servers if s.weights_awake or request.colocated}
    notes = check_servers(facts, may_sleep)
    refuse_broken(request, fleet, checkpoint, facts[0].vllm_version)
    refuse_update_problems(facts)
    _refuse_spanning(request.transport, fleet)
    nodes = {server.node for server in fleet.servers} - {None}
    choice = choose(request.transport, fleet.transport, facts, nodes=len(nodes))
    if problem := refusal(request.stage, choice.name):
        raise PreflightError(
            f"--stage {request.stage}: {problem}", hint="leave --stage out: it is chosen then"
        )
    machines = len({server.node for server in fleet.servers})
    relays = fleet.one_reader and machines > 1
    if relays and choice.name != "ipc":
        raise PreflightError(
            "weight_transfer.readers: one: a reader passes weights on from GPU to GPU, which "
            f"transport {choice.name} does not use",
            hint="set transport to ipc, or readers to all",
        )
    transport = None if choice.name == "disk" else load_transport(choice.name)
    if transport is not None and (dialect := facts[0].dialect) is not None:
        if why := dialect.refuses(checkpoint.config):
            raise PreflightError(why, hint="push with --transport disk")
        transport = transport.speaking(dialect)
    refuse_stage_rate(request, choice.name)
    nccl_settings: Mapping[str, str] | None = None
    sender_node, sender_gpu = None, -1
    if choice.name == "nccl":
        refuse_without_nccl(facts)
        if facts[0].dialect is not None and facts[0].dialect.takes_buckets:
            refuse_shared_gpus(fleet.servers)  # their group fails only in the first update
        nccl_settings = common_nccl_settings(facts)
        notes += nccl_pace_notes(nccl_settings or {})
        if nodes:
            _refuse_stores(facts)
        sender_node, sender_gpu = await free_gpu(fleet.servers)
    if relays:  # the senders' group, too, goes by what `env:` says
        nccl_settings = common_nccl_settings(facts)
        reader = fleet.servers[0].name
        notes.append(f"readers: one: the sender beside {reader} reads for {machines} machines")
    if transport is None:
        refuse_dummy(facts)
    # without a sender nobody else looks at the bytes
    if request.scan_nan or (transport is None and request.scan_nan is None and not request.dry_run):
        await asyncio.to_thread(refuse_not_finite, checkpoint)
    sites = _sites(fleet, facts, client, colocated=request.colocated)
    notes += await check_fit(request, checkpoint, fleet, facts, sites)
    chunk_size = request.chunk_size or fleet.chunk_size
    workers = sum(fact.world_size for fact in facts)
    layout = await choose_layout(request.layout, choice.name, sites, checkpoint)
    notes += [layout.note] if layout.note else []
    if transport is None:
        plan, memory_bytes = plan_chunks(checkpoint.tensors, chunk_size), 0
    else:
        planned = functools.partial(
            plan_chunks,
            chunk_size=chunk_size,
            packing=transport.packing,
            alignment=transport.alignment,
            order=layout.ordered,
        )
        # equal headers, in the same order and cut alike, make equal plans
        cut = (chunk_size, transport.packing, transport.alignment)
        plan = remembered(
            _plans, (checkpoint.headers, layout.order, *cut), lambda: planned(checkpoint.tensors)
        )
        layout = layout.planned(plan, checkpoint)
        notes += grown_notes(plan)
        memory_bytes = (slots_of(request.stage, len(plan.chunks)) + workers) * plan.slot_bytes
        if not nodes and all(server.device == "cpu" for server in fleet.servers):
            check_memory(memory_bytes)
    forecasts: tuple[Forecast, ...] = ()
    said: tuple[str, ...] = ()
    if request.dry_run and transport is not None and not nodes:
        subject = await subject_of(
            fleet, plan, transport, layout, workers=workers, idle=idle, sender_gpu=sender_gpu
        )
        forecasts, said = await forecast_push(request, fleet, checkpoint, subject)
    if request.verify and not request.dry_run:
        notes += await weigh(sites, facts, timeout_s=fleet.update_timeout_s)
    prepared = Prepared(
        request=request,
        checkpoint=checkpoint,
        identity=checkpoint.identity_digest,
        plan=plan,
        choice=choice,
        transport=transport,
        facts=facts,
        sites=sites,
        memory_bytes=memory_bytes,
        notes=tuple(notes),
        sender_gpu=sender_gpu,
        sender_node=sender_node,
        nccl_settings=nccl_settings,
        layout=layout,
        forecasts=forecasts,
        assumptions=said,
    )
    if layout.name == "checkpoint":  # of copied weights every byte is compared
        await asyncio.to_thread(lambda: prepared.rows)
    return prepared


async def _preflight_update(
    request: PushRequest, fleet: PushFleet, *, client: ControlClient
) -> Prepared:
    """The same for weights that a trainer sends itself."""
    _refuse_spanning("a trainer's sender", fleet)
    facts = await ask_servers(fleet, client=client)
    notes = check_servers(facts)
    refuse_update_problems(facts)
    sites = _sites(fleet, facts, client)
    checkpoint, identity = Checkpoint(Path(), (), (), {}), secrets.token_hex(16)
    if request.checkpoint:
        checkpoint = await asyncio.to_thread(_read, request)
        identity = checkpoint.identity_digest
        notes += await check_fit(request, checkpoint, fleet, facts, sites)
    elif request.verify:
        notes.append("no checkpoint of these weights: servers are compared with each other alone")
    if request.verify:
        notes += await weigh(sites, facts, timeout_s=fleet.update_timeout_s)
    prepared = Prepared(
        request=request,
        checkpoint=checkpoint,
        identity=identity,
        plan=ChunkPlan((), fleet.chunk_size, ()),
        choice=Choice(TRAINER, "the trainer sends them itself"),
        transport=None,
        facts=facts,
        sites=sites,
        memory_bytes=0,
        notes=tuple(notes),
    )
    await asyncio.to_thread(lambda: prepared.rows)
    return prepared


def _refuse_stores(facts: Sequence[ServerFacts]) -> None:
    """Raise PreflightError where a group would meet in a store on the network, which unpickles what
    it is sent."""
    for fact in facts:
        if fact.dialect is None or not fact.dialect.joins_by_id:
            raise PreflightError(
                f"transport nccl over machines needs vLLM 0.32 or newer; {fact.name} has "
                f"{fact.vllm_version or 'an unknown version'}",
                hint="push with --transport disk",
            )


def _refuse_spanning(transport: str, fleet: PushFleet) -> None:
    """Raise PreflightError where a sender would have to reach several machines of one server."""
    spanning = [server for server in fleet.servers if server.machines > 1]
    if spanning and transport not in ("auto", "disk"):
        raise PreflightError(
            f"{transport}: {spanning[0].name} runs on {spanning[0].machines} machines, and a "
            "sender reaches the workers of one",
            hint="push a path that all of them share, with --transport disk",
        )


def _refuse_unspeakable(request: PushRequest) -> None:
    """Raise PreflightError for a path or a label that no server can be told, or no line can show:
    a directory's name becomes part of the label.
    """
    for told in (request.checkpoint, request.weight_version or ""):
        try:
            told.encode()
        except UnicodeEncodeError as error:
            raise PreflightError(f"{told!a} is no UTF-8", hint="give it another name") from error
        if told and told.splitlines() != [told]:
            raise PreflightError(f"{told!a} is more than one line", hint="give it another name")


def _read(request: PushRequest) -> Checkpoint:
    checkpoint = read_checkpoint(request.checkpoint)
    refuse_changed(request, checkpoint)
    return checkpoint


def _sites(
    fleet: PushFleet,
    facts: Sequence[ServerFacts],
    client: ControlClient,
    *,
    colocated: bool = False,
) -> tuple[Site, ...]:
    found = []
    for server, fact in zip(fleet.servers, facts, strict=True):
        vllm = engines.server(client, server.target, timeout_s=fleet.control_timeout_s)
        vllm.known_ranks = fact.ranks  # they are not asked for again while it is frozen
        # a CPU server's is_sleeping and metric say nothing: the recorded sleep level counts
        asleep = colocated and (fact.asleep or server.sleep_level > 0)
        site = Site(
            server=server,
            vllm=vllm,
            dialect=fact.dialect,
            world_size=fact.world_size,
            was_paused=fact.paused and not server.thaw,
            old_version=fact.weight_version,
            engine="+".join(part for part in (fact.vllm_version, server.arguments) if part),
            kv_lease_s=fact.kv_lease_s,
            weights=Weights.UNKNOWN if server.half_updated else Weights.OLD,
            open=server.thaw,  # a push broke off there: its session may be open
            frozen=server.thaw and not asleep,  # undoing this push thaws it as well
            asleep=asleep,
        )
        found.append(site)
    return tuple(found)


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
    which = f"{len(plan.grown)} tensors are" if len(plan.grown) > 1 else f"{plan.grown[0]} is"
    return [
        f"{which} larger than the chunk size of {size}: the largest chunk is "
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


async def weigh(
    sites: Sequence[Site], facts: Sequence[ServerFacts], *, timeout_s: float
) -> list[str]:
    """Fill `digest_before` of servers without a digest on record; returns notes about it.

    Sleeping servers are skipped: their memory may be unmapped. A server that fails to answer is
    only noted, because an earlier push may have left it half loaded.

    Raises:
        PreflightError: a server could not be verified after the push either.
    """
    unknown = [
        site
        for site, fact in zip(sites, facts, strict=True)
        if not (fact.asleep or site.asleep or site.server.weights_awake or site.server.sleep_level)
        and not site.server.weights_digest
        and site.weights is Weights.OLD
    ]

    async def ask(site: Site) -> PreflightError | None:
        """Why its weights can never be verified; None if they can."""
        try:
            found = await weights_digest(site.vllm, timeout_s=timeout_s)
        except CannotDigest as error:
            return PreflightError(error.message, hint=error.hint)
        if found.compared is None and can_compare(site.target):
            return PreflightError(
                f"{site.name} cannot be compared with the checkpoint: its workers lack skyctl's "
                "extension",
                hint=HOW_TO_DIGEST,
            )
        site.digest_before = found.digest
        return None

    outcomes = await ask_all(unknown, ask, timeout_s=timeout_s)
    for outcome in outcomes:
        if outcome.value is not None:
            raise outcome.value
    return [
        f"{outcome.server} could not be looked at before the push: {outcome.detail}"
        for outcome in outcomes
        if not outcome.ok
    ]

"""Everything that can refuse a push before a server is touched, and what is established then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unicodedata import category

from skyctl import engines
from skyctl.checkpoints.finite import refuse_not_finite
from skyctl.errors import PreflightError
from skyctl.http.client import ControlClient
from skyctl.push.fit import check_fit
from skyctl.push.request import PushFleet, PushRequest, PushServer
from skyctl.push.sender_way import refuse_readers, refuse_stage, refuse_stage_rate, sender_way
from skyctl.push.server_facts import (
    ServerFacts,
    ask_servers,
    check_servers,
    refuse_dummy,
    refuse_update_problems,
)
from skyctl.push.servers import Before, Did, Holds, PushedServer, ask_all
from skyctl.push.source import Source, read_source
from skyctl.push.verify import (
    HOW_TO_DIGEST,
    CannotDigest,
    can_compare,
    refuse_broken,
    weights_digest,
)
from skyctl.push.way import Plan, Question, Way
from skyctl.states import is_empty, label_matches
from skyctl.transfer.sender_pool import Lease
from skyctl.transfer.transports import Reachable, choose

if TYPE_CHECKING:
    from skyctl.push.draft import Draft


@dataclass(frozen=True)
class Checked:
    """A push that may begin: facts that no longer change."""

    request: PushRequest
    """What was typed."""
    source: Source
    """The weights."""
    way: Way
    """How they get into the servers."""
    plan: Plan
    """What the way is going to do."""
    facts: tuple[ServerFacts, ...]
    """What each server reported of itself, in the fleet's order."""
    servers: tuple[PushedServer, ...]
    """The record of each server; what it holds changes from here on."""
    notes: tuple[str, ...]
    """Lines the operator should read."""
    draft: Draft | None = None
    """What servers are to draft tokens with; None if none of them has weights for that."""

    @property
    def draft_record(self) -> dict[str, str]:
        """Its directory and the identity of its files; "" if they are the checkpoint's own."""
        draft = self.draft if self.draft and self.draft.directory else None
        return {
            "draft": draft.directory if draft else "",
            "draft_digest": draft.checkpoint.identity_digest if draft else "",
        }

    @property
    def engine(self) -> str:
        """The servers' engine version: they share one, or there is no push."""
        return self.facts[0].process.vllm_version

    def to_json(self) -> dict[str, Any]:
        """The plan as `--dry-run` shows it. Sizes in bytes."""
        files, whole = self.source.checkpoint, self.source.whole
        return {
            "checkpoint": self.source.path,
            "total_bytes": whole.bytes,
            "tensors": whole.tensors,
            "shards": 0 if files is None else len(files.shards),
            "transport": self.way.name,
            "reason": self.way.reason,
            "chunks": self.plan.chunks,
            **self.plan.sizes,
            "memory_bytes": self.plan.memory_bytes,
            "forecasts": [forecast.to_json() for forecast in self.plan.forecasts],
            "assumptions": list(self.plan.assumptions),
            "servers": [facts.to_json() for facts in self.facts],
            "notes": list(self.notes),
        }


async def check(
    request: PushRequest, fleet: PushFleet, *, client: ControlClient, idle: Lease | None = None
) -> Checked:
    """Check the weights, the servers, and that they fit each other. Changes nothing.

    `idle` is the sender of the last push, if it is still alive.

    Raises:
        NotFoundError: there is no such checkpoint.
        PreflightError: the push cannot be made; says why and what to change.
        ServerError: a server does not answer (PartialFailure when only some do).
    """
    if not fleet.servers:
        raise PreflightError("the fleet has no servers")
    _refuse_unprintable(request)
    facts, source = await _read(request, fleet, client)
    colocated = request.colocated and source.trainer is None
    may_sleep = [s.name for s in fleet.servers if s.recorded.weights_awake or colocated]
    notes = check_servers(facts, may_sleep)
    if request.verify is None and not fleet.defaults.verify:
        notes.append("as with --no-verify: the fleet file has `weight_transfer: {verify: false}`")
    if source.trainer is None and source.checkpoint is not None:
        refuse_broken(request, fleet, source.files, facts[0].process.vllm_version)
    refuse_update_problems(facts)
    question = Question(request, fleet, source, facts, idle)
    way, hints = await choose_way(question)
    notes += hints
    # a way that does not read every byte leaves NaN unseen: the files are scanned first
    unread = not way.reads_every_byte and request.scan_nan is None and not request.dry_run
    if source.trainer is None and source.live is None and (request.scan_nan or unread):
        await asyncio.to_thread(refuse_not_finite, source.files)
    servers = _records(fleet, facts, client, colocated=colocated)
    if source.checkpoint is not None:
        fit = await check_fit(request, source.checkpoint, fleet, facts, servers)
        notes += fit.notes
        question = replace(question, names_compared=fit.names_compared)
    draft = None
    if request.draft or any(fact.process.drafts for fact in facts):
        from skyctl.push.draft import check_draft

        draft, draft_notes = await check_draft(request, fleet, source, facts, servers)
        notes += draft_notes
    way, plan = await way.plan(question, servers)
    notes += plan.notes
    if fleet.verifies(request) and not request.dry_run:
        notes += await digest_before(servers, facts, timeout_s=fleet.timeouts.update_s)
    if way.layout_only_by_loader or fleet.leaves_machine:
        await asyncio.to_thread(lambda: source.rows)
    return Checked(request, source, way, plan, facts, servers, tuple(notes), draft)


async def _read(
    request: PushRequest, fleet: PushFleet, client: ControlClient
) -> tuple[tuple[ServerFacts, ...], Source]:
    """What the servers report, and the source, read meanwhile."""
    asking = asyncio.create_task(ask_servers(fleet, client=client))
    try:
        source = await read_source(request, fleet)
        return await asking, source
    finally:
        asking.cancel()


async def choose_way(question: Question) -> tuple[Way, list[str]]:
    """The way by which the weights get into these servers, and notes about it.

    Raises:
        PreflightError: there is none, or not the one that was asked for.
    """
    request, fleet, source = question.request, question.fleet, question.source
    if source.trainer is not None:
        from skyctl.push.senderless_delivery import TrainerWay

        _refuse_spanning("a trainer's sender", fleet)
        return TrainerWay(source.trainer, question.facts, fleet), []
    if source.live is not None:
        from skyctl.push.live_way import LiveWay

        _refuse_spanning("a trainer's memory", fleet)
        return LiveWay(source.live, fleet), []
    if fleet.sibling is not None:
        from skyctl.push.sibling_way import sibling_way

        return sibling_way(fleet.sibling, question), []
    _refuse_spanning(request.transport, fleet)
    nodes = {server.node for server in fleet.servers} - {None}
    default = fleet.defaults.transport
    if request.ranks and {request.transport, default} == {"auto"} and _on_cpu(fleet):
        return _by_disk("the servers read the trainer's file in memory themselves", question), []
    servers = [Reachable(f.name, f.url, f.process.backend) for f in question.facts]
    choice = choose(request.transport, default, servers, nodes=len(nodes))
    refuse_stage(request, choice.name)
    if choice.name != "disk":
        return await sender_way(question, choice)
    refuse_readers(fleet, choice.name)
    refuse_stage_rate(request, choice.name)
    refuse_dummy(question.facts)
    return _by_disk(choice.reason, question), []


def _by_disk(reason: str, question: Question) -> Way:
    from skyctl.push.senderless_delivery import DiskWay

    return DiskWay(reason, question.source, question.fleet)


def _on_cpu(fleet: PushFleet) -> bool:
    return all(server.device == "cpu" and server.node is None for server in fleet.servers)


def _refuse_spanning(transport: str, fleet: PushFleet) -> None:
    """Raise PreflightError where a sender would have to reach several machines of one server."""
    spanning = [server for server in fleet.servers if server.machines > 1]
    if spanning and transport not in ("auto", "disk"):
        raise PreflightError(
            f"{transport}: {spanning[0].name} runs on {spanning[0].machines} machines, and a "
            "sender reaches the workers of one",
            hint="push a path that all of them share, with --transport disk",
        )


def _refuse_unprintable(request: PushRequest) -> None:
    """Raise PreflightError for a path or a label that cannot be sent to a server, or shown on one
    line: a directory's name becomes part of the label.
    """
    for text in (request.checkpoint, request.weight_version or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PreflightError(f"{text!a} is not UTF-8", hint="give it another name") from error
        if text and text.splitlines() != [text]:
            raise PreflightError(f"{text!a} is more than one line", hint="give it another name")
        if any(category(character) == "Cc" for character in text):
            raise PreflightError(f"{text!a} has control characters", hint="give it another name")


def _records(
    fleet: PushFleet,
    facts: Sequence[ServerFacts],
    client: ControlClient,
    *,
    colocated: bool,
) -> tuple[PushedServer, ...]:
    servers = []
    for given, fact in zip(fleet.servers, facts, strict=True):
        slept = given.recorded.sleep_level
        given = _as_found(given, fact)
        control = engines.server(client, given.target, timeout_s=fleet.timeouts.control_s)
        control.known_ranks = fact.process.ranks  # they are not asked for again while it is frozen
        # awake weights are on record alone, and so is the sleep of an engine without the metric
        asleep = colocated and given.recorded.sleep_level > 0
        awake = slept > 0 and not given.recorded.sleep_level
        empty = awake and is_empty(slept, fact.weight_version, given.recorded.version)
        thaw = given.recorded.thaw and not given.recorded.sleep_level
        before = Before(
            dialect=fact.dialect,
            world_size=fact.process.ranks[0],
            paused=fact.paused and not thaw,
            asleep=asleep,
            empty=empty,
            version=fact.weight_version,
            engine="+".join(part for part in (fact.process.vllm_version, given.arguments) if part),
            kv_lease_s=fact.process.kv_lease_s,
        )
        # undoing this push also undoes what an earlier one left
        did = Did(open=given.recorded.in_doubt, frozen=thaw)
        if (asleep and slept != given.recorded.sleep_level) or (awake and not empty):
            did.slept = given.recorded.sleep_level  # for the record
        holds = Holds.UNKNOWN if given.recorded.half_updated else Holds.OLD
        servers.append(PushedServer(given, control, before, holds, did))
    return tuple(servers)


def _as_found(given: PushServer, fact: ServerFacts) -> PushServer:
    """The server without what its record says of its weights or its sleep and no longer holds:
    another fleet or program has pushed to it or woken it, put it to sleep, or it was started again.
    """
    recorded = given.recorded
    # weights that a dead push had verified may not be labelled yet
    if not (recorded.verified_as or label_matches(fact.weight_version, recorded.version)):
        recorded = replace(recorded, weights_digest="")
    serves = not (fact.asleep or fact.paused)  # one that sleeps is paused as well
    # of those that sleep in part some say that they are awake, and discarded weights stay empty
    woken = fact.sleep_level == 0 and recorded.sleep_level == 1 and not recorded.weights_awake
    if serves or woken:
        recorded = replace(recorded, sleep_level=0, weights_awake=False)
    elif not recorded.weights_awake and (level := fact.sleep_level or 0) > recorded.sleep_level:
        recorded = replace(recorded, sleep_level=level)
    return replace(given, recorded=recorded)


async def digest_before(
    servers: Sequence[PushedServer], facts: Sequence[ServerFacts], *, timeout_s: float
) -> list[str]:
    """Fill `digest_before` of servers without a digest on record; returns notes about it.

    Sleeping servers are skipped: their memory may be unmapped. A server that fails to answer is
    only noted, because an earlier push may have left it half loaded.

    Raises:
        PreflightError: a server could not be verified after the push either.
    """
    unknown = [
        server
        for server, fact in zip(servers, facts, strict=True)
        if not (
            fact.asleep
            or server.before.asleep
            or server.given.recorded.weights_awake
            or server.given.recorded.sleep_level
        )
        and not server.given.recorded.weights_digest
        and server.holds is Holds.OLD
    ]

    async def ask(server: PushedServer) -> PreflightError | None:
        """Why its weights can never be verified; None if they can."""
        try:
            report = await weights_digest(server.control, timeout_s=timeout_s)
        except CannotDigest as error:
            return PreflightError(error.message, hint=error.hint)
        if report.compared is None and can_compare(server.target):
            return PreflightError(
                f"{server.name} cannot be compared with the checkpoint: its workers lack skyctl's "
                "extension",
                hint=HOW_TO_DIGEST,
            )
        server.proof.digest_before = report.digest
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

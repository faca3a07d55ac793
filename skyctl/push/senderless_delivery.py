"""Deliveries in which skyctl sends nothing: servers read a checkpoint, or a trainer sends.

skyctl does not see what a trainer sends: from the start of `update` until it reports, every server
may hold parts of several checkpoints. A trainer that dies, or does not report in time, has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.engines.base import Refusal
from skyctl.engines.dialect import GroupJoin
from skyctl.errors import NotFoundError, PreflightError, ServerError
from skyctl.http.client import ControlClient
from skyctl.kill_points import reached
from skyctl.push.frozen import require_paused
from skyctl.push.request import PushFleet
from skyctl.push.server_facts import ServerFacts, ask_servers
from skyctl.push.servers import Holds, PushedServer, alive, close_session, each, scrub
from skyctl.push.source import Source
from skyctl.push.trainer import Rendezvous, SendTarget, Trainer
from skyctl.push.verify import weights_digest
from skyctl.push.way import Delivery, Plan, Question, sizes_of
from skyctl.states import TRAINER
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.sender_pool import SenderPool
from skyctl.transfer.transports.base import rank_offsets
from skyctl.wire.worker import WorkerMethod

_SLOWEST_BYTES_PER_S = 50e6  # a cold network disk; below it, raise update_timeout_s


@dataclass(frozen=True)
class DiskWay:
    """Every server reads the files itself, by its engine's loader."""

    reason: str
    """Why it was chosen."""
    source: Source
    """The files."""
    fleet: PushFleet
    """The servers, and the bounds to keep."""

    name = "disk"
    reads_every_byte = False
    layout_only_by_loader = True

    async def plan(
        self, question: Question, servers: Sequence[PushedServer]
    ) -> tuple[DiskWay, Plan]:
        chunk_size = question.request.chunk_size or self.fleet.reading.chunk_size
        # nothing is sent in chunks: the sizes tell how large the largest tensor is
        return self, Plan(sizes=sizes_of(plan_chunks(self.source.files.tensors, chunk_size)))

    def delivery(self, senders: SenderPool, *, by_loader: bool = False) -> Delivery:
        return DiskDelivery(self.source.files, self.fleet)


class DiskDelivery(Delivery):
    """Every server reads the checkpoint itself, in one call. There is no second attempt: no call
    scrubs a reload that broke off.
    """

    def __init__(self, checkpoint: Checkpoint, fleet: PushFleet) -> None:
        self._checkpoint = checkpoint
        self._fleet = fleet
        self._timeout_s = fleet.timeouts.update_s + checkpoint.total_bytes / _SLOWEST_BYTES_PER_S

    async def open(self, servers: Sequence[PushedServer]) -> None:
        self._check_unchanged()

    async def start(self, servers: Sequence[PushedServer], *, scrubbing: bool = False) -> None:
        await super().start(servers)
        await each(
            alive(servers),
            lambda server: server.control.prepare_reload(),
            timeout_s=self._fleet.timeouts.control_s,
            call_name="start",
        )

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        path = str(self._checkpoint.path)

        async def call(server: PushedServer) -> None:
            before, server.holds = server.holds, Holds.UNKNOWN
            reached("push.update.call")
            try:
                with server.spans.loading():
                    await server.control.reload_weights(path, timeout_s=self._timeout_s)
                reached("push.update.sent")
            except ServerError as error:
                if error.refusal != Refusal.CANNOT_RELOAD:
                    raise
                server.holds = before
                raise ServerError(f"{error.message}, or push with another transport") from error

        await each(alive(servers), call, timeout_s=self._timeout_s, call_name="reload")
        try:
            self._check_unchanged()
        except PreflightError as error:
            for server in alive(servers):
                server.failure = error.message
        on_progress(self._checkpoint.total_bytes)
        reached("push.update.done")

    def _check_unchanged(self) -> None:
        """Servers read by name: the files must be the ones that were checked, before and after."""
        try:
            now = read_checkpoint(str(self._checkpoint.path))
        except NotFoundError as error:
            raise PreflightError(f"{self._checkpoint.path} vanished during the push") from error
        if now.identity_digest != self._checkpoint.identity_digest:
            raise PreflightError(f"{self._checkpoint.path} changed during the push")


def send_targets(facts: Sequence[ServerFacts], at: Rendezvous) -> tuple[SendTarget, ...]:
    """All servers of one group, in fleet order.

    Raises:
        PreflightError: a server takes no weights from a trainer.
    """
    for fact in facts:
        if not fact.process.backend:
            raise PreflightError(
                f"{fact.name} was started without a weight-transfer backend",
                hint="name the trainer's in the fleet file, `weight_transfer: {backend: …}`, "
                "and restart the servers",
            )
    offsets, world_size = rank_offsets([fact.process.ranks[0] for fact in facts])
    return tuple(
        SendTarget(
            server=fact.name,
            url=fact.url,
            version=fact.process.vllm_version,
            backend=fact.process.backend,
            rank_offset=offset,
            workers=fact.process.ranks[0],
            world_size=world_size,
            init_info=None
            if fact.dialect is None
            else fact.dialect.trainer_init_info(
                fact.process.backend,
                GroupJoin(offset, world_size, at.master_address, at.master_port),
            ),
        )
        for fact, offset in zip(facts, offsets, strict=True)
    )


async def ask_targets(
    fleet: PushFleet, at: Rendezvous, client: ControlClient
) -> tuple[SendTarget, ...]:
    """What a trainer must know of each server. Raises as `ask_servers` and `send_targets`."""
    return send_targets(await ask_servers(fleet, client=client), at)


@dataclass(frozen=True)
class TrainerWay:
    """A trainer sends by its own engine, into the sessions that it opens."""

    trainer: Trainer
    """It sends."""
    facts: tuple[ServerFacts, ...]
    """What each server reported, in the fleet's order: it says where they are."""
    fleet: PushFleet
    """The servers, and the bounds to keep."""

    name = TRAINER
    reason = "the trainer sends them itself"
    reads_every_byte = False
    layout_only_by_loader = True

    async def plan(
        self, question: Question, servers: Sequence[PushedServer]
    ) -> tuple[TrainerWay, Plan]:
        verifies = question.fleet.verifies(question.request)
        in_no_file = question.source.checkpoint is None and verifies
        note = "no checkpoint of these weights: servers are compared with each other alone"
        return self, Plan(notes=(note,) if in_no_file else ())

    def delivery(self, senders: SenderPool, *, by_loader: bool = False) -> Delivery:
        return TrainerDelivery(self.trainer, self.facts, self.fleet, senders)


class TrainerDelivery(Delivery):
    """Waits for a trainer. One that failed is not asked again."""

    def __init__(
        self, trainer: Trainer, facts: Sequence[ServerFacts], fleet: PushFleet, senders: SenderPool
    ) -> None:
        self._trainer = trainer
        self._targets = send_targets(facts, trainer.at)
        self._fleet = fleet
        self._senders = senders
        self._leaves_group = False

    async def open(self, servers: Sequence[PushedServer]) -> None:
        self._leaves_group = self._senders.idle is not None
        await self._senders.close()  # workers leave the pooled sender's group for the trainer's

    async def start(self, servers: Sequence[PushedServer], *, scrubbing: bool = False) -> None:
        """The trainer's engine opens its sessions itself: none of an earlier push may be open."""

        async def clear(server: PushedServer) -> None:
            await require_paused(server)
            if self._leaves_group:
                await server.control.extension_rpc(WorkerMethod.LEAVE_GROUP)
            if server.holds is Holds.UNKNOWN or server.did.open:
                await scrub(server)
                await close_session(server)

        timeout_s = self._fleet.timeouts.control_s * 7
        await each(servers, clear, timeout_s=timeout_s, call_name="start")
        _fail(servers, self._trainer.failure)  # nothing has been sent: it can still be undone

    async def update(
        self, servers: Sequence[PushedServer], on_progress: Callable[[int], None]
    ) -> None:
        before = {server.name: server.holds for server in servers}
        for server in servers:
            server.holds = Holds.UNKNOWN
        reached("push.update.call")
        failure = await self._trainer.send(self._targets)
        reached("push.update.done")
        if failure and self._trainer.has_spoken:
            old = [server for server in servers if before[server.name] is Holds.OLD]
            timeout_s = self._fleet.timeouts.update_s
            await each(old, self._keep_if_untouched, timeout_s=timeout_s * 2, call_name="update")
        _fail(servers, failure)

    async def finish(self, servers: Sequence[PushedServer], version: Callable[[], str]) -> None:
        async def call(server: PushedServer) -> None:
            label = version() if server.dialect.labels_at_finish else None
            await self._close(server, label)
            server.holds = Holds.NEW

        timeout_s = self._fleet.timeouts.update_s
        await each(alive(servers), call, timeout_s=timeout_s * 2, call_name="finish")

    async def _close(self, server: PushedServer, label: str | None = None) -> None:
        """Finish the session that the trainer's engine left open, if any."""
        timeout_s = self._fleet.timeouts.update_s
        try:
            await server.control.finish_weight_update(label, timeout_s=timeout_s)
        except ServerError as error:
            if error.refusal != Refusal.NO_SESSION:
                raise
            if label is not None:  # only the end of a session can label the weights
                await server.control.start_weight_update(timeout_s=timeout_s)
                await server.control.finish_weight_update(label, timeout_s=timeout_s)

    async def _keep_if_untouched(self, server: PushedServer) -> None:
        """A trainer that failed before it sent anything leaves the previous weights in place."""
        before = server.given.recorded.weights_digest or server.proof.digest_before
        await self._close(server)
        report = await weights_digest(server.control, timeout_s=self._fleet.timeouts.update_s)
        if before and report.digest == before:
            server.holds = Holds.OLD


def _fail(servers: Sequence[PushedServer], failure: str) -> None:
    for server in servers:
        server.failure = server.failure or failure

"""The fleet's side of a trainer, on its rank 0: files in memory that ranks fill, and the pushes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from skyctl.api.live_job import push_to_its_end
from skyctl.api.updates import swept
from skyctl.checkpoints.live import TensorFile, running_model
from skyctl.checkpoints.staging import StagedEntry, staged_entry
from skyctl.core.requests import PushLive, Staging, Withdraw
from skyctl.core.results import push_result
from skyctl.core.service import FleetService
from skyctl.errors import ConflictError, NotFoundError, NotMapped, PreflightError, SkyctlError
from skyctl.kill_points import reached
from skyctl.live.blocks import Block, Target, described, refuse_unlike, senders
from skyctl.live.file import lay_out, targets_of
from skyctl.live.group import TrainerGroup
from skyctl.live.offer import CHANGED, GLOO, IPC, Offer, Offered, piece_row
from skyctl.live.outline import Outline, RankShare, shares_of
from skyctl.live.ranks import Body, Ranks
from skyctl.push.request import PushRequest, PushResult
from skyctl.states import LIVE
from skyctl.store.journal import JobEvent
from skyctl.store.owned import FileLock
from skyctl.store.paths import create_private_file, private_directory

_LOCK = ".trainer"
_FILES = 2
"""How many files a trainer has at a time: what the fleet runs stays as it is while the next version
is written."""

Sent = list[tuple[int, int]]
"""What a rank sends: numbers of blocks among its own, each with the offset of its tensor."""


@dataclass
class _File:
    """A checkpoint in memory, and what keeps it from being swept."""

    entry: StagedEntry
    file: TensorFile

    @property
    def checkpoint(self) -> str:
        return str(self.entry.path)

    def close(self) -> None:
        self.file.close()
        self.entry.close()


class FleetSide:
    """What rank 0 does for all ranks. Belongs to one event loop.

    Args:
        by_file: weights may go through a file where servers cannot map the ranks' memory.
    """

    def __init__(self, fleet: FleetService, name: str, ranks: Ranks, *, by_file: bool) -> None:
        self._fleet = fleet
        self._name = name
        self._stack = ExitStack()
        self._files: list[_File] = []
        self._targets: list[Target] = []
        self._chosen: list[list[Block]] = []
        self._ranks: list[list[Block]] = []
        self._memories: list[Body] = []
        self._replanned = False
        self._planned: Outline | None = None
        self._offered: Offered | None = None
        self.refused = ""
        """Why servers cannot get at the ranks' memory."""
        self.unkept = ""
        """Why this push goes through a file although servers can get at the ranks' memory."""
        self._by_file = by_file and not ranks.apart
        self._unmapped = ""
        """Why servers could not map the ranks' memory: it is not offered again."""
        self.group = TrainerGroup(ranks.address.host)
        self._local = [machine == ranks.machines[0] for machine in ranks.machines]
        self._shared = False
        self.running = running_model(None)

    async def open(self) -> list[Target]:
        """Keep other trainers out; returns the tensors that the servers run, none if unknown.

        Raises:
            ConflictError: another trainer pushes into this fleet.
            FleetDownError: it does not run.
        """
        staging = await self._fleet.staging()
        self._shared = not staging.in_memory
        private_directory(staging.directory)
        path = staging.directory / _LOCK
        lock = FileLock(path, partial(create_private_file, path))
        self._stack.enter_context(lock)
        if not lock.take():
            raise ConflictError(
                f"another trainer is open on fleet {self._name}: {path} is locked",
                hint="close that (live.close()), or end its process",
            )
        self.running = await asyncio.to_thread(running_model, await self._fleet.model_path())
        return targets_of(self.running)

    async def runs_elsewhere(self) -> bool:
        """Whether servers run on other machines."""
        status = await self._fleet.status()
        return any(replica.node is not None for replica in status.replicas)

    def plan(self, given: Sequence[list[Block] | None]) -> Outline:
        """Which rank sends what, of the blocks that each has; None stands for those it had before.

        Raises:
            PreflightError: together these are no whole tensors.
        """
        ranks = [
            self._ranks[rank] if blocks is None else blocks for rank, blocks in enumerate(given)
        ]
        targets = described(ranks)
        if not targets:
            raise PreflightError("there are no weights to push: the ranks have no tensors")
        refuse_unlike(ranks, targets)
        if targets != self._targets:
            self._drop_files()
        self._replanned = self._replanned or ranks != self._ranks
        self._ranks, self._targets, self._chosen = ranks, targets, senders(ranks)
        shares = shares_of(self._chosen)
        total = sum(share.nbytes for share in shares)
        self._planned = Outline(
            "file",
            "each rank writes its blocks into a file in memory, which the servers read",
            len(targets),
            total,
            _FILES * total,
            shares,
        )
        return self._planned

    async def offer(self, memories: Sequence[Body]) -> Offered | None:
        """What servers copy out of the ranks' memory, from how each rank describes its own; None
        where they cannot, and `outline` says why. Call `plan` first if blocks have changed.
        """
        if self._unmapped:
            self.refused = self._unmapped
            return None
        unmoved = all("same" in memory for memory in memories)
        if self._offered is not None and unmoved and not self._replanned:
            return self._offered
        self.refused, self._replanned = "", False
        last, self._offered = self._offered, None
        before = self._memories or [{}] * len(memories)
        self._memories = [
            old if "same" in memory else memory
            for old, memory in zip(before, memories, strict=True)
        ]
        for rank, memory in enumerate(self._memories):
            if "exports" not in memory:
                self.refused = f"rank {rank}: {memory.get('reason', 'it offers nothing')}"
                return None
        pieces = [
            [piece_row(block, place) for block, place in zip(own, m["places"], strict=True)]
            for own, m in zip(self._ranks, self._memories, strict=True)
        ]
        exports = [memory["exports"] for memory in self._memories]
        try:
            pids = tuple(
                memory["pid"] if local else 0
                for memory, local in zip(self._memories, self._local, strict=True)
            )
            transport = self.transport
            if transport == GLOO and (targets := targets_of(self.running)):
                refuse_unlike(self._ranks, targets)
            offer = Offer(tuple(pieces), tuple(exports), pids, transport)
            if last is not None and last.key == offer.key:
                self._offered = last  # it lies elsewhere, and is sent as before
                return last
            self.group.drop()
            self._offered = await self._fleet.offer(offer)
            for memory in memories:  # its key names weights; servers may have other layouts now
                memory.pop("key", None)
        except PreflightError as error:
            self.refused = error.message
        return self._offered

    def outline(self) -> Outline:
        """The last plan by the way that was chosen."""
        planned = self._planned
        assert planned is not None
        if self._offered is None:
            return replace(planned, reason=f"{planned.reason} ({self.refused})")
        sent = [
            [row for layout in self._offered.sums for row in layout.rows[rank]]
            for rank in range(len(self._ranks))
        ]
        shares = tuple(
            RankShare(rank, len(rows), sum(row[2] * row[3] for row in rows))
            for rank, rows in enumerate(sent)
        )
        reason, transport = "servers copy out of the ranks' memory", self.transport
        if transport != IPC:
            machine = self._offered.machine
            because = f"servers run on {machine}" if machine else "it was asked for"
            if not all(self._local):
                because = "they are on several machines"
            reason = f"ranks send to the servers' workers point to point ({because})"
        return replace(
            planned,
            way=LIVE,
            transport=transport,
            reason=reason,
            memory_bytes=0,
            ranks=shares,
        )

    @property
    def transport(self) -> str:
        """How servers get at the ranks' memory."""
        return str(self._memories[0].get("transport", IPC)) if self._memories else IPC

    def meet(self, memories: Sequence[Body]) -> Body | None:
        """Where ranks and workers meet, and the layout of each worker; None if none have to."""
        if self._offered is None or self.transport == IPC:
            return None
        return self.group.meet(
            [memory.get("group", "") for memory in memories], self._offered, self.transport
        )

    def numbers(self, bodies: Sequence[Body]) -> dict[str, dict[str, int]]:
        """What parameters must hold, by layout and name, from what the ranks have summed."""
        from skyctl.live.sums import Partial, added

        assert self._offered is not None
        return {
            layout.layout: added(
                layout.parameters,
                [Partial.from_wire(body["partials"][layout.layout]) for body in bodies],
            )
            for layout in self._offered.sums
        }

    async def push_live(
        self,
        numbers: dict[str, dict[str, int]],
        request: PushRequest,
        on_event: Callable[[JobEvent], None],
        timeout_s: float | None,
    ) -> PushResult | None:
        """Push what was offered, all of whose parameters have these numbers. None: servers have
        changed since, and it must be offered again; or they cannot map it, and take a file.

        Raises as `Fleet.sync_weights`, but has ended then.
        """
        assert self._offered is not None
        group, succeeded = self.group, False
        push = PushLive(request, self._offered.key, numbers, group.wire, forms=not group.stands)
        try:
            result = push_result(await push_to_its_end(self._fleet, push, on_event, timeout_s))
            group.stands = succeeded = True
            away = self._offered.machine and not self._shared
            if request.keep:
                result.notes.append(
                    f"a server writes the fleet's copy of {result.version} now, and the next "
                    "push waits for it; see when it is whole: skyctl events"
                )
            elif away or len(result.servers) == 1:
                holder = result.servers[0].server
                holders = "servers of other machines have" if away else f"{holder} has"
                result.notes.append(
                    f"only {holders} {result.version}: one that restarts stays closed until the "
                    "next push; "
                    + ("set shared_dir" if away else "to keep it: skyctl weights save DIR")
                )
            return result
        except NotFoundError:
            self._offered = None
            return None
        except PreflightError as error:
            if isinstance(error, NotMapped) and self._by_file and request.transport != LIVE:
                self._unmapped = error.message
            elif CHANGED not in error.message:
                raise
            await self._withdraw()
            return None
        finally:
            if push.group is not None and not succeeded:
                await self._withdraw()  # no rank waits for a worker any more

    async def place(self) -> tuple[Path, list[Sent]]:
        """The file that ranks write next, and what each of them writes where.

        Raises:
            SkyctlError: there is no room for it.
        """
        staging = await swept(self._fleet)
        file = await asyncio.to_thread(self._free_file, staging)
        places = file.file.places
        sent = []
        for own, blocks in zip(self._ranks, self._chosen, strict=True):
            numbers = {block: number for number, block in enumerate(own)}
            sent.append([(numbers[block], places[block.tensor]) for block in blocks])
        return file.file.path, sent

    async def push(
        self,
        path: Path,
        request: PushRequest,
        on_event: Callable[[JobEvent], None],
        timeout_s: float | None,
    ) -> PushResult:
        """Push the file that all ranks have written. Raises as `Fleet.sync_weights`."""
        file = next(file for file in self._files if file.file.path == path)
        await asyncio.to_thread(file.file.finish)
        request = replace(request, checkpoint=file.checkpoint, ranks=len(self._ranks))
        job = await self._fleet.start_push(request)
        reached("rank.started")
        result = push_result(await self._fleet.wait_job(job, on_event, timeout_s))
        if self.unkept:
            result.notes.append(f"sent through a file, to be kept: {self.unkept}")
        elif self._unmapped:
            result.notes.append(f"sent through a file: {self._unmapped}")
        if result.checkpoint == request.checkpoint:
            result.notes.append(
                f"a server that restarts loads {result.version} from {result.checkpoint}, in "
                "memory, until the fleet has other weights or goes down"
            )
        return result

    async def close(self) -> None:
        """Servers let go of the ranks' memory; others may be trainers. Never raises."""
        try:
            await self._withdraw()
        finally:
            self._drop_files()
            self._stack.close()

    async def _withdraw(self) -> None:
        """Servers let go of the ranks' memory, or leave the group. Never raises."""
        self.group.drop()
        offered, self._offered = self._offered, None
        if offered is not None:
            with suppress(SkyctlError):
                await self._fleet.withdraw(Withdraw(offered.key))

    def _free_file(self, staging: Staging) -> _File:
        """A file that nothing reads, and that the fleet does not need: that of the version before
        the last, or a new one.
        """
        for file in self._files:
            needed = file.checkpoint in staging.needed
            if not needed and file.entry.claim(file.file.invalidate):
                return file
        while len(self._files) >= _FILES:  # what still needs them keeps them from being swept
            self._files.pop(0).close()
        total = sum(share.nbytes for share in shares_of(self._chosen))
        entry = staged_entry(staging.directory, needed_bytes=total, in_memory=staging.in_memory)
        try:
            file = _File(entry, lay_out(entry.path, self._targets, self.running.config))
        except BaseException:
            entry.close()
            raise
        self._files.append(file)
        return file

    def _drop_files(self) -> None:
        for file in self._files:
            file.close()
        self._files = []


def label_of(numbers: Mapping[str, Mapping[str, int]]) -> str:
    """A version's label that its content decides."""
    text = json.dumps(numbers, sort_keys=True)
    return f"{LIVE}@{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def refuse_not_finite(bodies: Sequence[Body]) -> None:
    """Raise PreflightError where a rank has summed what is not finite."""
    for rank, body in enumerate(bodies):
        if name := body["not_finite"]:
            raise PreflightError(
                f"rank {rank}: {name} holds NaN or infinity as it is sent",
                hint="look at the step before; scan_nan=False sends it all the same",
            )


def no_file(reason: str) -> PreflightError:
    """The error where ranks on several machines would need a file, for this reason."""
    return PreflightError(
        f"ranks on several machines do not write a file together ({reason})",
        hint="push a checkpoint that they save together",
    )

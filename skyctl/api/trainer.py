"""`Fleet.trainer`: the ranks of a training job push their weights from where they lie.

every rank     read the model ─┐         ┌─ sum the blocks, or write them ─┐
rank 0         gather, plan ◄──┘ answer ─┘                           push ◄──┘ answer: the result
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from skyctl.api.live import FleetSide, label_of, no_file, refuse_not_finite
from skyctl.checkpoints.live import in_thread
from skyctl.errors import PreflightError, UsageError
from skyctl.kill_points import reached
from skyctl.live.blocks import Block, Target
from skyctl.live.file import Window
from skyctl.live.model import Pair, addresses, dtype_name, lie_in, read_pairs
from skyctl.live.offer import IPC, Offered
from skyctl.live.options import TrainerOptions, transport_of
from skyctl.live.outline import Outline
from skyctl.live.ranks import Body, Decide, Ranks, Step, failure_body
from skyctl.push.request import PushRequest, PushResult, usual_mode
from skyctl.push.trial_file import trial_content
from skyctl.states import LIVE, PauseMode
from skyctl.store.journal import JobEvent

if TYPE_CHECKING:
    from skyctl.api.session import SessionHolder
    from skyctl.live.memory import RankMemory

_SENT_TIMEOUT_S = 10.0
"""What servers have received was sent: it takes no time to learn of it."""
_ATTEMPTS = 3
"""How often weights are offered again because servers have changed meanwhile."""


class Trainer:
    """The ranks of one training job, connected to a fleet; made by `Fleet.trainer`.

    Every rank calls the same methods in the same order. A push that fails raises the same error on
    every rank, and the next may follow.
    """

    def __init__(self, holder: SessionHolder, ranks: Ranks, options: TrainerOptions) -> None:
        self._holder = holder
        self._ranks = ranks
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(ranks.close)
        self._side: FleetSide | None = None
        self._options = options
        self._dtype = dtype_name(options.dtype)
        self._targets: list[Target] = []
        self._blocks: list[Block] | None = None
        self._sent: list[tuple[int, int]] = []
        self._windows: dict[str, Window] = {}
        self._memory: RankMemory | None = None
        self._elsewhere = False
        self._addresses: list[Any] | None = None
        self._round = 0
        self._outline: Outline | None = None

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """How many ranks push together."""
        return self._ranks.world_size

    def plan(self) -> Outline:
        """What each rank sends in a push, and how; `to_json()` for a program."""
        assert self._outline is not None  # `_open` has made it
        return self._outline

    async def push(
        self,
        version: str,
        *,
        pause_mode: PauseMode | None = None,
        verify: bool | None = None,
        scan_nan: bool = True,
        trial: Mapping[str, Any] | str | PathLike[str] | None = None,
        rolling: int = 0,
        keep: bool = False,
        transport: str = "auto",
        stage: Literal["auto", "gpu", "stream"] = "auto",
        on_event: Callable[[JobEvent], None] = lambda event: None,
        timeout_s: float | None = None,
    ) -> PushResult:
        """Push the weights as they are now, on every rank at once; returns the result on each.

        Where servers reach the ranks' GPUs, they copy out of them, cast to their own dtype, and
        every byte is compared with what the ranks have; no file has the weights then. Elsewhere
        the ranks write their parts into a file in memory, which servers read. The fleet is frozen
        meanwhile, or for the end of it. The weights may change once this returns.

        Args:
            version: label of the new weights, the same on every rank; "" derives it from them.
            scan_nan: refuse NaN and infinity before anything is paused.
            keep: the fleet makes its own copy on disk; `Fleet.kept_weights` lists these. Of weights
                that servers copied, a server writes it after the push, and the next push waits;
                where none could, the weights go through a file.
            transport: "live" has servers copy out of the ranks' GPUs; others are how they take the
                file. "auto" takes the first that works; on CPU each server reads by itself.
            stage: whether servers copy beside their parameters before they freeze ("gpu"), straight
                into these ("stream"), or as fits.
            pause_mode, verify, trial, rolling, on_event, timeout_s: as of `Fleet.sync_weights`.

        Raises:
            PreflightError: refused; nothing was paused. The message names rank and tensor.
            RankFailed: a rank died, or did not come; nothing was paused.
            ConflictError: another push is in progress.
            PushError: it failed midway; `details["servers"]` says how each server was left.
            DeadlineExceeded: it is late. By a file it goes on, else it was cancelled and has ended.
        """
        reached("rank.begun")
        mode = pause_mode or usual_mode(leaves_router=trial is not None or rolling > 0)
        request = PushRequest(
            checkpoint="",
            transport=transport,
            weight_version=version or None,
            pause_mode=mode,
            verify=verify,
            scan_nan=False,  # the ranks do it
            trial=trial_content(trial),
            keep=keep,
            rolling=rolling,
            stage=stage,
        )

        async def send(bodies: list[Body]) -> list[Body]:
            if scan_nan:
                refuse_not_finite(bodies)
            side = self._fleet_side
            if "partials" in bodies[0]:
                numbers = await asyncio.to_thread(side.numbers, bodies)
                labelled = replace(request, weight_version=version or label_of(numbers))
                result = await side.push_live(numbers, labelled, on_event, timeout_s)
            else:
                path = Path(bodies[0]["path"])
                result = await side.push(path, request, on_event, timeout_s)
            return [{"result": result and result.to_json()}] * self.world_size

        for _ in range(_ATTEMPTS):
            result = await self._attempt(request, send, scan=scan_nan)
            if result is not None:
                return PushResult.from_json(result)
        raise PreflightError("the fleet's servers change as fast as they are offered weights")

    async def _attempt(
        self, request: PushRequest, send: Decide, *, scan: bool
    ) -> dict[str, Any] | None:
        """One round; None if servers had changed, and it must be repeated."""
        self._round += 1
        version, live = request.weight_version or "", request.transport in ("auto", LIVE)
        subject = f"push {version}"
        pairs: list[Pair] = []

        def read_own() -> Body:
            body = {"version": version, **self._described(pairs, live=live)}
            reached("rank.read")
            return body

        def send_own() -> Body:
            reached("rank.placed")
            if "key" in answer:
                body = self._summed(answer)
            else:
                self._sent = [(int(number), int(offset)) for number, offset in answer["sent"]]
                body = self._write(answer["path"], pairs or self._read(), scan=scan)
            reached("rank.written")
            return body

        answer = await self._exchange("gather", subject, read_own, partial(self._place, request))
        if "plan" in answer:
            self._outline = Outline.from_json(answer["plan"])
        made = await self._exchange("write", subject, send_own, send, lends="key" in answer)
        reached("rank.answered")
        result: dict[str, Any] | None = made["result"]
        if self._memory is not None and "group" in answer:
            if result is None:
                self._memory.leave_group()
            else:
                await asyncio.to_thread(self._memory.sent, _SENT_TIMEOUT_S)
        return result

    async def close(self) -> None:
        """Leave the fleet to other trainers. What it runs stays in memory for its servers, until it
        has other weights or goes down. A second call does nothing.
        """
        self._windows = {}
        if self._memory is not None:
            self._memory.leave_group()
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _open(self) -> None:
        """The first round: what the servers run, what the ranks have, and the plan. Where servers
        copy out of GPUs, ranks sum once: kernels are compiled.
        """
        if self._ranks.apart and self._options.transport == IPC:
            raise PreflightError(
                "transport ipc: the ranks are on several machines",
                hint='transport="auto" takes nccl, or gloo on CPUs',
            )
        subject = "the start of the trainer"

        async def look_up(_: list[Body]) -> list[Body]:
            # no generator: the loop would close it with others at the end of a program
            await self._stack.enter_async_context(self._holder)
            fleet = await self._holder._current().connected()
            by_file = self._options.transport == "auto"
            self._side = FleetSide(fleet, self._holder._ref.name, self._ranks, by_file=by_file)
            self._stack.push_async_callback(self._side.close)
            self._ranks.when_lost = self._side.group.drop
            targets = [target.to_wire() for target in await self._side.open()]
            elsewhere = await self._side.runs_elsewhere()
            return [{"targets": targets, "elsewhere": elsewhere}] * self.world_size

        async def plan(bodies: list[Body]) -> list[Body]:
            return (await self._offered(bodies))[0]

        answer = await self._exchange("gather", subject, dict, look_up)
        self._targets = [Target.from_wire(row) for row in answer["targets"]]
        self._elsewhere = bool(answer["elsewhere"]) or self._ranks.apart
        pairs: list[Pair] = []  # what is described lives until it is summed
        describe = partial(self._described, pairs, live=True)
        answer = await self._exchange("write", subject, describe, plan)
        self._outline = Outline.from_json(answer["plan"])
        if "key" in answer:
            await asyncio.to_thread(self._summed, answer)

    @property
    def _fleet_side(self) -> FleetSide:
        """On rank 0 only."""
        assert self._side is not None
        return self._side

    async def _exchange(
        self,
        name: str,
        subject: str,
        make: Callable[[], Body],
        decide: Decide,
        *,
        lends: bool = False,
    ) -> Body:
        """Rank 0's answer to what `make` returns, in a thread; it fails every rank if it fails."""
        step = Step(self._round, name, subject, self._options.patience_s, lends)
        try:
            return await self._ranks.exchange(step, await self._body(step, make), decide)
        except BaseException:
            # rank 0 may know others: it is given all of them next time
            self._blocks = self._addresses = None
            if self._memory is not None:
                self._memory.forget()
            if self._side is not None:
                self._side.group.drop()
            raise

    async def _body(self, step: Step, make: Callable[[], Body]) -> Body:
        try:
            return await in_thread(make)
        except Exception as error:
            return failure_body(error)
        except BaseException as error:
            self._ranks.fail(step, error)
            raise

    def _read(self) -> list[Pair]:
        options = self._options
        return read_pairs(options.weights, self._targets, names=options.names, dtype=self._dtype)

    def _described(self, pairs: list[Pair], *, live: bool) -> Body:
        """The blocks of this rank, unless rank 0 knows them, and with `live` what it offers out of
        its memory. Fills `pairs`, unless these are where they were when they were offered.
        """
        now = addresses(self._options.weights) if live else None
        memory = self._memory
        if memory is not None and now is not None and now == self._addresses and not memory.freed:
            return {"blocks": None, "memory": memory.unchanged()}
        pairs += self._read()
        blocks = [block for block, _ in pairs]
        body: Body = {"blocks": None}
        if blocks != self._blocks:
            body["blocks"] = [block.to_wire() for block in blocks]
        self._blocks, self._addresses = blocks, None
        if live and (
            transport := transport_of(self._options.transport, pairs, elsewhere=self._elsewhere)
        ):
            from skyctl.live.memory import RankMemory

            self._memory = self._memory or RankMemory(transport)
            body["memory"] = self._memory.describe(pairs)
            if now and "reason" not in body["memory"] and lie_in(pairs, self._options.weights):
                self._addresses = now
        return body

    def _summed(self, answer: Body) -> Body:
        """What this rank contributes to the numbers that servers must have; where ranks send, it
        begins to.
        """
        assert self._memory is not None
        if "sums" in answer:
            self._memory.prepare(answer["key"], answer["sums"])
        summed = self._memory.sum()
        if "group" in answer:
            store = self._side.group.store if self._side is not None else None
            self._memory.send(self.rank, answer["group"], store)
        return summed

    def _write(self, path: str, pairs: list[Pair], *, scan: bool) -> Body:
        """Write what this rank sends, where it goes in the file."""
        window = self._windows.pop(path, None) or Window(Path(path))
        self._windows = {**dict(list(self._windows.items())[-1:]), path: window}
        rows = [(pairs[number][0], offset, pairs[number][1]) for number, offset in self._sent]
        return {"path": path, "not_finite": window.write(rows, scan=scan)}

    async def _place(self, request: PushRequest, bodies: list[Body]) -> list[Body]:
        """Which file is written, and by whom where if that has changed. On rank 0 only."""
        first, *versions = (body["version"] for body in bodies)
        for rank, version in enumerate(versions, 1):
            if version != first:
                raise UsageError(f"rank {rank} pushes {version}, and rank 0 {first}")
        answers, offered = await self._offered(bodies)
        side = self._fleet_side
        side.unkept = offered.unkept if offered is not None and request.keep else ""
        if request.transport == LIVE and (side.unkept or offered is None):
            reason = side.unkept or side.refused or "the weights are not in a GPU's memory"
            raise PreflightError(reason, hint='transport="auto" takes a file where needed')
        if self._ranks.apart and (side.unkept or offered is None):
            raise no_file(side.unkept or f"transport {request.transport}")
        if side.unkept:  # the file is what the fleet copies
            answers = [{"plan": a["plan"]} if "plan" in a else {} for a in answers]
            offered = None
        if offered is not None:
            if (group := side.meet([body["memory"] for body in bodies])) is not None:
                answers = [answer | {"group": group} for answer in answers]
        else:
            path, sent = await side.place()
            for answer, rows in zip(answers, sent, strict=True):
                answer.update(path=str(path), sent=rows)
        return answers

    async def _offered(self, bodies: list[Body]) -> tuple[list[Body], Offered | None]:
        """The plan for each rank, with what it is to sum if servers copy out of its memory. On rank
        0 only.
        """
        side = self._fleet_side
        given = [body["blocks"] for body in bodies]
        if all(rows is None for rows in given):
            outline = self.plan()
        else:
            outline = side.plan([rows and [*map(Block.from_wire, rows)] for rows in given])
        offered = None
        if all("memory" in body for body in bodies):
            offered = await side.offer([body["memory"] for body in bodies])
            if offered is None and self._ranks.apart:
                raise no_file(side.refused)
            if offered is None and self._options.transport != "auto":
                raise PreflightError(
                    f"transport {self._options.transport}: {side.refused}",
                    hint='transport="auto" takes a file where needed',
                )
            if offered is not None and all(b["memory"].get("key") == offered.key for b in bodies):
                return [{"key": offered.key} for _ in bodies], offered
            outline = side.outline()
        plan = outline.to_json()
        if offered is None:
            return [{"plan": plan} for _ in bodies], None
        answers: list[Body] = [{"key": offered.key} for _ in bodies]
        for rank, answer in enumerate(answers):
            if bodies[rank]["memory"].get("key") != offered.key:
                answer |= {"sums": offered.rows(rank), "plan": plan}
        return answers, offered


async def open_trainer(holder: SessionHolder, ranks: Ranks, options: TrainerOptions) -> Trainer:
    """The trainer of ranks that have met. Raises as `Fleet.trainer`."""
    trainer = Trainer(holder, ranks, options)
    try:
        await trainer._open()
    except BaseException:
        await trainer.close()
        raise
    return trainer

"""`Fleet`: one fleet of vLLM servers, with the verbs of the command line."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

from skyctl.api.results import VerbResult
from skyctl.api.session import GeneratingFleet
from skyctl.api.updates import Adapters, Update, push_tensors, updating
from skyctl.checkpoints.checkpoint import absolute
from skyctl.checkpoints.live import NamedTensors
from skyctl.core.registry import FleetRef, find, select, supervisor_running
from skyctl.core.results import KeptVersion, WeightsState
from skyctl.core.service import (
    Control,
    Down,
    Forget,
    Pause,
    Restart,
    Resume,
    Scale,
    Sleep,
    TakenDown,
    Wake,
)
from skyctl.core.status import FleetStatus
from skyctl.core.urls import FleetUrls
from skyctl.engines.base import PauseMode
from skyctl.errors import UsageError
from skyctl.push.canary import parse_canary, read_canary
from skyctl.push.forecast import Stage
from skyctl.push.request import Layout, PushRequest, PushResult, usual_mode
from skyctl.push.verify import Verification
from skyctl.service import bring_up
from skyctl.service.bring_down import take_down
from skyctl.service.ended import operation_error, push_result
from skyctl.store.journal import JobEvent
from skyctl.store.state import TRAINER


class Fleet(GeneratingFleet):
    """One fleet, by its file or its name.

        async with Fleet.load("fleet.yaml") as fleet:
            before = await fleet.generate(["Once upon a time"], temperature=0)
            await fleet.sync_weights(model.state_dict(), weight_version="step-1")

    Inside `async with` the calls of one event loop share connections; outside it, each call opens
    and closes its own. The object itself holds none: it can be pickled, and used in any number of
    event loops, one after another or in several threads at once.

    Methods raise the errors of `skyctl.errors`; times are in seconds. What a call began in the
    supervisor (`up`, `restart`, `scale`, a push) goes on if the call is cancelled or times out.
    """

    @classmethod
    def load(cls, file: str | PathLike[str] | None = None) -> Self:
        """The fleet of a fleet file; without one, the fleet that a command here would act on.

        Raises:
            FleetFileError: the file is missing or wrong.
            NotFoundError, UsageError: without a file, no fleet or several could be meant.
        """
        return cls(select(None if file is None else Path(file), None))

    @classmethod
    def named(cls, name: str) -> Self:
        """A fleet that was started or attached to before, from any directory; or one on another
        machine, by its supervisor's URL (`SKYCTL_TOKEN_FILE`, `SKYCTL_CA`: docs/how-to/remote.md).

        Raises:
            NotFoundError: there is none of that name.
        """
        return cls(find(None, name))

    @property
    def name(self) -> str:
        return self._ref.name

    def __repr__(self) -> str:
        return f"<skyctl.Fleet {self.name!r}>"

    # --- the fleet ---------------------------------------------------------------------------

    async def status(self) -> FleetStatus:
        """Every replica and the router, and a verdict with reasons; also if the fleet is down."""
        async with self._connected() as fleet:
            return await fleet.status()

    async def up(
        self,
        *,
        router: bool = True,
        timeout_s: float | None = None,
        on_status: Callable[[FleetStatus], None] = lambda status: None,
    ) -> FleetStatus:
        """Start the fleet, or bring a running one to its file; returns when it is ready.

        Raises:
            UsageError: the plan has problems, or the fleet is attached; nothing was started.
            ConflictError: the supervisor is busy with something else.
            SkyctlError: a replica or the router did not come up; `details["logs"]` says why.
            DeadlineExceeded: it is not ready after `timeout_s`.
        """
        begun = await bring_up.begin_up(self._local_ref(), router=router)
        return await self._ended(begun.operation, timeout_s, on_status)

    async def down(self, *, drain_timeout_s: float | None = None) -> TakenDown:
        """Drain the fleet and stop all of it. May be repeated.

        Raises:
            UsageError: the fleet is attached. SkyctlError: something could not be stopped.
        """
        if not isinstance(self._ref, FleetRef):
            async with self._connected() as fleet:
                return await fleet.down(Down(drain_timeout_s))
        if not supervisor_running(self._ref.paths):
            bring_up.refuse_attached(self._ref)
        config = self._ref.config
        taken = await take_down(
            self._ref.paths,
            drain_timeout_s=config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s,
            stop_timeout_s=config.stop_timeout_s,
        )
        async with self._session() as session:
            session.forget_endpoints()
        return taken

    async def restart(
        self, servers: Sequence[str] = (), *, timeout_s: float | None = None
    ) -> FleetStatus:
        """Restart these servers (all if empty) one after the other; the rest keep serving."""
        async with self._connected() as fleet:
            operation = await fleet.restart(Restart(tuple(servers)))
        return await self._ended(operation, timeout_s)

    async def scale(self, replicas: int, *, timeout_s: float | None = None) -> FleetStatus:
        """Run this many replicas; new ones take the fleet's weights before they are routed to."""
        async with self._connected() as fleet:
            operation = await fleet.scale(Scale(replicas))
        return await self._ended(operation, timeout_s)

    async def urls(self) -> FleetUrls:
        """Where requests go: the router's URL, every server's, and the model's name."""
        async with self._connected() as fleet:
            return await fleet.urls()

    # --- freeze and thaw ---------------------------------------------------------------------

    async def pause(
        self,
        mode: PauseMode = "abort",
        *,
        clear_cache: bool = True,
        servers: Sequence[str] | None = None,
        keep_partial: bool = False,
        timeout_s: float | None = None,
        check: bool = True,
    ) -> VerbResult:
        """Stop generation on every server at once, or on those named.

        Running requests are aborted ("abort"), waited for ("wait") or frozen until resume ("keep").
        If some servers cannot be paused the others are resumed, unless `keep_partial`. `timeout_s`
        bounds each server's call.

        Raises:
            PartialFailure, ServerError: with `check`, if a server failed; see VerbResult.check.
        """
        request = Pause(
            mode=mode,
            clear_cache=clear_cache,
            keep_partial=keep_partial,
            servers=tuple(servers or ()),
            timeout_s=timeout_s,
        )
        return await self._control(request, check)

    async def resume(
        self,
        *,
        servers: Sequence[str] | None = None,
        timeout_s: float | None = None,
        check: bool = True,
    ) -> VerbResult:
        """Let every server generate again. Raises as `pause`."""
        request = Resume(servers=tuple(servers or ()), timeout_s=timeout_s)
        return await self._control(request, check)

    async def sleep(
        self,
        level: int = 1,
        *,
        servers: Sequence[str] | None = None,
        timeout_s: float | None = None,
        check: bool = True,
    ) -> VerbResult:
        """Free the servers' memory: level 1 keeps the weights in host memory, level 2 discards them
        (push weights after waking). Raises as `pause`.
        """
        request = Sleep(level=level, servers=tuple(servers or ()), timeout_s=timeout_s)
        return await self._control(request, check)

    async def wake(
        self,
        tags: Sequence[str] = (),
        *,
        servers: Sequence[str] | None = None,
        timeout_s: float | None = None,
        check: bool = True,
    ) -> VerbResult:
        """Take memory back: all of it, or only `tags` (weights, kv_cache). Raises as `pause`.

        Raises:
            ConflictError: a server would serve weights that its sleep discarded.
        """
        request = Wake(tags=tuple(tags), servers=tuple(servers or ()), timeout_s=timeout_s)
        return await self._control(request, check)

    # --- adapters ----------------------------------------------------------------------------

    @property
    def adapters(self) -> Adapters:
        """The fleet's LoRA adapters: load, sync, unload, list."""
        return Adapters(self)

    # --- weights -----------------------------------------------------------------------------

    async def sync_weights(
        self,
        source: str | PathLike[str] | NamedTensors,
        *,
        weight_version: str | None = None,
        dtype: object = None,
        transport: str = "auto",
        chunk_size: int | None = None,
        stage: Stage = "auto",
        stage_rate: int | None = None,
        layout: Layout = "auto",
        pause_mode: PauseMode | None = None,
        verify: bool = True,
        dry_run: bool = False,
        scan_nan: bool | None = None,
        allow_unproven_reload: bool = False,
        allow_config: Sequence[str] = (),
        canary: Mapping[str, Any] | str | PathLike[str] | None = None,
        keep: bool = False,
        rolling: int = 0,
        colocated: bool = False,
        sleep_after: int = 0,
        on_event: Callable[[JobEvent], None] = lambda event: None,
        timeout_s: float | None = None,
    ) -> PushResult:
        """Push weights into every server while it runs: all end verified at one version.

        `source` is a checkpoint directory, or what a trainer has in memory after its optimizer
        step: a state dict, or an iterator, plain or async, of (name, tensor). Names, shapes and
        dtypes must be those of the Hugging Face checkpoint the servers run; sharded tensors are
        gathered by the caller (on one rank: `(name, tensor.full_tensor())`).

        Tensors are taken one by one: copied to host memory, written to a private directory, and
        pushed from there once all have been checked, so the servers keep running until then. That
        costs one copy of each tensor off its device and one write, and the size of the model in
        /dev/shm if it fits (twice that during the push), else on the disk of the state directory.
        The fleet keeps them until other weights replace them or it goes down, because a replica
        that restarts is given the same weights. The tensors may change again as soon as the
        iterator has been read, and at the latest when this returns. Dead processes leave nothing:
        what they wrote is swept by the fleet's next push, `up` or `down`.

        Args:
            weight_version: label of the new weights; derived from their digest when None.
            dtype: for tensors only. None refuses tensors of another dtype than what runs; "match"
                converts each to that; a torch dtype (or its name) converts all floating-point
                tensors; "as-is" leaves it to the servers to cast.
            chunk_size: bytes per chunk; None takes the fleet's.
            stage: where the checkpoint is before servers are frozen: "gpu", "host" or "stream".
            stage_rate: bytes per second that are read at most while servers serve; None takes the
                fleet's.
            layout: "runtime" copies tensors straight into parameters, "checkpoint" passes them to
                vLLM's loader; "auto" copies where a server has seen it proven.
            pause_mode: what becomes of running requests; "keep" when None, "wait" with a canary.
            scan_nan: refuse NaN and infinity: True reads the whole checkpoint first, False checks
                nothing, None checks what is sent.
            allow_unproven_reload: accept weights that get another digest than expected.
            allow_config: keys of config.json in which the checkpoint may differ from what the
                servers run; they keep computing by theirs.
            canary: prompts that the new weights must answer as expected before users get them, as
                the path or the content of a canary file (docs/how-to/careful-pushes.md).
            rolling: update this many servers at a time, out of the router, while the others serve.
            colocated: sleeping servers are woken for it, weights first; asleep again on failure.
            sleep_after: level to sleep at afterwards; 0 is none.
            keep: make the fleet's own copy first, and push that; `kept_weights` lists the copies.
            on_event: receives the push's stages, progress and notes as they happen.
            timeout_s: bounds the wait for the push, from when the tensors are written.

        Raises:
            PreflightError, NotFoundError, UsageError: refused; nothing was paused.
            ConflictError: another push is in progress.
            CanaryFailed: the new weights were not accepted; `details["canary"]` has the answers.
            PushError: it failed midway; `details["servers"]` says how each server was left.
            DeadlineExceeded: it has not ended after `timeout_s`; it goes on.
        """
        request = PushRequest(
            checkpoint="",
            transport=transport,
            chunk_size=chunk_size,
            stage=stage,
            stage_rate=stage_rate,
            layout=layout,
            weight_version=weight_version,
            pause_mode=pause_mode or usual_mode(leaves_router=canary is not None or rolling > 0),
            verify=verify,
            dry_run=dry_run,
            scan_nan=scan_nan,
            allow_unproven_reload=allow_unproven_reload,
            allow_config=tuple(allow_config),
            canary=_canary(canary),
            keep=keep,
            rolling=rolling,
            colocated=colocated,
            sleep_after=sleep_after,
        )
        async with self._connected() as fleet:
            if isinstance(source, str | PathLike):
                request = replace(request, checkpoint=self._path(source))
                job = await fleet.wait_job(await fleet.start_push(request), on_event, timeout_s)
            else:
                job = await push_tensors(
                    fleet, source, request, dtype=dtype, on_event=on_event, timeout_s=timeout_s
                )
        return push_result(job)

    @asynccontextmanager
    async def update(
        self,
        version: str,
        *,
        checkpoint: str | PathLike[str] | None = None,
        digest: str | None = None,
        pause_mode: PauseMode = "keep",
        verify: bool = True,
        on_event: Callable[[JobEvent], None] = lambda event: None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Update]:
        """Freeze the fleet while this process sends weights with an engine of its own.

            async with fleet.update("step-12") as update:
                for server in update.servers: ...  # init, start, update and finish, as it does

        The block is entered when all servers are frozen. When it is left, sessions that are still
        open are finished, caches dropped, the servers' weights compared, labelled with `version`
        and resumed; the outcome is in `update.result`. If the block raises, servers that were not
        written to go on at their old weights, and the others are quarantined, as after a push that
        broke off.

        Args:
            checkpoint: the same weights on disk: servers are compared with it, and a server that
                restarts gets them. Without it servers are only compared with each other, and a
                server that restarts stays closed until the next push or update; unchanged weights
                count as a failure, too.
            digest: the digest that each server's weights must have (`weights_digest` of an earlier
                push).
            pause_mode: what becomes of running requests.
            verify: whether to compare at all.
            timeout_s: for the block; None takes `weight_transfer.update_timeout_s`.

        Raises:
            UsageError: a `digest` without `verify`, or no time to send in.
            PreflightError: refused; nothing was paused. ConflictError: another command acts.
            PushError: `details["servers"]` says how each server was left.
        """
        if digest is not None and not verify:
            raise UsageError(
                "a digest is compared as weights are verified, and verify is False",
                hint="leave one of the two out",
            )
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            # once the servers are frozen it could only quarantine them
            raise UsageError(
                f"timeout_s={timeout_s} leaves the trainer no time to send in, or no end of it",
                hint="leave it out for weight_transfer.update_timeout_s",
            )
        request = PushRequest(
            checkpoint="" if checkpoint is None else self._path(checkpoint),
            transport=TRAINER,
            weight_version=version,
            pause_mode=pause_mode,
            verify=verify,
            weights_digest=digest,
        )
        async with (
            self._connected() as fleet,
            updating(fleet, request, on_event=on_event, timeout_s=timeout_s) as update,
        ):
            yield update

    async def model_path(self) -> str | None:
        """Directory or hub id of what the servers run now: what a trainer can start from.

        None if an attached fleet does not say, or after an update whose weights are in no file.
        """
        async with self._connected() as fleet:
            rows = (await fleet.weights()).servers
            if any(row.weight_version is not None and not row.checkpoint for row in rows):
                return None
            return await fleet.model_path()

    async def weights(self) -> WeightsState:
        """What each server carries, and the history of pushes."""
        async with self._connected() as fleet:
            return await fleet.weights()

    async def kept_weights(self) -> list[KeptVersion]:
        """The versions of which the fleet keeps its own copy, newest first."""
        async with self._connected() as fleet:
            return list(await fleet.kept_versions())

    async def forget_weights(self, version: str) -> int:
        """Delete the fleet's own copy of a version; returns the bytes of weights in it.

        Raises:
            NotFoundError: it is not kept. ConflictError: the fleet runs it.
        """
        async with self._connected() as fleet:
            return await fleet.forget_version(Forget(version))

    async def verify_weights(self) -> Verification:
        """Compare what the servers hold now, byte for byte."""
        async with self._connected() as fleet:
            return await fleet.verify_weights()

    # --- internals -----------------------------------------------------------------------------

    async def _control(self, request: Control, check: bool) -> VerbResult:
        async with self._connected() as fleet:
            result = VerbResult(request.verb, await fleet.control(request))
        if check:
            result.check()
        return result

    def _path(self, checkpoint: str | PathLike[str]) -> str:
        """Absolute for a fleet on this machine; for another, a path on the fleet's machine."""
        return absolute(str(checkpoint)) if isinstance(self._ref, FleetRef) else str(checkpoint)

    def _local_ref(self) -> FleetRef:
        """The fleet, which must be on this machine."""
        if isinstance(self._ref, FleetRef):
            return self._ref
        raise UsageError(f"up works on the fleet's own machine, and not on {self._ref.name}")

    async def _ended(
        self,
        operation: int,
        timeout_s: float | None,
        on_status: Callable[[FleetStatus], None] = lambda status: None,
    ) -> FleetStatus:
        """The fleet's status once an operation has succeeded; 0 is one that had nothing to do."""
        if operation == 0:
            return await self.status()
        async with self._session() as session:
            fleet = await session.connected()
            status = await bring_up.follow_operation(
                fleet, operation, on_status, timeout_s=timeout_s
            )
            session.forget_endpoints()
            error = await operation_error(fleet, status)
        if error is not None:
            raise error
        return status


def _canary(given: Mapping[str, Any] | str | PathLike[str] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return parse_canary(given).model_dump(mode="json", exclude_none=True)
    return read_canary(Path(given))

"""`Fleet`: one fleet of vLLM servers, with the verbs of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Self

from skyctl.api.results import VerbResult
from skyctl.api.session import GeneratingFleet
from skyctl.api.updates import Adapters
from skyctl.api.weights import WeightsFleet
from skyctl.core.registry import FleetRef, find, refuse_another_file, select, supervisor_running
from skyctl.core.requests import (
    Control,
    Down,
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
from skyctl.errors import DeadlineExceeded, SkyctlError, UsageError
from skyctl.service import bring_up
from skyctl.service.bring_down import take_down
from skyctl.service.ended import operation_error
from skyctl.service.switching import Switched, asleep_for, switch
from skyctl.states import PauseMode


class Fleet(WeightsFleet, GeneratingFleet):
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
        return cls(select(None if file is None else [Path(file)], None))

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
            ConflictError: the supervisor is busy with something else; or the fleet runs from
                another file of its name.
            SkyctlError: a replica or the router did not come up; `details["logs"]` says why.
            DeadlineExceeded: it is not ready after `timeout_s`.
        """
        ref, fresh = self._local_ref("up"), True
        refuse_another_file(ref)
        try:
            begun = await bring_up.begin_up(ref, router=router)
            fresh = begun.fresh
            return await self._ended(begun.operation, timeout_s, on_status)
        except SkyctlError as error:
            if fresh and not isinstance(error, DeadlineExceeded):
                error.hint = "; ".join(filter(None, (error.hint, asleep_for(ref))))
            raise

    async def down(self, *, drain_timeout_s: float | None = None) -> TakenDown:
        """Drain the fleet and stop all of it. May be repeated.

        Raises:
            UsageError: the fleet is attached. ConflictError: it runs from another file of its name.
            SkyctlError: something could not be stopped.
        """
        if not isinstance(self._ref, FleetRef):
            async with self._connected() as fleet:
                return await fleet.down(Down(drain_timeout_s))
        refuse_another_file(self._ref)
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

    async def switch(self, *, timeout_s: float | None = None) -> Switched:
        """Of the fleets that share their GPUs (`sleep_group`), put the one that is awake to sleep
        once its requests have ended, and wake this one.

        Raises:
            UsageError: it is in no group. FleetDownError: it is down.
            ConflictError: the fleet that is awake is busy, or another switch is under way.
            SkyctlError: a server does not sleep, or does not wake.
        """
        return await switch(self._local_ref("switch"), timeout_s=timeout_s)

    # --- adapters ----------------------------------------------------------------------------

    @property
    def adapters(self) -> Adapters:
        """The fleet's LoRA adapters: load, sync, unload, list."""
        return Adapters(self)

    # --- internals -----------------------------------------------------------------------------

    async def _control(self, request: Control, check: bool) -> VerbResult:
        async with self._connected() as fleet:
            result = VerbResult(request.verb, await fleet.control(request))
        if check:
            result.check()
        return result

    def _local_ref(self, verb: str) -> FleetRef:
        """The fleet, which must be on this machine."""
        if isinstance(self._ref, FleetRef):
            return self._ref
        raise UsageError(f"{verb} works on the fleet's own machine, and not on {self._ref.name}")

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

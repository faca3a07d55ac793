"""Rehearses a fleet's next push as soon as all its servers are up (`push/rehearsal.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from skyctl.core.arbiter import Act
from skyctl.core.expectations import informed, remember
from skyctl.errors import ConflictError, SkyctlError
from skyctl.push.request import PushRequest
from skyctl.store.expected import Learned
from skyctl.store.in_doubt import in_doubt
from skyctl.supervisor import admission
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.replica import Replica
from skyctl.transfer.sender_pool import SenderPool

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 15.0
_RUNS_NO_MORE = ("dead", "failed", "stopped")


class Warming:
    """Runs a rehearsal when it is due, in a task of its own, which whoever needs the servers or the
    sender stops. Servers that took part are not asked again while their processes live."""

    def __init__(self, running: RunningFleet, senders: SenderPool) -> None:
        self._running = running
        self._senders = senders
        self._task: asyncio.Task[None] | None = None
        self._rehearsed: set[str] = set()

    def look(self) -> None:
        """Begin one if it is due: every server that should be up is, and nothing else is done."""
        if (self._task is None or self._task.done()) and (replicas := self._due()):
            self._rehearsed = {replica.instance for replica in replicas}
            self._task = asyncio.create_task(self._rehearse(replicas), name="rehearsal")

    async def stop(self) -> None:
        """End one that is under way; it is due again afterwards. The caller has its turn, or is an
        operation, so that none begins meanwhile."""
        if self._task is not None and not self._task.done():
            self._rehearsed = set()
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_STOP_TIMEOUT_S)

    def _due(self) -> list[Replica]:
        running = self._running
        plan, operation = running.plan, running.operation
        if plan is None or not plan.config.warms or running.draining or running.push_job:
            return []
        if operation is not None and operation.ended_at is None:
            return []
        replicas = [r for r in running.replicas.values() if r.phase not in _RUNS_NO_MORE]
        if {replica.instance for replica in replicas} <= self._rehearsed:
            return []
        if not all(replica.state in ("ready", "paused") for replica in replicas):
            return []
        if plan.device == "cpu" and running.state.weights().checkpoint is not None:
            return []  # a push into CPU servers leaves nothing that the next one would not have
        try:
            running.arbiter.take(Act.VERB, "a look").release()
        except ConflictError:
            return []
        return replicas

    async def _rehearse(self, replicas: Sequence[Replica]) -> None:
        running = self._running
        state, plan = running.state, running.require_plan()
        instances = {replica.name: replica.instance for replica in replicas}
        weights = admission.committed(plan, state.weights())
        if weights is None or weights.checkpoint is None or in_doubt(state):
            return
        from skyctl.push.expected import launch_digests
        from skyctl.push.rehearsal import rehearse

        request = PushRequest(weights.checkpoint, verify=plan.config.weight_transfer.verify)
        fleet = admission.push_fleet(plan, replicas, plan.model_path, {})
        try:
            sites = await rehearse(
                request,
                informed(fleet, state),
                client=running.client,
                senders=self._senders,
                asking=lambda: _asking(replicas),
            )
        except SkyctlError as error:
            _LOG.info("the first push begins cold: %s", error.message)
            return
        except Exception:
            _LOG.exception("rehearsal")
            return
        with state.transaction():
            remember(state, Learned(launch_digests(sites)).to_json())
            for site in sites:
                now = running.replicas.get(site.name)
                if now and now.instance == instances[site.name] and site.digest_before:
                    now.update_row(weights_digest=site.digest_before)
        state.add_event("fleet", "ready for a push")


@contextmanager
def _asking(replicas: Sequence[Replica]) -> Iterator[None]:
    """Probes that their engines do not answer meanwhile are not counted against them."""
    for replica in replicas:
        replica.rehearsing = True
    try:
        yield
    finally:
        for replica in replicas:
            replica.rehearsing = False

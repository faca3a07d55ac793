"""The rehearsal that makes the first push of a fleet as fast as those after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from skyctl.core.arbiter import Act
from skyctl.core.expectations import informed
from skyctl.errors import ConflictError, SkyctlError
from skyctl.push.request import PushRequest
from skyctl.push.verify import launch_digests
from skyctl.states import ReplicaState
from skyctl.store.expected import Learned
from skyctl.store.in_doubt import in_doubt
from skyctl.supervisor import admission
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.replica import Replica
from skyctl.transfer.sender_pool import SenderPool

_LOG = logging.getLogger(__name__)
_REHEARSAL_STOP_TIMEOUT_S = 15.0


class Warming:
    """Runs a rehearsal when it is due, in a task of its own, which anything that needs the servers
    or the sender stops. Servers that took part are not asked again while their processes live.
    """

    def __init__(self, running: RunningFleet, senders: SenderPool) -> None:
        self._running = running
        self._senders = senders
        self._task: asyncio.Task[None] | None = None
        self._rehearsed: set[str] = set()

    def begin_if_due(self) -> None:
        """Begin a rehearsal if it is due: every server that should be up is, and nothing else is
        under way.
        """
        if (self._task is None or self._task.done()) and (replicas := self._due()):
            self._rehearsed = {replica.instance for replica in replicas}
            self._task = asyncio.create_task(self._rehearse(replicas), name="rehearsal")

    async def stop(self) -> None:
        """End a rehearsal that is under way; it is due again afterwards. The caller has its turn,
        or is an operation, so that none begins meanwhile.
        """
        if self._task is not None and not self._task.done():
            self._rehearsed = set()
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_REHEARSAL_STOP_TIMEOUT_S)

    def _due(self) -> list[Replica]:
        running = self._running
        plan = running.plan
        if plan is None or not plan.config.warms or running.draining:
            return []
        if running.push_job or running.under_way:
            return []
        replicas = [r for r in running.replicas.values() if not r.phase.ended]
        if {replica.instance for replica in replicas} <= self._rehearsed:
            return []
        serving = (ReplicaState.READY, ReplicaState.PAUSED)
        if not all(replica.state in serving for replica in replicas):
            return []
        if plan.device == "cpu" and running.state.weights().checkpoint is not None:
            return []  # a push into CPU servers keeps nothing for the next one
        try:
            running.arbiter.take(Act.VERB, "a check").release()
        except ConflictError:
            return []
        return replicas

    async def _rehearse(self, replicas: Sequence[Replica]) -> None:
        running = self._running
        state, plan = running.state, running.require_plan()
        instances = {replica.name: replica.instance for replica in replicas}
        weights = admission.committed(state, plan)
        if weights is None or weights.checkpoint is None or in_doubt(state):
            return
        from skyctl.push.rehearsal import rehearse

        request = PushRequest(
            weights.checkpoint,
            draft=weights.draft,
            expected_draft=weights.draft_digest,
        )
        fleet = admission.push_fleet(plan, replicas, state, plan.base)
        try:
            sites = await rehearse(
                request,
                informed(fleet, state),
                client=running.client,
                senders=self._senders,
                asking=lambda: _asking(replicas),
            )
        except SkyctlError as error:
            _LOG.warning("the first push begins cold: %s", error.message)
            return
        except Exception:
            _LOG.exception("rehearsal")
            return
        with state.transaction():
            state.expected.learn(Learned(launch_digests(sites)).to_json())
            for site in sites:
                now = running.replicas.get(site.name)
                if now and now.instance == instances[site.name] and site.proof.digest_before:
                    now.update_row(weights_digest=site.proof.digest_before)
        state.add_event("fleet", "ready for a push")


@contextmanager
def _asking(replicas: Sequence[Replica]) -> Iterator[None]:
    """Health probes that fail while engines are busy with these questions do not count against
    them.
    """
    for replica in replicas:
        replica.rehearsing = True
    try:
        yield
    finally:
        for replica in replicas:
            replica.rehearsing = False

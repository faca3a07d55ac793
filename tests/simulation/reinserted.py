"""Defects of the past, put back one at a time: the simulation has to find each of them.

What cannot be put back in one process without distorting it is not here: a digest that is blind to
permutations is computed inside vLLM's workers (tests/unit/engines), where weights are real tensors.
Nor is 33 any more, a push that dies early and hides the session that one before it left open:
recovery thaws no server whose digest is not what it was, and amid a session its layers are meta
tensors, which have none (tests/unit/store/test_in_doubt.py has the record). A server that another
program woke without its weights, after a push had labelled it, is too rare
(tests/unit/service/test_attached.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyctl.checkpoints.header import FileIdentity
from skyctl.core import diagnosis, jobs, recovery
from skyctl.core.arbiter import Act, Arbiter, Turn
from skyctl.errors import ConflictError, ServerError, StateUnwritable
from skyctl.push.request import PushRequest
from skyctl.push.rows import Compared
from skyctl.push.run import CancelGuard
from skyctl.push.servers import open_session
from skyctl.store.server_names import Located, Naming
from skyctl.store.state import FleetState
from tests.simulation import seams
from tests.simulation.world import Schedule


@dataclass(frozen=True)
class Defect:
    """What was wrong once, and where it shows."""

    kind: str
    """Of the fleet in which it shows."""
    patches: Mapping[str, Any]
    """What to replace → by what (see `seams.installed`)."""

    def schedule(self, seed: int) -> Schedule:
        return Schedule(seed, self.kind)


_VERBS = (Act.VERB, Act.SLEEP)
_take = Arbiter.take
_claim = Arbiter.claim
_interrupted_request = recovery.interrupted_request
_behind = diagnosis._behind


def _recovery_only_looks(self: Arbiter, act: Act, what: str) -> Turn:
    """Recovery looks once whether a push is under way; a push does not look for a recovery."""
    turn = _take(self, act, what)
    if act is Act.RECOVER:
        turn.release()
        return Turn(None)
    return turn


def _verbs_do_not_look(self: Arbiter, act: Act, what: str) -> Turn:
    return Turn(None) if act in _VERBS else _take(self, act, what)


def _verbs_look_once(self: Arbiter, act: Act, what: str) -> Turn:
    """A verb is refused during a push; a push is not refused during a verb."""
    turn = _take(self, act, what)
    if act in _VERBS:
        turn.release()
        return Turn(None)
    return turn


def _claims_nothing(*acts: Act) -> Any:
    """Servers have locks of their own by now, which keep acts apart as well."""

    async def claim(
        self: Arbiter, turn: Turn, act: Act, what: str, servers: Mapping[str, str], **options: Any
    ) -> None:
        await _claim(self, turn, act, what, {} if act in acts else servers, **options)

    return claim


def _any_refusal(error: ServerError) -> bool:
    """Whatever a server answers means that it has no such method."""
    return bool(error.status)


def _without_digest(state: FleetState) -> PushRequest | None:
    """What the dead push asked for, of whatever lies at its path by now."""
    request = _interrupted_request(state)
    return request and replace(request, expected_digest=None)


def _same_label(state: FleetState, replica: Any) -> bool:
    weights = state.weights()
    return weights.checkpoint is None or replica.row.weight_version == weights.version


def _another_label(version: str | None, row: Any, weights: Any, *, ours: bool) -> str:
    return _behind(version, replace(row, checkpoint_digest=None), weights, ours=ours)


def _unwell() -> bool:
    disk = seams.here().disk
    return bool(disk.full or disk.failing)


def _refused(what: Any) -> Any:
    """The method, which fails while the disk does."""

    def write(self: FleetState, *arguments: Any, **options: Any) -> Any:
        if _unwell():
            raise StateUnwritable(f"cannot write {self.path}")
        return what(self, *arguments, **options)

    return write


def _record_result(*arguments: Any) -> None:
    if _unwell():
        raise ConflictError("the state file cannot be written")
    _recorded(*arguments)


_recorded = jobs.record_result


def _nothing(*arguments: Any, **options: Any) -> None: ...


async def _nothing_awaited(*arguments: Any, **options: Any) -> None: ...


async def _awake(*arguments: Any) -> int:
    return 0


async def _nothing_found(*arguments: Any) -> dict[str, Any]:
    return {}


async def _take_for_granted(server: Any, numbers: Any, whole: Compared, **options: Any) -> str:
    server.proof.compared = whole
    return ""


def _by_place(fleet: str, located: Sequence[Located], recorded: Mapping[str, str]) -> Naming:
    return Naming(tuple((f"{fleet}-{place}", url) for place, (_, url) in enumerate(located)))


def _as_typed(path: str) -> str | None:
    return path


def _without_change(status: os.stat_result) -> FileIdentity:
    return replace(seams.here().checkpoints.identity(status), ctime_ns=0)


async def _cancelled_as_it_ends(self: CancelGuard, transaction: Coroutine[Any, Any, Any]) -> Any:
    task = asyncio.ensure_future(transaction)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise
            again, self.cancelled = self.cancelled, True
            if again or not self._entered:
                task.cancel()


DEFECTS: dict[str, Defect] = {
    "01 a recovery and a new push exclude each other one way only": Defect(
        "attached",
        {
            "skyctl.core.arbiter.Arbiter.take": _recovery_only_looks,
            "skyctl.core.arbiter.Arbiter.claim": _claims_nothing(Act.RECOVER),
        },
    ),
    "02 a verb is carried out during a push": Defect(
        "attached", {"skyctl.core.arbiter.Arbiter.take": _verbs_do_not_look}
    ),
    "03 a push begins during a verb": Defect(
        "attached",
        {
            "skyctl.core.arbiter.Arbiter.take": _verbs_look_once,
            "skyctl.core.arbiter.Arbiter.claim": _claims_nothing(*_VERBS),
        },
    ),
    "04 a push goes on when its journal cannot be written": Defect(
        "attached",
        {
            "skyctl.states.PushStage.must_be_recorded_first": False,
            "skyctl.states.PushState.must_be_recorded_first": False,
        },
    ),
    "05 a digest that failed counts as one that there is not": Defect(
        "attached",
        {
            "skyctl.push.verify.lacks_method": _any_refusal,
            "skyctl.push.commit._require_comparison": _nothing,
        },
    ),
    "07 weights of one server are compared with nothing": Defect(
        "attached",
        {
            "skyctl.push.verify.compare": lambda rows, answers: Compared(tensors=1),
            "skyctl.push.commit._enforce": _nothing,
        },
    ),
    "13 recovery pushes what lies at the path by now": Defect(
        "attached", {"skyctl.core.recovery.interrupted_request": _without_digest}
    ),
    "14 a label alone says that a server is current": Defect(
        "supervised",
        {
            "skyctl.supervisor.admission.is_current": _same_label,
            "skyctl.supervisor.fleet.is_current": _same_label,
            "skyctl.supervisor.weights.is_current": _same_label,
            "skyctl.core.diagnosis._behind": _another_label,
        },
    ),
    "16 the end of a push cannot be recorded": Defect(
        "supervised", {"skyctl.core.jobs.record_result": _record_result}
    ),
    "17 a death after the last resume rolls back": Defect(
        "attached", {"skyctl.push.commit._record_verified": _nothing}
    ),
    "18 a replica that dies while a write fails is not restarted": Defect(
        "supervised",
        {"skyctl.store.state.FleetState.add_event": _refused(FleetState.add_event)},
    ),
    "19 a failed write ends a healthy server": Defect(
        "supervised",
        {"skyctl.store.state.FleetState.save_process": _refused(FleetState.save_process)},
    ),
    "20 an update begins in a server that runs": Defect(
        "attached", {"skyctl.push.delivery.require_paused": _nothing_awaited}
    ),
    "21 a server that was thawed while it was loaded is left so": Defect(
        "attached", {"skyctl.push.commit.require_paused": _nothing_awaited}
    ),
    "34 a push that fails does not look again at what must not serve": Defect(
        "attached", {"skyctl.push.transaction.freeze_again": _nothing_awaited}
    ),
    "22 a second attempt builds on what the first left": Defect(
        "attached", {"skyctl.push.delivery.scrub": open_session}
    ),
    "23 nobody waits for the last request of a dead process": Defect(
        "attached", {"skyctl.core.arbiter.LATE_S": 0.0}
    ),
    "24 servers of a push may differ": Defect(
        "attached", {"skyctl.push.commit._outvote": _nothing}
    ),
    "25 the same files may come to other weights": Defect(
        "supervised", {"skyctl.push.commit._enforce": _nothing}
    ),
    "26 an undone push thaws what was verified without its label": Defect(
        "attached", {"skyctl.push.freeze.label_verified": _nothing_awaited}
    ),
    "27 a server that sleeps is resumed": Defect(
        "attached",
        {
            "skyctl.core.recovery.settled_sleep_level": _awake,
            "skyctl.core.observation.sleep_level": _awake,
            "skyctl.core.verbs.put_sleep_on_record": _nothing_found,
        },
    ),
    "28 a forked child keeps its parent's locks": Defect(
        "attached", {"tests.simulation.seams.dropped_by_children": set}
    ),
    "29 a record belongs to a place in the list": Defect(
        "attached", {"skyctl.service.attached_servers.name_servers": _by_place}
    ),
    "30 a path is remembered as typed": Defect(
        "supervised", {"skyctl.core.jobs.without_links": str, "skyctl.core.jobs.locate": _as_typed}
    ),
    "31 the time of a change is no part of what a file is": Defect(
        "attached", {"skyctl.checkpoints.header.FileIdentity.of_status": _without_change}
    ),
    "32 Ctrl-C as a push ends takes its result away": Defect(
        "attached", {"skyctl.push.run.CancelGuard.run": _cancelled_as_it_ends}
    ),
    "35 a server thaws for whoever has its token": Defect(
        "attached", {"skyctl.engines.inside.guard._Freeze._is_other": lambda *_: False}
    ),
    "36 recovery brings the base beside what another fleet pushed": Defect(
        "attached",
        {"skyctl.service.attached_recovery._Actions._refuse_mixture": _nothing_awaited},
    ),
    "37 what servers copied out of a trainer's memory is compared with nothing": Defect(
        "attached",
        {
            "skyctl.push.commit.settle_parameters": _take_for_granted,
            "skyctl.push.commit._outvote": _nothing,
        },
    ),
    "38 discarded weights are woken": Defect(
        "attached", {"skyctl.core.verbs.refuse_discarded": _nothing}
    ),
    "39 a push takes servers that sleep for awake": Defect(
        "attached", {"skyctl.push.sleeping.sleepers": lambda servers: []}
    ),
}

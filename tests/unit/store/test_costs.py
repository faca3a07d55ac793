"""What bookkeeping costs: statements of a push, CPU of a verb for many servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from skyctl.core import verbs
from skyctl.http.fanout import Outcome, OutcomeStatus
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.store.state import FleetState
from tests.faults.attached_fleet import attached_fleet
from tests.stub.app import StubServer
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

MANY = 2048


async def test_a_push_into_two_servers_takes_few_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "ckpt", tiny_tensors())
    statements: list[str] = []
    stubs = [StubServer(), StubServer()]
    async with attached_fleet(tmp_path / "home", monkeypatch, stubs) as fleet:
        file = fleet._state.database._file
        assert file is not None
        file.set_trace_callback(statements.append)
        job_id = await fleet.start_push(PushRequest(str(checkpoint)))
        await fleet._pushes[job_id]
        file.set_trace_callback(None)
        job = await fleet.job(job_id)
        assert job.state == "succeeded", job.error
        assert set(job.servers) == {"far-0", "far-1"}
    # each state of a server is one; those that take and leave the lock are not counted
    counted = [one for one in statements if " locks " not in one]
    assert len(counted) <= 54, "\n".join(counted)


@pytest.mark.parametrize("verb", verbs.VERBS)
async def test_the_bookkeeping_of_a_verb_grows_with_the_servers_and_not_with_their_square(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def done(_: Any, targets: Sequence[ServerTarget], **__: Any) -> list[Outcome[None]]:
        return [Outcome(target.name, OutcomeStatus.OK, 0.0) for target in targets]

    for name in verbs.VERBS:
        monkeypatch.setattr(verbs.verbs, name, done)
    targets = [ServerTarget(f"a-{n}", "http://127.0.0.1:1", None) for n in range(MANY)]
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        state.update_servers({target.name: {"weight_version": "v"} for target in targets})
        began = time.process_time()
        outcomes = await verbs.run(verb, {}, targets, client=None, state=state, timeout_s=1.0)  # type: ignore[arg-type]
        took = time.process_time() - began
    assert all(outcome.ok for outcome in outcomes) and len(outcomes) == MANY
    # 0.05 s where this was written; quadratic, it took more than 100 s
    assert took < 1.0

"""Following a push job from its journal."""

from __future__ import annotations

import asyncio
from pathlib import Path

from skyctl.core.arbiter import Act, Arbiter
from skyctl.core.jobs import follow, open_push
from skyctl.push.request import PushRequest
from skyctl.store.state import FleetState


async def test_who_hears_that_a_push_is_over_may_start_the_next(tmp_path: Path) -> None:
    state = FleetState(tmp_path / "stubs" / "state.db")
    arbiter = Arbiter(state.locks)
    turn = arbiter.take(Act.PUSH, "a push")
    job = open_push(state.journal, turn, PushRequest("ckpt"))
    heard = asyncio.create_task(follow(state, job.id, lambda event: None, timeout_s=30))
    state.journal.end(job.id, "succeeded", result={"version": "v1"})
    done, _ = await asyncio.wait({heard}, timeout=0.3)  # its owner still holds the fleet
    assert not done
    turn.release()
    assert (await asyncio.wait_for(heard, 10)).ended
    arbiter.take(Act.PUSH, "the next").release()
    state.close()

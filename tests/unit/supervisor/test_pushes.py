"""The push jobs of a supervisor: what becomes of a server whose process changes in one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyctl.push.request import PushFleet, PushRequest
from skyctl.store.identity import ProcessIdentity
from skyctl.store.state import FleetState
from skyctl.supervisor.pushes import Pushes
from skyctl.supervisor.replica import Replica


class Server:
    """A replica whose process has this create time."""

    name, in_push, reached_by_push, resume_when_up = "a", True, "", False
    instance = Replica.instance

    def __init__(self) -> None:
        self.forgotten = False
        self.runs_since(1.0)

    def runs_since(self, create_time: float) -> None:
        identity = ProcessIdentity(4321, create_time, "this boot")
        self.process = SimpleNamespace(pid=identity.pid, identity=identity)

    def reload_row(self) -> None:
        """It has none."""

    def forget_weights(self) -> None:
        self.forgotten = True


@pytest.mark.parametrize("restarts", [True, False])
async def test_what_a_push_did_is_not_said_of_a_successor_with_the_same_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    server: Any = Server()

    async def run_push(*_: Any, **__: Any) -> None:
        if restarts:
            server.runs_since(2.0)

    monkeypatch.setattr("skyctl.core.jobs.run_push", run_push)
    monkeypatch.setattr(Pushes, "_fleet", lambda *_, **__: PushFleet("demo", ()))
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        paths = SimpleNamespace(kept=tmp_path)
        running: Any = SimpleNamespace(state=state, client=None, router=None, paths=paths)
        pushes = Pushes(running, lambda job, turn: False)
        job, plan = state.journal.begin("push", {}), cast(Any, None)
        await pushes._push(job, PushRequest("/new"), plan, [server])
    assert server.forgotten is server.resume_when_up is restarts and not server.in_push

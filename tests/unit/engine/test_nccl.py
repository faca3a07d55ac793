"""The end of an NCCL group in a worker."""

from __future__ import annotations

from types import SimpleNamespace

from skyctl.engine.nccl import leave_group


def test_a_group_is_destroyed_once() -> None:
    destroyed: list[str] = []
    group = SimpleNamespace(destroy=lambda: destroyed.append("group"))
    engine = SimpleNamespace(model_update_group=group)
    leave_group(engine)
    leave_group(engine)
    assert destroyed == ["group"] and engine.model_update_group is None


def test_a_worker_that_is_in_none_has_nothing_to_leave() -> None:
    leave_group(None)
    leave_group(SimpleNamespace())

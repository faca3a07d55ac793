"""What follows from a state is consistent, and nothing is concluded from an unknown one."""

from __future__ import annotations

import pytest

from skyctl.states import PushStage, PushState


@pytest.mark.parametrize("state", PushState)
def test_a_push_state_is_frozen_or_given_back_or_neither(state: PushState) -> None:
    assert PushState(str(state)) is state
    assert not (state.frozen and state.given_back)
    # what recovery must know of is never a state that it may pass over
    assert not (state.must_be_recorded_first and state.given_back)
    assert state.thawed or not state.complete


@pytest.mark.parametrize("stage", PushStage)
def test_a_push_stage_before_sessions_is_before_bytes(stage: PushStage) -> None:
    assert PushStage(str(stage)) is stage
    assert stage.before_bytes or not stage.before_sessions
    assert stage.before_sessions or not stage.touches


def test_an_unknown_state_is_not_given_back_and_an_unknown_stage_has_sent_bytes() -> None:
    assert not PushState("of another version").given_back
    assert PushStage("of another version") is PushStage.UPDATE

"""What follows from a state is consistent, and nothing is concluded from an unknown one."""

from __future__ import annotations

import pytest

from skyctl.states import Phase, PushStage, PushState, ReplicaState


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


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_is_shown_and_what_has_ended_is_settled(phase: Phase) -> None:
    shown = {Phase.ADMITTING, Phase.UP}  # these show the server's condition instead
    assert phase in shown or phase.state.ended == phase.ended
    assert phase.settled or not phase.ended
    assert phase.ended or not phase.given_up


@pytest.mark.parametrize("state", ReplicaState)
def test_a_server_lives_or_has_ended_or_is_out_of_sight(state: ReplicaState) -> None:
    out_of_sight = {ReplicaState.UNREACHABLE, ReplicaState.UNSUPERVISED}
    assert (state in out_of_sight) + state.lives + state.ended == 1
    assert not (state.as_intended and state.stuck)
    assert state.recoverable or state.lives or state.ended
    # what queues a request does not fail it
    assert not (state.queues and state.fails_requests)

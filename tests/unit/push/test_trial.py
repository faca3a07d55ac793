"""Trial prompts: what a file may say, what an answer must be, and what a failed one undoes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import PreflightError, PushError, SkyctlError, TrialFailed, UsageError
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.transaction import push
from skyctl.push.trial_file import Answer, Expectation, judge, parse_trial, read_answer, read_trial
from skyctl.store.fleet_weights import FleetWeights
from tests.stub.faults import Fault
from tests.stub.generation import next_token
from tests.unit.push.fleets import Recorder, Rotation, Stubs

ANSWER = Answer("Paris, of course", (5, 6, 7), (-0.1, -2.5, -0.3))


def trial(**expect: Any) -> dict[str, Any]:
    return {"prompts": [{"name": "one", "prompt": "ab", "max_tokens": 2, "expect": expect}]}


def answer_of(digest: str) -> str:
    """What a stub that holds this answers to the prompt above."""
    tokens = [ord("a"), ord("b")]
    for _ in range(2):
        tokens.append(next_token(digest, tokens))
    return "".join(map(chr, tokens[2:]))


def remember(stubs: Stubs) -> None:
    """What the fleet serves is known: its base checkpoint, pushed as step-1."""
    digest = read_checkpoint(str(stubs.base)).identity_digest
    stubs.fleet = replace(stubs.fleet, committed=FleetWeights("step-1", str(stubs.base), digest))


async def push_with(
    stubs: Stubs,
    asked: dict[str, Any],
    *,
    rotation: Rotation | None = None,
    observer: Recorder | None = None,
    **changes: Any,
) -> PushResult:
    request = PushRequest(str(stubs.new), trial=asked, pause_mode="wait", weight_version="step-2")
    async with stubs.client() as client:
        return await push(
            replace(request, **changes),
            stubs.fleet,
            client=client,
            observer=observer or Recorder(),
            rotation=rotation or Rotation(stubs),
        )


async def refused(stubs: Stubs, asked: dict[str, Any], **changes: Any) -> TrialFailed:
    with pytest.raises(TrialFailed) as caught:
        await push_with(stubs, asked, **changes)
    return caught.value


def states(error: SkyctlError) -> list[tuple[str, str | None]]:
    return [(server["state"], server["version"]) for server in error.details["servers"]]


@pytest.mark.parametrize(
    ("expect", "problem"),
    [
        ({}, ""),
        ({"contains": "Paris", "regex": "(?i)COURSE$", "min_logprob": -3}, ""),
        ({"token_ids": [5, 6, 7], "text": "Paris, of course"}, ""),
        ({"token_ids": [5, 6, 8]}, "expected tokens [5, 6, 8], got [5, 6, 7]"),
        ({"text": "Paris"}, "expected the text 'Paris', got 'Paris, of course'"),
        ({"contains": "Rome"}, "expected 'Rome' in it"),
        ({"regex": "^of"}, "expected /^of/"),
        ({"regex": "of"}, ""),
        ({"min_logprob": -2}, "expected log probabilities from -2, got -2.5"),
    ],
)
def test_every_expectation_must_hold(expect: dict[str, Any], problem: str) -> None:
    result = judge("a", "one", Expectation(**expect), ANSWER)
    assert result.ok == (not problem)
    assert problem in result.problem
    assert result.expected == expect
    assert result.got == {"text": ANSWER.text, "token_ids": [5, 6, 7], "min_logprob": -2.5}


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -9999.0, None])
def test_log_probabilities_must_be_finite_even_when_nothing_is_expected(value: Any) -> None:
    result = judge("a", "one", Expectation(), Answer("x", (1,), (value,)))
    assert result.problem == "a log probability is not finite"
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize("expect", [{}, {"text": "x"}, {"min_logprob": -1}])
def test_an_answer_without_log_probabilities_proves_nothing(expect: dict[str, Any]) -> None:
    result = judge("a", "one", Expectation(**expect), Answer("x", (1,), ()))
    assert result.problem == "it told no log probabilities"


def test_no_regular_expression_keeps_the_servers_frozen() -> None:
    answer = Answer("a" * 5000 + "!", (1,), (-1.0,))
    result = judge("a", "one", Expectation(regex="^(a+)+$"), answer)
    assert "expected /^(a+)+$/" in result.problem


def test_answers_of_completions_and_chats_are_read_and_others_refused() -> None:
    completion = {"text": "x", "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}
    assert read_answer({"choices": [completion]}, chat=False) == Answer("x", (1,), (-1.0,))
    chat = {"message": {"content": "x"}, "logprobs": {"content": [{"logprob": -1.0}]}}
    assert read_answer({"choices": [chat]}, chat=True) == Answer("x", (), (-1.0,))
    for other in (None, {}, {"choices": []}, {"choices": [{}]}, []):
        with pytest.raises(ValueError, match="it answered"):
            read_answer(other, chat=False)


def test_a_file_is_yaml_or_json_and_a_bare_list_is_its_prompts(tmp_path: Path) -> None:
    file = tmp_path / "trial.yaml"
    file.write_text("- {prompt: hello, expect: {contains: x}}\n")
    data = read_trial(file)
    assert data["prompts"][0]["expect"] == {"contains": "x"}
    file.write_text(json.dumps({"prompts": [{"messages": [{"role": "user", "content": "hi"}]}]}))
    found = parse_trial(read_trial(file))
    assert found.name_of(0) == "#1 'hi'"
    assert found.prompts[0].body()["temperature"] == 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompts: []", "prompts: List should have at least 1 item"),
        ("- {prompt: a, prompt_token_ids: [1]}", "prompts.0: give one of prompt"),
        ("- {expect: {contains: a}}", "prompts.0: give one of prompt"),
        ("- {prompt: a, expect: {regex: '('}}", "prompts.0.expect.regex: no regular expression"),
        ("- {prompt: a, expect: {regex: '(?=a)b'}}", "no regular expression: look-around"),
        ("- {prompt: a, expects: {}}", "prompts.0.expects: Extra inputs"),
        ("just text", "Input should be a valid dictionary"),
        ("{", "while parsing"),
        (f"- {{prompt: a, max_tokens: {'9' * 5000}}}", "4300 digits"),
        ("- {prompt: a, expect: {min_logprob: .nan}}", "cannot be sent as JSON"),
        ("- {prompt: a, sampling: {temperature: .nan}}", "cannot be sent as JSON"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trial.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"trial\.yaml") as caught:
        read_trial(file)
    assert words in caught.value.message


def test_a_file_without_end_is_no_trial_file() -> None:
    with pytest.raises(UsageError, match="larger than 16 MiB"):
        read_trial(Path("/dev/zero"))


async def test_a_version_is_published_only_after_its_trial_passed(stubs: Stubs) -> None:
    rotation, observer = Rotation(stubs), Recorder()
    labels: list[list[str]] = []
    routed: list[set[str]] = []

    def look(stage: str) -> None:
        if stage in ("pause", "trial", "resume"):
            labels.append([engine.weight_version for engine in stubs.engines])
            routed.append(set(rotation.routed))

    observer.on_stage = look
    result = await push_with(stubs, trial(min_logprob=-1), rotation=rotation, observer=observer)
    assert labels == [["default", "default"]] * 3
    assert routed == [set()] * 3
    assert rotation.log == ["leave demo-0 demo-1", "rejoin demo-0 demo-1"]
    assert [engine.weight_version for engine in stubs.engines] == ["step-2", "step-2"]
    assert not any(engine.paused for engine in stubs.engines)
    assert [(one["server"], one["ok"]) for one in result.trial] == [
        ("demo-0", True),
        ("demo-1", True),
    ]
    assert result.trial[0]["got"]["text"] == answer_of(stubs.engines[0].digest)
    assert [s for s in observer.stages if s in ("drain", "trial")] == ["drain", "trial"]


async def test_a_failed_trial_pushes_the_committed_checkpoint_back(stubs: Stubs) -> None:
    remember(stubs)
    rotation, observer = Rotation(stubs), Recorder()
    error = await refused(stubs, trial(contains="Z"), rotation=rotation, observer=observer)
    assert states(error) == [("ready", "step-1"), ("ready", "step-1")]
    assert "step-1 was pushed back" in error.message
    assert "prompt one on demo-0: expected 'Z' in it" in error.message
    assert [one["expected"] for one in error.details["trial"]] == [{"contains": "Z"}] * 2
    for engine in stubs.engines:
        assert engine.weight_version == "step-1"
        assert not engine.paused
        # what it held when it was given back to users, and when it answered the trial
        assert engine.served[-1] == engine.digest != engine.served[0]
    assert rotation.routed == {"demo-0", "demo-1"}
    assert observer.servers[-1][1] == "ready"


async def test_one_server_that_answers_wrongly_keeps_all_from_the_new_version(
    stubs: Stubs,
) -> None:
    remember(stubs)
    stubs.engines[1].logprob = -50.0
    error = await refused(stubs, trial(min_logprob=-10))
    assert [one["ok"] for one in error.details["trial"]] == [True, False]
    assert states(error) == [("ready", "step-1"), ("ready", "step-1")]


@pytest.mark.parametrize("gone", ["unknown", "deleted"])
async def test_without_the_version_before_the_servers_are_quarantined(
    stubs: Stubs, gone: str
) -> None:
    if gone == "deleted":
        remember(stubs)
        shutil.rmtree(stubs.base)
    observer = Recorder()
    error = await refused(stubs, trial(contains="Z"), observer=observer)
    assert states(error) == [("quarantined", None), ("quarantined", None)]
    assert all(engine.paused for engine in stubs.engines)
    assert [engine.weight_version for engine in stubs.engines] == ["default", "default"]
    assert {state for _, state, _ in observer.servers[-2:]} == {"quarantined"}
    assert error.hint == "skyctl recover"


@pytest.mark.parametrize("kind", ["status", "reset", "hang"])
async def test_a_server_that_cannot_answer_has_failed_its_trial(stubs: Stubs, kind: str) -> None:
    remember(stubs)
    stubs.servers[1].asgi.faults["/v1/completions"] = Fault(kind)
    error = await refused(stubs, {**trial(), "timeout_s": 0.3})
    assert [one["ok"] for one in error.details["trial"]] == [True, False]
    assert states(error) == [("ready", "step-1"), ("ready", "step-1")]


async def test_a_server_that_names_no_model_has_failed_its_trial(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(server: VLLMServer) -> list[str]:
        return []

    remember(stubs)
    monkeypatch.setattr(VLLMServer, "models", none)
    error = await refused(stubs, trial())
    assert "demo-0 names no model to ask" in error.message
    assert [one["ok"] for one in error.details["trial"]] == [False, False]
    assert states(error) == [("ready", "step-1"), ("ready", "step-1")]


async def test_a_server_that_cannot_be_paused_again_is_not_left_with_them(stubs: Stubs) -> None:
    remember(stubs)
    stubs.servers[1].asgi.faults["/pause"] = Fault("status", calls=(2,))
    error = await refused(stubs, trial())
    assert [one["ok"] for one in error.details["trial"]] == [True, True, False]
    assert error.details["trial"][2]["problem"].startswith("trial:")
    assert states(error) == [("ready", "step-1"), ("ready", "step-1")]


async def test_a_failure_while_the_weights_go_back_leaves_that_server_quarantined(
    stubs: Stubs,
) -> None:
    remember(stubs)
    plan = (await push_with(stubs, trial(), dry_run=True)).plan
    assert plan is not None
    stubs.fail_update(1, calls=range(plan["chunks"] + 1, 100))
    error = await refused(stubs, trial(contains="Z"))
    assert states(error) == [("ready", "step-1"), ("quarantined", None)]
    assert [engine.paused for engine in stubs.engines] == [False, True]


async def test_keep_is_refused_with_a_trial_before_anything_is_touched(stubs: Stubs) -> None:
    with pytest.raises(PreflightError, match="cannot keep running requests frozen"):
        await push_with(stubs, trial(), pause_mode="keep")
    assert all(engine.log == [] for engine in stubs.engines)


async def test_a_fleet_whose_router_is_not_ours_is_refused(stubs: Stubs) -> None:
    request = PushRequest(str(stubs.new), trial=trial(), pause_mode="wait")
    async with stubs.client() as client:
        with pytest.raises(PreflightError, match="needs a router that skyctl runs"):
            await push(request, stubs.fleet, client=client, observer=Recorder())
    assert all(engine.log == [] for engine in stubs.engines)


async def test_a_server_that_somebody_paused_is_refused(stubs: Stubs) -> None:
    await stubs.engines[1].pause("keep")
    with pytest.raises(PreflightError, match="demo-1 cannot answer trial prompts"):
        await push_with(stubs, trial())
    assert "init" not in stubs.engines[0].log


async def test_a_router_that_does_not_let_go_undoes_the_push(stubs: Stubs) -> None:
    rotation = Rotation(stubs)
    rotation.problem = "the router is restarting"
    with pytest.raises(PushError, match="drain: the router is restarting") as caught:
        await push_with(stubs, trial(), rotation=rotation)
    assert states(caught.value) == [("ready", "default")] * 2
    assert rotation.log[-1] == "rejoin demo-0 demo-1"
    assert all(engine.log == [] for engine in stubs.engines)


async def test_requests_that_do_not_end_undo_the_push(stubs: Stubs) -> None:
    stubs.engines[1].requests = 1
    stubs.limit(drain_s=0.0)
    rotation = Rotation(stubs)
    with pytest.raises(PushError, match="1 requests have not ended after 0 s"):
        await push_with(stubs, trial(), rotation=rotation)
    assert rotation.routed == {"demo-0", "demo-1"}
    assert all("pause" not in " ".join(engine.log) for engine in stubs.engines)


async def test_requests_that_come_past_the_router_are_not_answered_by_new_weights(
    stubs: Stubs,
) -> None:
    remember(stubs)
    observer = Recorder()

    def knock(stage: str) -> None:
        if stage == "trial":
            stubs.engines[1].queued = 1

    observer.on_stage = knock
    error = await refused(stubs, trial(), observer=observer)
    assert "requests arrive past the router" in error.details["trial"][1]["problem"]
    assert stubs.engines[1].served[0] == stubs.engines[1].digest


async def test_an_error_of_ours_amid_a_trial_quarantines_before_anybody_rejoins(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(results: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("skyctl.push.trial.failed", broken)
    observer, rotation = Recorder(), Rotation(stubs)
    told: list[set[tuple[str, str]]] = []
    rejoin = rotation.rejoin

    async def watched(names: Collection[str]) -> None:
        told.append({(name, state) for name, state, _ in observer.servers[-2:]})
        await rejoin(names)

    rotation.rejoin = watched  # type: ignore[method-assign]
    with pytest.raises(PushError, match="broke off: RuntimeError"):
        await push_with(stubs, trial(), rotation=rotation, observer=observer)
    assert told == [{("demo-0", "quarantined"), ("demo-1", "quarantined")}]
    assert all(engine.paused for engine in stubs.engines)


async def test_a_way_back_that_fails_before_its_first_byte_does_not_serve_what_failed(
    stubs: Stubs,
) -> None:
    remember(stubs)
    stubs.servers[1].asgi.faults["/init_weight_transfer_engine"] = Fault("status", calls=(2,))
    error = await refused(stubs, trial(contains="Z"))
    assert [state for state, _ in states(error)] == ["quarantined", "quarantined"]
    assert all(engine.paused for engine in stubs.engines)
    assert "could not be pushed back" in error.message
    assert error.hint == "skyctl recover"


async def test_servers_answer_nobody_else_while_their_trial_runs(stubs: Stubs) -> None:
    """Asked directly, past the router, they would answer from weights that nobody accepted."""
    rotation = Rotation(stubs)
    await push_with(stubs, trial(contains=""), rotation=rotation)
    assert rotation.closed

"""Generation: requests that are cut go on, requests that are refused do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from skyctl.errors import DeadlineExceeded, PartialFailure, ServerError
from skyctl.generate.prompts import GenerationRequest, event_lines
from skyctl.generate.requests import (
    Endpoint,
    GenerationClient,
    GenerationResult,
    RetryPolicy,
    failure,
    request_body,
)

ENDPOINT = Endpoint("http://router", "tiny", "s3cret")
REQUEST = GenerationRequest(
    "r", {"max_tokens": 4, "min_tokens": 3, "temperature": 0.0}, prompt="p", session_id="mine"
)

Handler = Callable[[httpx.Request], httpx.Response]


def event(
    ids: list[int], finish: str | None = None, prompt: list[int] | None = None
) -> dict[str, Any]:
    choice = {"text": "".join(map(chr, ids)), "token_ids": ids, "finish_reason": finish}
    return {"choices": [{**choice, "prompt_token_ids": prompt}]}


def stream(*events: dict[str, Any], done: bool = True) -> httpx.Response:
    lines = "".join(f"data: {json.dumps(e, ensure_ascii=False)}\n\n" for e in events)
    return httpx.Response(200, text=lines + ("data: [DONE]\n\n" if done else ""))


class Script:
    """Answers requests from a list, and keeps what was asked and waited."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self._answers = iter(answers)
        self.requests: list[httpx.Request] = []
        self.waits: list[float] = []

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def client(self, **retry: Any) -> GenerationClient:
        return GenerationClient(
            ENDPOINT,
            retry=RetryPolicy(**retry),
            transport=httpx.MockTransport(self.handle),
            sleep=self.sleep,
        )


async def run(
    script: Script, request: GenerationRequest = REQUEST, **retry: Any
) -> GenerationResult:
    async with script.client(**retry) as client:
        return await client.generate_one(request)


async def test_an_undisturbed_request_is_sent_once_with_key_and_session() -> None:
    script = Script(stream(event([97], prompt=[7]), event([98], "stop")))
    result = await run(script)
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", [97, 98], "stop")
    assert (result.retries, result.error, script.waits) == (0, "", [])
    assert script.requests[0].headers["authorization"] == "Bearer s3cret"
    assert script.requests[0].headers["x-session-id"] == "mine"
    assert script.bodies[0] == {
        "model": "tiny",
        "prompt": "p",
        "max_tokens": 4,
        "min_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
    }


async def test_text_may_hold_any_character_that_ends_a_line_elsewhere() -> None:
    text = "a\u0085b\u2028c\u2029d"
    script = Script(stream({"choices": [{"text": text, "finish_reason": "stop"}]}))
    result = await run(script)
    assert (result.text, result.error, len(script.requests)) == (text, "", 1)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
async def test_lines_of_a_stream_end_at_line_feeds_wherever_it_is_cut(size: int) -> None:
    sent = "data: a\r\n\r\ndata: \u2028b\n\n: c\ndata: d"

    async def chunks() -> AsyncIterator[str]:
        for begin in range(0, len(sent), size):
            yield sent[begin : begin + size]

    lines = [line async for line in event_lines(chunks())]
    assert lines == ["data: a", "", "data: \u2028b", "", ": c"]


async def test_an_aborted_request_goes_on_from_its_tokens_for_the_rest() -> None:
    script = Script(
        stream(event([97], prompt=[7, 8]), event([98], "abort")),
        stream(event([99], prompt=[7, 8, 97, 98]), event([100], "length")),
    )
    result = await run(script)
    assert (result.text, result.token_ids) == ("abcd", [97, 98, 99, 100])
    assert (result.finish_reason, result.retries) == ("length", 1)
    assert script.bodies[1]["prompt"] == [7, 8, 97, 98]
    assert (script.bodies[1]["max_tokens"], script.bodies[1]["min_tokens"]) == (2, 1)


async def test_a_cut_answer_without_token_ids_begins_anew() -> None:
    def piece(text: str, finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"text": text, "finish_reason": finish}]}

    script = Script(stream(piece("ab"), done=False), stream(piece("abc"), piece("d", "length")))
    result = await run(script)
    assert (result.text, result.token_ids, result.retries) == ("abcd", [], 1)
    assert script.bodies[1]["prompt"] == "p"


@pytest.mark.parametrize(
    "cut",
    [
        stream(event([97], prompt=[7]), done=False),
        stream(event([97], prompt=[7]), {"error": {"message": "engine died", "code": 500}}),
        stream(event([97], prompt=[7]), done=True),
        httpx.Response(200, text=f"{stream(event([97], prompt=[7]), done=False).text}data: {{"),
    ],
)
async def test_a_stream_that_breaks_is_gone_on_with(cut: httpx.Response) -> None:
    script = Script(cut, stream(event([98], "stop")))
    result = await run(script)
    assert (result.token_ids, result.retries) == ([97, 98], 1)


@pytest.mark.parametrize(
    "cut",
    [
        httpx.Response(500, json={"error": {"message": "worker gone"}}),
        httpx.Response(503, text="No available workers"),
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("peer closed connection"),
        stream(event([], "abort")),
    ],
)
async def test_a_request_cut_before_its_first_token_is_sent_again_as_it_was(
    cut: httpx.Response | Exception,
) -> None:
    script = Script(cut, stream(event([97], "stop", prompt=[7])))
    result = await run(script)
    assert (result.token_ids, result.retries) == ([97], 1)
    assert script.bodies[0] == script.bodies[1]


async def test_a_request_cut_after_its_last_token_is_finished() -> None:
    script = Script(stream(event([97, 98, 99, 100], prompt=[7]), done=False))
    result = await run(script)
    assert (result.token_ids, result.finish_reason) == ([97, 98, 99, 100], "length")


async def test_retries_are_bounded_and_wait_longer_each_time() -> None:
    script = Script(*[httpx.Response(503, text="No available workers")] * 5)
    result = await run(script, max_retries=4, backoff_s=1.0, backoff_max_s=4.0)
    assert script.waits == [1.0, 2.0, 4.0, 4.0]
    assert (result.finish_reason, result.token_ids) == ("error", [])
    assert "given up after 5 attempts" in result.error
    assert "No available workers" in result.error


REFUSED_WHILE_PAUSED = {"message": "Generation is paused. Please retry.", "code": 503}


@pytest.mark.parametrize(
    "refusal",
    [
        lambda: httpx.Response(503, json={"error": REFUSED_WHILE_PAUSED}),
        lambda: stream({"error": REFUSED_WHILE_PAUSED}),
    ],
    ids=["status", "event"],
)
async def test_a_pause_is_waited_out_however_long_it_lasts(
    refusal: Callable[[], httpx.Response],
) -> None:
    script = Script(*[refusal() for _ in range(6)], stream(event([98], "stop", prompt=[7])))
    result = await run(script, max_retries=2, backoff_s=0.25)
    assert (result.token_ids, result.error, result.retries) == ([98], "", 6)
    assert script.waits == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]


async def test_asking_waits_a_pause_out_as_well() -> None:
    refused = [httpx.Response(503, json={"error": REFUSED_WHILE_PAUSED}) for _ in range(4)]
    script = Script(*refused, httpx.Response(200, json={"count": 1}))
    async with script.client(max_retries=1) as client:
        assert await client.ask("/tokenize", {}) == {"count": 1}


async def test_a_chat_whose_server_streams_no_token_ids_is_sent_without_them() -> None:
    refusal = httpx.Response(
        400, json={"message": "return_token_ids is not supported with streaming on chat."}
    )
    answer = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
    script = Script(refusal, stream(answer))
    request = GenerationRequest("r", {"max_tokens": 3}, messages=[{"role": "user"}])
    async with script.client() as client:
        result = await client.generate_one(request)
    assert (result.text, result.error, script.waits) == ("a", "", [])
    assert ["return_token_ids" in body for body in script.bodies] == [True, False]


async def test_an_attempt_that_brings_a_token_starts_the_count_afresh() -> None:
    refused, one_token = httpx.Response(500), event([97], "abort", prompt=[7])
    script = Script(
        refused, stream(one_token), refused, stream(one_token), stream(event([98], "stop"))
    )
    result = await run(script, max_retries=2, backoff_s=1.0)
    assert (result.token_ids, result.retries, result.error) == ([97, 97, 98], 4, "")
    assert script.waits == [1.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refused_request_is_not_sent_again(status: int) -> None:
    script = Script(httpx.Response(status, json={"error": {"message": "no such model"}}))
    result = await run(script)
    assert len(script.requests) == 1
    assert result.error == f"/v1/completions answered {status}: no such model"


async def test_a_refusal_inside_the_stream_is_final_as_well() -> None:
    script = Script(stream({"error": {"message": "too long", "code": 400}}))
    assert (await run(script)).error == "refused: too long"


async def test_a_cut_chat_goes_on_as_a_completion_of_its_token_ids() -> None:
    request = GenerationRequest(
        "r", {"max_tokens": 3, "add_generation_prompt": True}, messages=[{"role": "user"}]
    )
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [7]}
    delta = {"choices": [{"delta": {"content": "a"}, "token_ids": [97], "finish_reason": "abort"}]}
    script = Script(stream(role, delta), stream(event([98], "stop")))
    result = await run(script, request)
    assert [r.url.path for r in script.requests] == ["/v1/chat/completions", "/v1/completions"]
    assert script.bodies[1]["prompt"] == [7, 97]
    assert "add_generation_prompt" not in script.bodies[1]
    assert (result.text, result.token_ids) == ("ab", [97, 98])


@pytest.mark.parametrize(
    ("constraint", "value", "again"),
    [
        ("response_format", {}, True),
        ("tools", {}, True),
        ("stop", {}, True),
        ("presence_penalty", 1.5, True),
        ("frequency_penalty", -1, True),
        ("bad_words", ["ab"], True),
        ("truncate_prompt_tokens", 1, True),
        ("presence_penalty", 0.0, False),
        ("stop", None, False),
    ],
)
async def test_a_constrained_answer_starts_again_from_nothing(
    constraint: str, value: Any, again: bool
) -> None:
    request = GenerationRequest("r", {"max_tokens": 3, constraint: value}, prompt="p")
    script = Script(
        stream(event([97], "abort", prompt=[7])), stream(event([98], "stop", prompt=[7]))
    )
    result = await run(script, request)
    assert (result.token_ids, result.text) == (([98], "b") if again else ([97, 98], "ab"))
    assert script.bodies[1]["prompt"] == ("p" if again else [7, 97])


async def test_tokens_that_end_inside_a_character_are_taken_back_at_a_cut() -> None:
    half = {"choices": [{"text": "", "token_ids": [240, 159], "finish_reason": "abort"}]}
    script = Script(
        stream(event([97], prompt=[7]), half), stream(event([98], "stop", prompt=[7, 97]))
    )
    result = await run(script)
    assert script.bodies[1]["prompt"] == [7, 97]
    assert script.bodies[1]["max_tokens"] == 3
    assert (result.text, result.token_ids) == ("ab", [97, 98])


async def test_the_server_is_asked_where_several_tokens_came_with_one_text() -> None:
    merged = {"choices": [{"text": "a", "token_ids": [97, 240, 159], "prompt_token_ids": [7]}]}
    script = Script(
        stream(merged, done=False),
        httpx.Response(200, json={"prompt": "a\ufffd"}),
        httpx.Response(200, json={"prompt": "a\ufffd"}),
        stream(event([98], "stop")),
    )
    result = await run(script)
    assert [r.url.path for r in script.requests[1:3]] == ["/detokenize"] * 2
    assert [body["tokens"] for body in script.bodies[1:3]] == [[97, 240, 159], [97, 240]]
    assert script.bodies[3]["prompt"] == [7, 97]
    assert (result.text, result.token_ids) == ("ab", [97, 98])


async def test_without_an_answer_about_the_character_the_tokens_are_kept() -> None:
    merged = {"choices": [{"text": "a", "token_ids": [97, 99], "prompt_token_ids": [7]}]}
    script = Script(
        stream(merged, done=False), httpx.Response(404, text="no"), stream(event([98], "stop"))
    )
    assert (await run(script)).token_ids == [97, 99, 98]


async def test_an_attempt_whose_tokens_are_all_taken_back_brought_nothing() -> None:
    half = {"choices": [{"text": "", "token_ids": [240], "finish_reason": "abort"}]}
    script = Script(*[stream(half)] * 3)
    result = await run(script, max_retries=2)
    assert result.error.startswith("given up after 3 attempts")


def with_logprobs(ids: list[int], finish: str | None = None) -> dict[str, Any]:
    chunk = event(ids, finish, prompt=[7])
    chunk["choices"][0]["logprobs"] = {"token_logprobs": [-id / 100 for id in ids]}
    return chunk


async def test_logprobs_are_one_per_token_also_across_a_cut() -> None:
    half = {
        "choices": [
            {
                "text": "",
                "token_ids": [240],
                "finish_reason": "abort",
                "logprobs": {"token_logprobs": [-9.0]},
            }
        ]
    }
    script = Script(stream(with_logprobs([97]), half), stream(with_logprobs([98, 99], "stop")))
    result = await run(script)
    assert result.token_ids == [97, 98, 99]
    assert result.logprobs == [-0.97, -0.98, -0.99]
    assert result.prompt_token_ids == [7]


async def test_a_chats_logprobs_are_read_as_well() -> None:
    choice = {
        "delta": {"content": "ab"},
        "token_ids": [97, 98],
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        "finish_reason": "stop",
    }
    request = GenerationRequest("r", {"max_tokens": 4, "logprobs": True}, messages=[])
    assert (await run(Script(stream({"choices": [choice]})), request)).logprobs == [-1.0, -2.0]


async def test_without_a_logprob_for_each_token_there_are_none() -> None:
    script = Script(stream(with_logprobs([97]), event([98], "stop")))
    assert (await run(script)).logprobs is None
    assert (await run(Script(stream(event([98], "stop"))))).logprobs is None


async def test_an_answer_in_one_piece_is_asked_for_until_it_is_whole() -> None:
    aborted = {"choices": [{"text": "a", "finish_reason": "abort"}]}
    whole = {"choices": [{"text": "ab", "finish_reason": "stop"}]}
    script = Script(
        httpx.Response(503, text="busy"),
        httpx.ConnectError("refused"),
        httpx.Response(200, json=aborted),
        httpx.Response(200, json=whole),
    )
    async with script.client() as client:
        answer = await client.ask("/v1/completions", {"prompt": "p"}, session_id="mine")
    assert answer == whole and len(script.waits) == 3
    assert script.bodies[-1] == {"model": "tiny", "prompt": "p"}
    assert script.requests[0].headers["x-session-id"] == "mine"


async def test_asking_is_given_up_and_refusals_are_final() -> None:
    script = Script(*[httpx.Response(503)] * 3)
    async with script.client(max_retries=2) as client:
        with pytest.raises(ServerError, match="given up after 3 attempts"):
            await client.ask("/tokenize", {})
    refused = Script(httpx.Response(400, json={"error": {"message": "no such thing"}}))
    async with refused.client() as client:
        with pytest.raises(ServerError, match="no such thing") as caught:
            await client.ask("/tokenize", {})
    assert caught.value.status == 400 and refused.waits == []


async def test_an_answer_that_is_no_json_object_is_an_error() -> None:
    for text in ("[1]", "not json"):
        async with Script(httpx.Response(200, text=text)).client() as client:
            with pytest.raises(ServerError, match="JSON"):
                await client.ask("/tokenize", {})


async def test_asking_ends_at_its_deadline() -> None:
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with GenerationClient(ENDPOINT, transport=httpx.MockTransport(hang)) as client:
        with pytest.raises(DeadlineExceeded, match=r"no answer in 0.01 s"):
            await client.ask("/tokenize", {}, timeout_s=0.01)


async def test_a_request_that_stays_frozen_ends_at_its_deadline() -> None:
    async def freeze(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with GenerationClient(ENDPOINT, transport=httpx.MockTransport(freeze)) as client:
        result = await client.generate_one(REQUEST, timeout_s=0.01)
    assert (result.finish_reason, result.error) == ("timeout", "not finished in 0.01 s")


async def test_results_come_in_input_order_and_never_more_run_at_once_than_asked() -> None:
    running = most = 0
    finish = {f"r{n}": asyncio.Event() for n in range(4)}

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        name = json.loads(request.content)["prompt"]
        await finish[name].wait()
        running -= 1
        return stream(event([97], "stop"))

    done: list[str] = []

    def on_done(result: GenerationResult) -> None:
        done.append(result.id)
        following = {"r1": "r2", "r2": "r3", "r3": "r0"}.get(result.id)
        if following:
            finish[following].set()

    requests = [GenerationRequest(f"r{n}", {"max_tokens": 1}, prompt=f"r{n}") for n in range(4)]
    finish["r1"].set()
    async with GenerationClient(ENDPOINT, transport=httpx.MockTransport(answer)) as client:
        results = [
            r.id async for r in client.generate_many(requests, concurrency=2, on_done=on_done)
        ]
    assert results == ["r0", "r1", "r2", "r3"]
    assert done == ["r1", "r2", "r3", "r0"]
    assert most == 2


def test_a_lines_own_model_wins_over_the_endpoints() -> None:
    request = GenerationRequest("r", {"max_tokens": 1, "model": "lora"}, prompt="p")
    assert request_body(request, "tiny", None, [])[1]["model"] == "lora"


def test_results_come_to_one_error() -> None:
    good = GenerationResult("a", "", [], "stop", 0, 1.0)
    late = GenerationResult("b", "", [], "timeout", 0, 1.0, "not finished in 1 s")
    bad = GenerationResult("c", "", [], "error", 0, 1.0, "refused")
    assert failure([good]) is None
    assert isinstance(failure([good, bad]), PartialFailure)
    assert isinstance(failure([late, late]), DeadlineExceeded)
    assert type(failure([late, bad])) is ServerError


async def test_requests_that_the_router_strips_of_their_key_go_to_servers_in_turn() -> None:
    script = Script(
        httpx.ConnectError("refused"),
        httpx.Response(200, json={"tokens": [1]}),
        httpx.Response(200, json={"choices": []}),
        httpx.ConnectError("refused"),
        httpx.Response(200, json={"prompt": "a\ufffd"}),
    )
    endpoint = replace(ENDPOINT, server_urls=("http://one", "http://two"))
    transport = httpx.MockTransport(script.handle)
    async with GenerationClient(endpoint, transport=transport, sleep=script.sleep) as client:
        assert await client.ask("/tokenize", {"prompt": "p"}) == {"tokens": [1]}
        await client.ask("/v1/completions", {"prompt": "p"})
        assert await client._ends_inside_character([97, 240])
    hosts = [request.url.host for request in script.requests]
    assert hosts == ["one", "two", "router", "one", "two"]
    assert {r.headers["authorization"] for r in script.requests} == {"Bearer s3cret"}

"""A prompts file is checked whole before anything is sent."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from skyctl.cli.generate import read_requests
from skyctl.errors import UsageError
from skyctl.generate.prompts import parse_lines

DEFAULTS = {"max_tokens": 16, "temperature": 0.0}


def test_every_kind_of_prompt_is_read_with_its_sampling_keys() -> None:
    requests = parse_lines(
        [
            '{"prompt": "one", "top_p": 0.5, "id": "first"}\n',
            "\n",
            '{"messages": [{"role": "user", "content": "two"}], "max_completion_tokens": 4}',
            '{"prompt_token_ids": [1, 2], "session_id": "s", "temperature": 1.0}',
        ],
        "prompts.jsonl",
        defaults=DEFAULTS,
    )
    assert [r.id for r in requests] == ["first", "1", "2"]
    assert requests[0].body == {"max_tokens": 16, "temperature": 0.0, "top_p": 0.5}
    assert requests[1].messages == [{"role": "user", "content": "two"}]
    assert requests[1].body == {"max_tokens": 4, "temperature": 0.0}
    assert (requests[2].prompt, requests[2].session_id) == ([1, 2], "s")
    assert requests[2].body["temperature"] == 1.0


def test_several_answers_to_a_prompt_are_requests_of_their_own() -> None:
    requests = parse_lines(
        ['{"prompt": "a", "seed": 7}', '{"messages": [{"role": "user"}], "id": "b", "n": 1}'],
        "x",
        defaults={**DEFAULTS, "n": 3},
    )
    assert [(r.id, r.sample) for r in requests] == [("0", 0), ("0", 1), ("0", 2), ("b", 0)]
    # equal seeds would give equal answers
    assert [r.body.get("seed") for r in requests] == [7, 8, 9, None]
    assert not any("n" in r.body for r in requests)


def test_chat_turns_texts_into_chats_and_leaves_token_ids_alone() -> None:
    text, ids = parse_lines(
        ['{"prompt": "hi"}', '{"prompt_token_ids": [1]}'], "x", defaults=DEFAULTS, chat=True
    )
    assert text.messages == [{"role": "user", "content": "hi"}]
    assert ids.prompt == [1]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ('"text"', "a line is a JSON object"),
        ("{}", "it has none"),
        ('{"prompt": "a", "messages": []}', "it has prompt and messages"),
        ('{"prompt": ""}', "prompt is a text that is not empty"),
        ('{"prompt": ["a"]}', "prompt is a text"),
        ('{"prompt_token_ids": [1, "2"]}', "list of integers"),
        ('{"prompt_token_ids": [true]}', "list of integers"),
        ('{"messages": [{"content": "x"}]}', "with role and content"),
        ('{"prompt": "a", "stream": true}', "'stream' cannot be set here"),
        ('{"prompt": "a", "n": 0}', "n is a positive integer, not 0"),
        ('{"prompt": "a", "n": true}', "n is a positive integer"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is a positive integer, not 0"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens is a positive integer"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": "a", "temperature": NaN}', "cannot be sent as JSON"),
        (r'{"prompt": "\ud800"}', "cannot be sent as JSON"),
        (r'{"prompt": "a", "id": "\ud800"}', "cannot be sent as JSON"),
        ('{"prompt": "a", "session_id": 5}', "session_id is a text of printable ASCII"),
        ('{"prompt": "a", "session_id": "\u00fc"}', "session_id is a text of printable ASCII"),
        (r'{"prompt": "a", "session_id": "a\nb"}', "session_id is a text of printable ASCII"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_line(line: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_lines(['{"prompt": "fine"}', "", line], "p.jsonl", defaults=DEFAULTS)
    assert caught.value.message.startswith("p.jsonl:3: ")
    assert complaint in caught.value.message


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('{"custom_id": "1", "method": "POST", "body": {"messages": []}}', "Batch API"),
        ('{"conversations": [{"from": "human", "value": "hi"}]}', "ShareGPT"),
        (
            '{"prompt": [{"role": "user", "content": "hi"}], "data_source": "x"}',
            "{messages: .prompt}",
        ),
        ('{"prompt": [1, 2]}', "{prompt_token_ids: .prompt}"),
        ('{"question": "2+2?", "answer": "4"}', "{prompt: .question}"),
        ('[{"prompt": "hi"}]', "jq -c '.[]'"),
        ("[", "jq -c '.[]'"),
    ],
)
def test_a_line_that_another_tool_reads_gets_its_conversion(line: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_lines([line], "p.jsonl", defaults=DEFAULTS)
    assert hint in caught.value.hint


def test_a_byte_order_mark_is_not_part_of_the_first_line() -> None:
    (request,) = parse_lines(['\ufeff{"prompt": "hi"}'], "p.jsonl", defaults=DEFAULTS)
    assert request.prompt == "hi"


def test_a_file_without_prompts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"p\.jsonl: no prompts in it"):
        parse_lines(["\n"], "p.jsonl", defaults=DEFAULTS)


def test_bytes_that_are_not_text_on_stdin_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "\xff"}'), "utf-8"))
    with pytest.raises(UsageError, match=r"cannot read -: .*0xff"):
        read_requests(None, Path("-"), DEFAULTS, chat=False)

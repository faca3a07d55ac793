"""Reads prompts from a JSONL file; every line is checked before anything is sent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyctl.errors import UsageError
from skyctl.http.client import json_body

DEFAULT_MAX_TOKENS = 128

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
# skyctl sets these itself: one streamed answer with token ids per line
_RESERVED = ("stream", "stream_options", "best_of", "echo", "use_beam_search")


@dataclass(frozen=True)
class GenerationRequest:
    """One request. `body` is what vLLM takes, without the prompt, the model and streaming.

    Exactly one of `prompt` (text or token ids) and `messages` is set. `body["max_tokens"]` is
    always set, so that a request that was cut off can continue for the rest. `sample` numbers
    requests that ask for several answers to one prompt.
    """

    id: str
    body: Mapping[str, Any]
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    session_id: str | None = None
    sample: int = 0

    @property
    def max_tokens(self) -> int:
        return int(self.body["max_tokens"])


def parse_line(
    text: str, where: str, *, number: int, defaults: Mapping[str, Any], chat: bool = False
) -> list[GenerationRequest]:
    """One line of a prompts file: an object with `prompt`, `messages` or `prompt_token_ids`.

    `id` names its result (default: `number`, its position), `session_id` makes it sticky, `n` asks
    for that many answers, each by its own request (a `seed` counts up over them); every other key
    is a sampling parameter, over `defaults`. `chat` turns a text prompt into a chat.

    Raises:
        UsageError: the line is wrong; the message starts with `where`.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(line, dict):
        raise UsageError(f"{where}: a line is a JSON object such as {_EXAMPLE}")
    return parse_request(line, where, number=number, defaults=defaults, chat=chat)


def parse_request(
    line: Mapping[str, Any],
    where: str,
    *,
    number: int,
    defaults: Mapping[str, Any],
    chat: bool = False,
) -> list[GenerationRequest]:
    """The requests of a mapping with the keys of a prompts file's line; see `parse_line`."""
    line = dict(line)
    given = [key for key in _PROMPT_KEYS if key in line]
    if len(given) != 1:
        found = f"it has {' and '.join(given)}" if given else "it has none"
        raise UsageError(f"{where}: a line has one of {', '.join(_PROMPT_KEYS)}; {found}")
    for key in _RESERVED:
        if key in line:
            raise UsageError(f"{where}: {key!r} cannot be set here; skyctl streams each answer")
    value = line.pop(given[0])
    _check_prompt(given[0], value, where)
    identity = str(line.pop("id", number))
    body = _with_max_tokens({**defaults, **line}, where)
    session = body.pop("session_id", None)
    check_session(session, where)
    _check_sendable([identity, value, body], where)
    count, seed = body.pop("n", 1), body.get("seed")
    if type(count) is not int or count < 1:
        raise UsageError(f"{where}: n is a positive integer, not {count!r}")
    request = GenerationRequest(identity, body, session_id=session)
    if given[0] == "messages" or (chat and given[0] == "prompt"):
        messages = value if given[0] == "messages" else [{"role": "user", "content": value}]
        request = replace(request, messages=messages)
    else:
        request = replace(request, prompt=value)
    seeds = [{"seed": seed + n} if type(seed) is int else {} for n in range(count)]
    return [replace(request, body={**body, **seeds[n]}, sample=n) for n in range(count)]


def parse_lines(
    lines: Iterable[str], name: str, *, defaults: Mapping[str, Any], chat: bool = False
) -> list[GenerationRequest]:
    """Every request of a JSONL file called `name`; blank lines are skipped.

    Raises:
        UsageError: a line is wrong (`name:line: …`), or there is none at all.
    """
    requests: list[GenerationRequest] = []
    numbers = itertools.count()
    for line_number, text in enumerate(lines, start=1):
        if text.strip():
            requests += parse_line(
                text,
                f"{name}:{line_number}",
                number=next(numbers),
                defaults=defaults,
                chat=chat,
            )
    if not requests:
        raise UsageError(f"{name}: no prompts in it", hint=f"write lines such as {_EXAMPLE}")
    return requests


_EXAMPLE = '{"prompt": "Once upon a time", "max_tokens": 32}'


def check_session(value: Any, where: str) -> None:
    """Raise UsageError unless it can be a header's value; None is no session."""
    if value is not None and not (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and value == value.strip()
    ):
        raise UsageError(f"{where}: session_id is a text of printable ASCII, not {value!r:.60}")


def _check_prompt(key: str, value: Any, where: str) -> None:
    if key == "prompt" and not (isinstance(value, str) and value):
        raise UsageError(f"{where}: prompt is a text that is not empty")
    if key == "prompt_token_ids" and not (
        isinstance(value, list) and value and all(type(item) is int for item in value)
    ):
        raise UsageError(f"{where}: prompt_token_ids is a list of integers that is not empty")
    if key == "messages" and not (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) and "role" in item for item in value)
    ):
        raise UsageError(f"{where}: messages is a list of objects with role and content")


def _check_sendable(content: Any, where: str) -> None:
    """Raise UsageError for what no request can hold, or no result could be written with."""
    try:
        json_body(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: it cannot be sent as JSON ({error})") from error


def _with_max_tokens(body: dict[str, Any], where: str) -> dict[str, Any]:
    """`body` with max_tokens set, whichever of its two names was used."""
    asked = body.pop("max_completion_tokens", None)
    if asked is None:
        asked = body.get("max_tokens", DEFAULT_MAX_TOKENS)
    if type(asked) is not int or asked < 1:
        raise UsageError(f"{where}: max_tokens is a positive integer, not {asked!r}")
    return {**body, "max_tokens": asked}

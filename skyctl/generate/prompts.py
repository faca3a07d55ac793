"""Generation requests: read from the lines of a prompts file, each checked before anything is sent;
and the state of one over all its attempts, up to its result.
"""

from __future__ import annotations

import itertools
import json
import operator
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from skyctl.engines.base import REFUSED_WHILE_PAUSED
from skyctl.errors import ServerError, UsageError
from skyctl.http.client import json_body

DEFAULT_MAX_TOKENS = 128

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
# skyctl sets these itself: one streamed answer with token ids per line
_RESERVED = ("stream", "stream_options", "best_of", "echo", "use_beam_search")


@dataclass(frozen=True)
class GenerationRequest:
    """One request. Exactly one of `prompt` and `messages` is set."""

    id: str
    """The name of its result."""
    body: Mapping[str, Any]
    """vLLM's parameters without prompt, model and streaming; `max_tokens` is always among them, so
    that a request that was cut off can ask for the remaining tokens.
    """
    prompt: str | list[int] | None = None
    """A text or token ids."""
    messages: list[dict[str, Any]] | None = None
    """The messages of a chat."""
    session_id: str | None = None
    """Sticky routing policies keep requests of one session on one server."""
    sample: int = 0
    """The number of this answer among several to one prompt, from 0."""

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
        hint = _ARRAY_HINT if text.lstrip().startswith("[") else ""
        raise UsageError(f"{where}: not JSON ({error})", hint=hint) from error
    if not isinstance(line, dict):
        hint = _ARRAY_HINT if isinstance(line, list) else ""
        raise UsageError(f"{where}: a line is a JSON object such as {_EXAMPLE}", hint=hint)
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
        keys = " and ".join(given) or ", ".join(map(str, line)) or "none"
        raise UsageError(
            f"{where}: a line has one of {', '.join(_PROMPT_KEYS)}; it has {keys:.100}",
            hint="" if given else _form_hint(line),
        )
    for key in _RESERVED:
        if key in line:
            raise UsageError(f"{where}: {key!r} cannot be set here; skyctl streams each answer")
    value = line.pop(given[0])
    _check_prompt(given[0], value, where)
    identity = str(line.pop("id", number))
    body = _with_max_tokens({**defaults, **line}, where)
    session = body.pop("session_id", None)
    check_session(session, where)
    check_body([identity, value, body], where)
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
        if line_number == 1:
            text = text.removeprefix("\ufeff")  # a byte order mark, as editors on Windows write it
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
_ARRAY_HINT = "a JSON array becomes lines with: jq -c '.[]' FILE"


def _form_hint(line: Mapping[str, Any]) -> str:
    """How to convert a line that another tool reads; "" for an unknown form."""
    if isinstance(line.get("body"), dict):  # OpenAI's Batch API
        return "lines of the Batch API become prompts with: jq -c '{id: .custom_id} + .body' FILE"
    if isinstance(line.get("conversations"), list):  # ShareGPT
        return (
            "ShareGPT's turns are `messages` here, with `role` (user, assistant) for `from`, and "
            "`content` for `value`"
        )
    texts = [key for key, value in line.items() if isinstance(value, str)]
    if texts:
        return f"name the prompt's column `prompt`: jq -c '{{prompt: .{texts[0]}}}' FILE"
    return ""


def check_session(value: Any, where: str) -> None:
    """Raise UsageError unless `value` can be a header's value; None means without a session."""
    if value is not None and not (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and value == value.strip()
    ):
        raise UsageError(f"{where}: session_id is a text of printable ASCII, not {value!r:.60}")


def check_body(value: Any, where: str) -> None:
    """Raise UsageError unless `value` can be sent as JSON."""
    try:
        json_body(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: it cannot be sent as JSON ({error})") from error


def _check_prompt(key: str, value: Any, where: str) -> None:
    if key == "prompt" and not (isinstance(value, str) and value):
        hint = ""
        if isinstance(value, list):  # as verl writes them
            ids = all(type(item) is int for item in value)
            name = "prompt_token_ids" if ids else "messages"
            hint = f"a list goes under {name}: jq -c '{{{name}: .prompt}}' FILE"
        raise UsageError(f"{where}: prompt is a text that is not empty", hint=hint)
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


def _with_max_tokens(body: dict[str, Any], where: str) -> dict[str, Any]:
    """`body` with max_tokens set, whichever of its two names was used."""
    max_tokens = body.pop("max_completion_tokens", None)
    if max_tokens is None:
        max_tokens = body.get("max_tokens", DEFAULT_MAX_TOKENS)
    if type(max_tokens) is not int or max_tokens < 1:
        raise UsageError(f"{where}: max_tokens is a positive integer, not {max_tokens!r}")
    return {**body, "max_tokens": max_tokens}


class Cut(Exception):
    """A request was cut off before its end; it may be sent again. The message says why."""


class Paused(Cut):
    """The server takes no requests until it is resumed."""


@dataclass(frozen=True)
class Piece:
    """One event of a stream."""

    text: str = ""
    """The text it adds."""
    token_ids: tuple[int, ...] = ()
    """The tokens it adds."""
    logprobs: tuple[float, ...] = ()
    """The log probability of each token, if requested."""
    prompt_ids: list[int] | None = None
    """The prompt's tokens; they come with the first event of a request."""
    finish_reason: str | None = None
    """Why generation ended; None until then."""
    version: str = ""
    """The label of the weights that made its tokens; "" if the server does not say."""


VERSION_COMMENT = ": weight-version "
"""Begins a line of a stream before the first token of another version
(`engines/inside/versions.py`)."""


async def event_lines(chunks: AsyncIterable[str]) -> AsyncIterator[str]:
    """The lines of an event stream. httpx splits as `str.splitlines` does, also at characters that
    JSON has as they are, such as U+0085 and U+2028. A line without an end was cut off, and is none:
    behind a proxy that closes connections in good order nothing else shows it.
    """
    unfinished = ""
    async for chunk in chunks:
        *lines, unfinished = (unfinished + chunk).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


async def read_pieces(lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
    """Pieces of a completion's or a chat's event stream, up to `[DONE]` or the end of `lines`.

    Raises:
        Paused: the server is paused and refuses requests.
        Cut: the server reported an error of its own in the middle of the stream.
        ServerError: it refused the request in the stream, or sent something other than events.
    """
    version = ""
    async for line in lines:
        if line.startswith(VERSION_COMMENT):
            version = line.removeprefix(VERSION_COMMENT)
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"the stream has an event that is not JSON: {data[:100]!r}"
            ) from error
        try:
            piece = _piece(event)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise ServerError(
                f"the stream has an event of an unknown form: {data[:100]!r}"
            ) from error
        yield replace(piece, version=version)


def _piece(event: dict[str, Any]) -> Piece:
    if "error" in event:
        error = event["error"] if isinstance(event["error"], dict) else {"message": event["error"]}
        message, code = error.get("message", ""), error.get("code")
        if isinstance(code, int) and 400 <= code < 500:
            raise ServerError(f"refused: {message}", status=code)
        raise (Paused if REFUSED_WHILE_PAUSED in message else Cut)(f"the server failed: {message}")
    choice = (event.get("choices") or [{}])[0]
    text = choice.get("text")
    if text is None:
        text = (choice.get("delta") or {}).get("content")
    return Piece(
        text=text or "",
        token_ids=tuple(map(operator.index, choice.get("token_ids") or ())),
        logprobs=_logprobs(choice.get("logprobs")),
        prompt_ids=choice.get("prompt_token_ids") or event.get("prompt_token_ids"),
        finish_reason=choice.get("finish_reason"),
    )


def _logprobs(logprobs: Any) -> tuple[float, ...]:
    """A completion's `token_logprobs`, or the `logprob` of each entry of a chat's `content`."""
    if not isinstance(logprobs, dict):
        return ()
    values = logprobs.get("token_logprobs")
    if values is None:
        values = [entry.get("logprob") for entry in logprobs.get("content") or ()]
    return tuple(float(value) for value in values if value is not None)


class VersionSpan(NamedTuple):
    """The tokens from `start` up to, without, `end` were made by the weights `version`."""

    version: str
    start: int
    end: int


def spans(versions: Sequence[str]) -> tuple[VersionSpan, ...]:
    """The spans of the versions of successive tokens; none if one is unknown."""
    made: list[VersionSpan] = []
    for version, run in itertools.groupby(versions):
        start = made[-1].end if made else 0
        made.append(VersionSpan(version, start, start + len(list(run))))
    return tuple(made) if all(versions) else ()


@dataclass(frozen=True)
class GenerationResult:
    """The result of one request."""

    id: str
    """The request's id."""
    text: str
    """The generated text."""
    token_ids: list[int]
    """The generated tokens."""
    finish_reason: str
    """vLLM's reason (`stop`, `length`), or `timeout` or `error`."""
    retries: int
    """How many times it was sent again."""
    seconds: float
    """Wall time from the first attempt, waits and freezes included."""
    error: str = ""
    """Why it was given up; text and tokens are partial then."""
    prompt_token_ids: list[int] | None = None
    """The prompt's tokens as the server saw them; None if no server answered."""
    logprobs: list[float] | None = None
    """The natural logarithm of each sampled token's probability, if requested and complete."""
    sample: int = 0
    """The number of this answer among several to one prompt (`n`), from 0."""
    weight_versions: tuple[VersionSpan, ...] = ()
    """Which weights made which tokens; empty if the servers do not say."""

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": self.id,
            "sample": self.sample,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "retries": self.retries,
            "seconds": round(self.seconds, 3),
            "weight_versions": [span._asdict() for span in self.weight_versions],
        }
        return {**row, "error": self.error} if self.error else row


@dataclass
class Progress:
    """The state of one request over all its attempts.

    A token that ends inside a character brings no text until the character is whole.
    """

    prompt_ids: list[int] | None = None
    """The prompt's tokens, once a server has named them."""
    without_ids: bool = False
    """Whether its server streams no token ids for it."""
    tokens: list[int] = field(default_factory=list)
    """All tokens so far."""
    logprobs: list[float] = field(default_factory=list)
    """Their log probabilities, as far as servers sent them."""
    versions: list[str] = field(default_factory=list)
    """The version of the weights that made each token; "" where a server does not say."""
    text: str = ""
    """All text so far."""
    textless: int = 0
    """How many tokens at the end brought no text."""
    unclear: int = 0
    """Up to this many tokens before those may have brought no text either."""
    retries: int = 0
    """How many times it was sent again."""
    fruitless: int = 0
    """How many attempts in a row brought no token."""
    began: float = field(default_factory=time.perf_counter)
    """When the first attempt began, by the performance counter."""

    def add(self, piece: Piece) -> None:
        """Take one piece of the stream."""
        if self.prompt_ids is None and piece.prompt_ids is not None:
            self.prompt_ids = piece.prompt_ids
        self.tokens.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.versions.extend(piece.version for _ in piece.token_ids)
        self.text += piece.text
        if not piece.text:
            self.textless += len(piece.token_ids)
        elif piece.token_ids:
            # a busy server sends several tokens at once: the last ones may have brought no text
            self.textless, self.unclear = 0, len(piece.token_ids) - 1

    def drop(self, count: int) -> None:
        """Drop the last `count` tokens, which brought no text."""
        if count:
            del self.tokens[-count:]
            del self.logprobs[len(self.tokens) :]
            del self.versions[len(self.tokens) :]

    def result(
        self, request: GenerationRequest, finish_reason: str, error: str = ""
    ) -> GenerationResult:
        seconds = time.perf_counter() - self.began
        return GenerationResult(
            request.id,
            self.text,
            self.tokens,
            finish_reason,
            self.retries,
            seconds,
            error,
            self.prompt_ids,
            # all or none: it is unknown which ones a server left out
            self.logprobs if self.tokens and len(self.logprobs) == len(self.tokens) else None,
            request.sample,
            spans(self.versions),
        )

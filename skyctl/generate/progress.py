"""The state of one generation request over all its attempts, and its result."""

from __future__ import annotations

import json
import operator
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from skyctl.errors import ServerError
from skyctl.generate.prompts import GenerationRequest


class Cut(Exception):
    """A request was cut off before its end; it may be sent again. The message says why."""


@dataclass(frozen=True)
class Piece:
    """One event: the tokens and text it adds; `prompt_ids` come with the first of a request.

    `logprobs` has one number per token if they were requested.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt_ids: list[int] | None = None
    finish_reason: str | None = None


async def read_pieces(lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
    """Pieces of a completion's or a chat's event stream, up to `[DONE]` or the end of `lines`.

    Raises:
        Cut: the server reported an error of its own in the middle of the stream.
        ServerError: it refused the request in the stream, or sent something other than events.
    """
    async for line in lines:
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
            raise ServerError(f"the stream has an event like none: {data[:100]!r}") from error
        yield piece


def _piece(event: dict[str, Any]) -> Piece:
    if "error" in event:
        _raise_event_error(event["error"])
    choices = event.get("choices") or [{}]
    choice = choices[0]
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


def _logprobs(found: Any) -> tuple[float, ...]:
    """A completion's `token_logprobs`, or the `logprob` of each entry of a chat's `content`."""
    if not isinstance(found, dict):
        return ()
    values = found.get("token_logprobs")
    if values is None:
        values = [entry.get("logprob") for entry in found.get("content") or ()]
    return tuple(float(value) for value in values if value is not None)


def _raise_event_error(error: Any) -> None:
    message = error.get("message", "") if isinstance(error, dict) else str(error)
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 500:
        raise ServerError(f"refused: {message}", status=code)
    raise Cut(f"the server failed: {message}")


@dataclass(frozen=True)
class GenerationResult:
    """The result of one request. `error` is set if it was given up; tokens are partial then.

    `seconds` is wall time from the first attempt, waits and freezes included. `prompt_token_ids`
    are the prompt's as the server saw them, None if it never answered. `logprobs` has one natural
    logarithm per token (of the token that was sampled) if the request asked for `logprobs`.
    `sample` numbers the answers to one prompt (`n`).
    """

    id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    retries: int
    seconds: float
    error: str = ""
    prompt_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    sample: int = 0

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": self.id,
            "sample": self.sample,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "retries": self.retries,
            "seconds": round(self.seconds, 3),
        }
        return {**row, "error": self.error} if self.error else row


@dataclass
class Progress:
    """The state of one request over all its attempts.

    A token that ends inside a character brings no text until the character is whole. `textless`
    counts such tokens at the end; of those before them, up to `unclear` may be textless as well.
    """

    prompt_ids: list[int] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    textless: int = 0
    unclear: int = 0
    retries: int = 0
    fruitless: int = 0
    began: float = field(default_factory=time.perf_counter)

    def add(self, piece: Piece) -> None:
        """Take one piece of the stream."""
        if self.prompt_ids is None and piece.prompt_ids is not None:
            self.prompt_ids = piece.prompt_ids
        self.tokens.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
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

    def start_again(self) -> None:
        """Drop all tokens."""
        self.tokens, self.logprobs, self.text = [], [], ""

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
        )

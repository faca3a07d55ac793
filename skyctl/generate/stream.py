"""One streamed answer: server-sent events into pieces of text and token ids."""

from __future__ import annotations

import json
import operator
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from skyctl.errors import ServerError


class Cut(Exception):
    """A request ended before its end; it may be sent again. The message says why."""


@dataclass(frozen=True)
class Piece:
    """One event: the tokens and text it adds; `prompt_ids` ride on the first of a request.

    `logprobs` has one number per token when they were asked for.
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
        ServerError: it refused the request in the stream, or sent something else than events.
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

"""The state of one generation request over all its attempts, and its result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from skyctl.generate.stream import Piece


@dataclass(frozen=True)
class GenerationResult:
    """The result of one request. `error` is set when it was given up; then tokens are partial.

    `seconds` is wall time from the first attempt, waits and freezes included. `prompt_token_ids`
    are the prompt's as the server saw them, None when it never answered. `logprobs` has one natural
    logarithm per token (of the token that was sampled) when the request asked for `logprobs`.
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

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": self.id,
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
    counts such tokens at the end; of those before them, up to `unclear` may be such as well.
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
        """Forget the last `count` tokens, which brought no text."""
        if count:
            del self.tokens[-count:]
            del self.logprobs[len(self.tokens) :]

    def start_again(self) -> None:
        """Forget every token."""
        self.tokens, self.logprobs, self.text = [], [], ""

    def result(self, request_id: str, finish_reason: str, error: str = "") -> GenerationResult:
        seconds = time.perf_counter() - self.began
        return GenerationResult(
            request_id,
            self.text,
            self.tokens,
            finish_reason,
            self.retries,
            seconds,
            error,
            self.prompt_ids,
            # all or none: what a server left out cannot be told apart from what came
            self.logprobs if self.tokens and len(self.logprobs) == len(self.tokens) else None,
        )

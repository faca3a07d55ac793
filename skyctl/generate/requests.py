"""Sends many requests through the router's URL and continues those that are cut off.

A request that is cut off (aborted by a pause, its server died, its stream broke) continues from the
prompt and the tokens it already has, with max_tokens reduced by their number, so that greedy
decoding yields the tokens of one undisturbed request. Requests frozen by `pause --mode keep` wait.

    send ── tokens … ── finished ───────────────────► result
      ▲        └─ cut (abort, 5xx, broken stream) ─┐
      └──── prompt + tokens so far, after a wait ◄─┘   given up after `max_retries` in a row
                                                       that brought no token
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from skyctl.engines.base import NO_TOKEN_IDS, REFUSED_WHILE_PAUSED
from skyctl.errors import DeadlineExceeded, PartialFailure, ServerError, SkyctlError
from skyctl.generate.prompts import (
    Cut,
    GenerationRequest,
    Paused,
    Progress,
    event_lines,
    read_pieces,
)
from skyctl.generate.prompts import GenerationResult as GenerationResult
from skyctl.http.client import error_text
from skyctl.http.trust import verification
from skyctl.units import count_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
CONNECT_TIMEOUT_S = 10.0
DETOKENIZE_TIMEOUT_S = 10.0

_PAUSE_STEPS = 4  # waits for a paused server grow to 2 s: nothing says when it is resumed
_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
# answers under these cannot continue midway: they start again (a stop text may span the cut, and
# the server holds text back while it checks for one; the second row counts what was generated, and
# not the prompt, of which it would be a part; a prompt with it would be truncated again)
_NOT_CONTINUED = (
    *("stop", "tools", "response_format", "structured_outputs"),
    *("presence_penalty", "frequency_penalty", "bad_words"),
    "truncate_prompt_tokens",
)
# enough tokens to hold the whole last character
_CHARACTER_TOKENS = 16
_CHAT_ONLY = frozenset({"add_generation_prompt", "chat_template", "chat_template_kwargs"})


@dataclass(frozen=True)
class RetryPolicy:
    """Waits between attempts double from `backoff_s` up to `backoff_max_s` seconds.

    `max_retries` counts consecutive attempts that brought no token; one that did resets the count.
    """

    max_retries: int = 8
    backoff_s: float = 0.25
    backoff_max_s: float = 8.0

    def wait_s(self, attempt: int) -> float:
        """Seconds before retry number `attempt`, from 1."""
        return float(min(self.backoff_s * 2 ** (attempt - 1), self.backoff_max_s))


@dataclass(frozen=True)
class Endpoint:
    """Where requests go: the router's URL or one server's. `server_urls` take the requests that
    vllm-router 0.1.17 strips of their key; `url` if there are none.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    server_urls: tuple[str, ...] = ()


class GenerationClient:
    """Sends generation requests to one endpoint, of which each attempt reads the current value. Use
    as an async context manager.

    `transport` and `sleep` replace the network and the waits in tests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        retry: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.endpoint = endpoint
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._http = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            verify=verification(endpoint.url, *endpoint.server_urls),
            # no read timeout: a frozen request is silent for as long as the fleet is
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def generate_one(
        self,
        request: GenerationRequest,
        *,
        timeout_s: float | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> GenerationResult:
        """Generate until the request ends by itself. `on_text` receives each piece of text.

        A request that cannot be finished is returned with `error` set and what it got so far.
        `timeout_s` bounds it as a whole, in seconds; without it, it may wait forever.
        """
        progress = Progress()
        try:
            async with asyncio.timeout(timeout_s):
                reason = await self._until_finished(request, progress, on_text)
        except TimeoutError:
            return progress.result(request, "timeout", f"not finished in {timeout_s:g} s")
        except SkyctlError as error:
            return progress.result(request, "error", error.message)
        return progress.result(request, reason)

    async def generate_many(
        self,
        requests: Sequence[GenerationRequest],
        *,
        concurrency: int = 32,
        timeout_s: float | None = None,
        on_done: Callable[[GenerationResult], None] | None = None,
    ) -> AsyncIterator[GenerationResult]:
        """Results in the order of `requests`, at most `concurrency` of them under way at once.

        `on_done` receives each result as it finishes.
        """
        slots = asyncio.Semaphore(concurrency)

        async def generate_in_slot(request: GenerationRequest) -> GenerationResult:
            async with slots:
                result = await self.generate_one(request, timeout_s=timeout_s)
            if on_done is not None:
                on_done(result)
            return result

        tasks = [asyncio.create_task(generate_in_slot(request)) for request in requests]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        session_id: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """POST a body (the model is added) that is answered in one piece; returns the answer's
        JSON.

        An answer that was cut off (aborted, 5xx, a broken connection) is requested again from the
        start. `timeout_s` bounds it as a whole, in seconds; without it, it may wait forever.

        Raises:
            ServerError: it was refused, or given up after `max_retries`.
            DeadlineExceeded: there is no whole answer after `timeout_s` seconds.
        """
        attempts = pauses = 0
        bases = self._bases(path)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        base = bases[attempts % len(bases)]
                        return await self._ask_once(base, path, body, session_id)
                    except Paused:
                        pauses += 1
                        await self._sleep(self._retry.wait_s(min(pauses, _PAUSE_STEPS)))
                        continue
                    except Cut as cut:
                        attempts += 1
                        if attempts > self._retry.max_retries:
                            message = f"given up after {attempts} attempts: {cut}"
                            raise ServerError(message) from cut
                    await self._sleep(self._retry.wait_s(attempts))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{path}: no answer in {timeout_s:g} s") from error

    async def _ask_once(
        self, base: str, path: str, body: Mapping[str, Any], session_id: str | None
    ) -> dict[str, Any]:
        whole = {"model": self.endpoint.model, **body}
        try:
            async with self._answer(base, path, whole, session_id) as response:
                answer = json.loads(await response.aread())
        except ValueError as error:
            raise ServerError(f"{path} answered with something that is not JSON") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{path} answered with something that is not a JSON object")
        if any(c.get("finish_reason") == "abort" for c in answer.get("choices") or ()):
            raise Cut("the server aborted it")
        return answer

    @contextlib.asynccontextmanager
    async def _answer(
        self, base: str, path: str, body: Mapping[str, Any], session_id: str | None
    ) -> AsyncIterator[httpx.Response]:
        """A successful answer, to be read inside.

        Raises:
            Paused: the server is paused and refuses requests.
            Cut: it did not come, or broke off.
            ServerError: the server refused it for good.
        """
        headers = self._headers(session_id)
        try:
            async with self._http.stream("POST", base + path, json=body, headers=headers) as answer:
                if not answer.is_success:
                    text = error_text((await answer.aread()).decode(errors="replace"))
                    reason = " ".join(text.split())[:300] or answer.reason_phrase
                    message = f"{path} answered {answer.status_code}: {reason}"
                    if REFUSED_WHILE_PAUSED in text:
                        raise Paused(message)
                    if answer.status_code in _RETRIED_STATUSES:
                        raise Cut(message)
                    raise ServerError(message, status=answer.status_code)
                yield answer
        except httpx.TransportError as error:
            raise Cut(f"the connection broke ({error or type(error).__name__})") from error

    async def _until_finished(
        self,
        request: GenerationRequest,
        progress: Progress,
        on_text: Callable[[str], None] | None,
    ) -> str:
        while True:
            had = len(progress.tokens)
            try:
                return await self._attempt(request, progress, on_text)
            except ServerError as error:
                if progress.without_ids or NO_TOKEN_IDS not in error.message:
                    raise
                progress.without_ids = True
                continue
            except Paused:
                progress.retries += 1
                await self._sleep(self._retry.wait_s(min(progress.retries, _PAUSE_STEPS)))
                continue
            except Cut as cut:
                if len(progress.tokens) >= request.max_tokens:
                    return "length"  # cut off after its last token: nothing is left to generate
                await self._drop_textless(progress)
                progress.fruitless = 1 if len(progress.tokens) > had else progress.fruitless + 1
                if progress.fruitless > self._retry.max_retries:
                    raise ServerError(
                        f"given up after {progress.fruitless} attempts in a row: {cut}"
                    ) from cut
            continues = all(request.body.get(key) in (None, 0) for key in _NOT_CONTINUED)
            # without token ids there is nothing to continue from
            if not progress.tokens or not continues:
                progress.tokens, progress.logprobs, progress.text = [], [], ""
                progress.versions = []
            progress.retries += 1
            await self._sleep(self._retry.wait_s(progress.fruitless))

    async def _attempt(
        self,
        request: GenerationRequest,
        progress: Progress,
        on_text: Callable[[str], None] | None,
    ) -> str:
        """One HTTP request; tokens go to `progress`. Returns the finish reason, raises as `_answer`
        does.
        """
        path, body = request_body(
            request, self.endpoint.model, progress.prompt_ids, progress.tokens
        )
        if progress.without_ids:
            del body["return_token_ids"]
        async with self._answer(self.endpoint.url, path, body, request.session_id) as response:
            async for piece in read_pieces(event_lines(response.aiter_text())):
                progress.add(piece)
                if on_text is not None and piece.text:
                    on_text(piece.text)
                if piece.finish_reason == "abort":
                    raise Cut("the server aborted it")
                if piece.finish_reason is not None:
                    return piece.finish_reason
        raise Cut("the stream ended early")

    async def _drop_textless(self, progress: Progress) -> None:
        """Drop tokens at the end that stop inside a character; they are generated again.

        A prompt that ends inside a character makes vLLM repeat the text of the whole prompt.
        """
        progress.drop(progress.textless)
        progress.textless = 0
        while progress.unclear and await self._ends_inside_character(progress.tokens):
            progress.drop(1)
            progress.unclear -= 1
        progress.unclear = 0

    async def _ends_inside_character(self, tokens: Sequence[int]) -> bool:
        body = {"model": self.endpoint.model, "tokens": list(tokens[-_CHARACTER_TOKENS:])}
        for url in self._bases(DETOKENIZE):
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
                response = await self._http.post(
                    url + DETOKENIZE,
                    json=body,
                    headers=self._headers(None),
                    timeout=DETOKENIZE_TIMEOUT_S,
                )
                return bool(response.json()["prompt"].endswith("\ufffd"))
        return False  # unknown: treat it like the others, at the risk of a rare repeated text

    def _bases(self, path: str) -> tuple[str, ...]:
        """URLs to try for `path`: the router strips some paths of the key."""
        direct = self.endpoint.server_urls if path in (TOKENIZE, DETOKENIZE) else ()
        return direct or (self.endpoint.url,)

    def _headers(self, session: str | None) -> dict[str, str]:
        headers = {"X-Weight-Version-Fields": "true"}
        if self.endpoint.api_key:
            headers["Authorization"] = f"Bearer {self.endpoint.api_key}"
        if session:
            headers["X-Session-ID"] = session
        return headers


def request_body(
    request: GenerationRequest, model: str, prompt_ids: list[int] | None, tokens: Sequence[int]
) -> tuple[str, dict[str, Any]]:
    """Path and body of the next attempt, given the `tokens` that earlier ones brought.

    With tokens it is always a completion of token ids: a chat cannot be continued as a chat.
    """
    body: dict[str, Any] = {
        "model": model,
        **request.body,
        "stream": True,
        "return_token_ids": True,
    }
    if not tokens or prompt_ids is None:
        if request.messages is not None:
            return CHAT, {**body, "messages": request.messages}
        return COMPLETIONS, {**body, "prompt": request.prompt}
    body = {key: value for key, value in body.items() if key not in _CHAT_ONLY}
    body["max_tokens"] = request.max_tokens - len(tokens)
    if "min_tokens" in body:
        body["min_tokens"] = max(0, int(body["min_tokens"]) - len(tokens))
    return COMPLETIONS, {**body, "prompt": [*prompt_ids, *tokens]}


def failure(results: Sequence[GenerationResult]) -> SkyctlError | None:
    """The error of a whole run: PartialFailure, or ServerError if all failed.

    DeadlineExceeded if all of them ran out of time; None if none failed.
    """
    failed = [result for result in results if result.error]
    if not failed:
        return None
    total = count_of(len(results), "request")
    message = f"{len(failed)} of {total} failed ({failed[0].id}: {failed[0].error})"
    if len(failed) < len(results):
        return PartialFailure(message, outcomes=results)
    if all(result.finish_reason == "timeout" for result in failed):
        return DeadlineExceeded(message)
    return ServerError(message)

"""The connections of one fleet in one event loop: opened on first use, closed together; and the
data plane over them: prompts in, answers out, through the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self, overload
from weakref import WeakKeyDictionary

from skyctl.core.registry import FleetRef, RemoteRef
from skyctl.errors import ServerError, UsageError
from skyctl.generate.prompts import GenerationRequest, check_body, check_session, parse_request
from skyctl.generate.requests import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
    Endpoint,
    GenerationClient,
    GenerationResult,
    failure,
)
from skyctl.http.trust import needs_trust
from skyctl.service import FleetService, connect
from skyctl.service.endpoint import find_endpoint

GENERATE_TIMEOUT_S = 60.0

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with the keys of a prompts file's line (`prompt`, `messages` or
`prompt_token_ids`, `id`, `session_id`, and any sampling parameter)."""

Messages = Sequence[Mapping[str, Any]]


class Session:
    """Shared by all tasks of a loop. `users` counts the `async with` blocks that are open."""

    def __init__(self, ref: FleetRef | RemoteRef) -> None:
        self._ref = ref
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._connected: FleetService | None = None
        self._generation: dict[str | None, GenerationClient] = {}
        self._located: set[str | None] = set()
        self.users = 0

    async def connected(self) -> FleetService:
        """The fleet's operations."""
        async with self._opening:
            if self._connected is None:
                self._connected = await self._stack.enter_async_context(connect(self._ref))
            return self._connected

    async def generation(
        self, server: str | None = None, timeout_s: float | None = None
    ) -> GenerationClient:
        """The data plane: through the router, or straight to one server.

        Raises:
            FleetDownError, NotFoundError, ServerError: there is nothing to send requests to.
            DeadlineExceeded: what there is was not known after `timeout_s` seconds.
        """
        fleet = await self.connected()
        async with self._opening:
            if server not in self._located:
                endpoint = await find_endpoint(fleet, server=server, timeout_s=timeout_s)
                client = self._generation.get(server)
                if client is None or not _interchangeable(client.endpoint, endpoint):
                    client = await self._stack.enter_async_context(GenerationClient(endpoint))
                    self._generation[server] = client
                client.endpoint = endpoint
                self._located.add(server)
            return self._generation[server]

    def forget_endpoints(self) -> None:
        """Look the endpoints up again at the next request: the fleet may have changed. The clients
        stay: one more after each failure would pile up connections in a long job.
        """
        self._located.clear()

    async def close(self) -> None:
        """Close every connection."""
        await self._stack.aclose()


def _interchangeable(before: Endpoint, endpoint: Endpoint) -> bool:
    """Whether one client can go on at another endpoint, with its requests under way."""
    needs_tls = {needs_trust(e.url, *e.server_urls) for e in (before, endpoint)}
    return before.model == endpoint.model and len(needs_tls) == 1


class SessionHolder:
    """A fleet without connections, and one session per event loop that entered it.

    Pickling keeps the fleet only.
    """

    def __init__(self, ref: FleetRef | RemoteRef) -> None:
        self._ref = ref
        self._sessions: MutableMapping[asyncio.AbstractEventLoop, Session] = WeakKeyDictionary()
        self._sends_files = False
        """Servers could not copy an adapter out of this process's memory: files have the next."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._ref,)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = Session(self._ref)
        self._sessions[loop].users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        session = self._sessions[loop]
        session.users -= 1
        if not session.users:
            del self._sessions[loop]
            await session.close()

    def _current(self) -> Session:
        """The loop's session; it has been entered."""
        return self._sessions[asyncio.get_running_loop()]

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        """The loop's session, or one for this call only."""
        async with self:
            yield self._current()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[FleetService]:
        async with self._session() as session:
            yield await session.connected()


class GeneratingFleet(SessionHolder):
    """The part of `Fleet` that sends requests."""

    @overload
    async def generate(self, prompts: str, **options: Any) -> GenerationResult: ...

    @overload
    async def generate(
        self, prompts: Sequence[Prompt], **options: Any
    ) -> list[GenerationResult]: ...

    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        *,
        chat: bool = False,
        session_id: str | None = None,
        server: str | None = None,
        concurrency: int = 32,
        n: int = 1,
        timeout_s: float | None = None,
        on_done: Callable[[GenerationResult], None] | None = None,
        check: bool = True,
        **sampling: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Generate from one text, or from a list of prompts; results in their order.

        Requests frozen by a pause or a push simply wait. A request that was cut off (aborted, its
        server died) continues with the tokens it has. `sampling` are vLLM's parameters (max_tokens,
        temperature, top_p, stop, seed, …) for prompts that do not set their own; with logprobs=0
        each result has the log probability of every token it sampled.

        Args:
            prompts: see `Prompt`. `chat` sends texts as a user's message.
            session_id: sticky routing policies keep requests of one session on one server.
            server: straight to this server instead of through the router.
            n: answers to each prompt that does not set its own number, one after the other in the
                result. For a single text, pass a list of it.
            timeout_s: deadline of each request, waits included; None waits forever.
            on_done: receives each result as it finishes.

        Raises:
            UsageError: a prompt or `concurrency` is invalid, or `n` is used with a single text.
            PartialFailure: with `check`, some requests were given up; `outcomes` has the results.
            ServerError, DeadlineExceeded: with `check`, all of them were.
        """
        single = isinstance(prompts, str)
        if single and n != 1:
            raise UsageError("several answers are a list", hint="generate([prompt], n=…)")
        if concurrency < 1:
            raise UsageError(f"concurrency={concurrency} would send no request")
        requests = _requests(
            [prompts] if isinstance(prompts, str) else prompts,
            {"n": n, **sampling},
            chat=chat,
            session_id=session_id,
        )
        async with self._session() as session:
            client = await session.generation(server, timeout_s)
            results = [
                result
                async for result in client.generate_many(
                    requests, concurrency=concurrency, timeout_s=timeout_s, on_done=on_done
                )
            ]
            error = failure(results)
            if error is not None:
                session.forget_endpoints()
                if check:
                    raise error
        return results[0] if single else results

    async def chat(
        self,
        messages: Messages,
        *,
        session_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> dict[str, Any]:
        """One chat completion: OpenAI's request parameters in, the answer's JSON out.

        It waits while the fleet is frozen, and is sent again from the start if it was cut off.
        """
        body = {"messages": list(messages), **parameters}
        return await self._ask(CHAT, body, session_id, timeout_s)

    async def completion(
        self,
        prompt: str | Sequence[int],
        *,
        session_id: str | None = None,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> dict[str, Any]:
        """One completion of a text or of token ids; otherwise as `chat`."""
        text = prompt if isinstance(prompt, str) else list(prompt)
        return await self._ask(COMPLETIONS, {"prompt": text, **parameters}, session_id, timeout_s)

    async def tokenize(
        self, prompt: str | Messages, *, timeout_s: float = GENERATE_TIMEOUT_S, **parameters: Any
    ) -> list[int]:
        """Token ids of a text, or of messages under the model's chat template.

        `parameters` are vLLM's, such as add_special_tokens or add_generation_prompt.
        """
        body = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        answer = await self._ask(TOKENIZE, {**body, **parameters}, None, timeout_s)
        try:
            return [int(token) for token in answer["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{TOKENIZE} answered without tokens") from error

    async def detokenize(
        self, tokens: Sequence[int], *, timeout_s: float = GENERATE_TIMEOUT_S
    ) -> str:
        """The text of token ids."""
        answer = await self._ask(DETOKENIZE, {"tokens": list(tokens)}, None, timeout_s)
        if not isinstance(answer.get("prompt"), str):
            raise ServerError(f"{DETOKENIZE} answered without a text")
        return str(answer["prompt"])

    async def _ask(
        self, path: str, body: Mapping[str, Any], session_id: str | None, timeout_s: float | None
    ) -> dict[str, Any]:
        if body.get("stream"):
            raise UsageError("an answer comes in one piece here", hint="take it out: stream")
        check_session(session_id, path)
        check_body(body, path)
        async with self._session() as session:
            client = await session.generation(timeout_s=timeout_s)
            try:
                return await client.ask(path, body, session_id=session_id, timeout_s=timeout_s)
            except ServerError:
                session.forget_endpoints()
                raise


def _requests(
    prompts: Sequence[Prompt],
    defaults: Mapping[str, Any],
    *,
    chat: bool,
    session_id: str | None,
) -> list[GenerationRequest]:
    """One request per answer. Raises UsageError for an invalid prompt."""
    requests: list[GenerationRequest] = []
    for number, prompt in enumerate(prompts):
        line = {"session_id": session_id, **_line(prompt, number)}
        requests += parse_request(
            line, f"prompt {number}", number=number, defaults=defaults, chat=chat
        )
    return requests


def _line(prompt: Prompt, number: int) -> Mapping[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, Sequence):
        return {"prompt_token_ids": list(prompt)}
    raise UsageError(
        f"prompt {number} is of type {type(prompt).__name__}",
        hint="a prompt is text, a list of token ids, or a mapping; give a list of prompts",
    )

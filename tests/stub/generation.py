"""The stub's tokens: a pure function of the weights' digest and every token before.

So a request that goes on from prompt + tokens gives what one undisturbed request would have, and
a push changes all answers. Characters are tokens: the text `ab` is the ids [97, 98].
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.stub.state import Scheduler, StubEngine


@dataclass(frozen=True)
class Token:
    """One generated token; the last has a `finish_reason` (and no id when aborted)."""

    id: int | None
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "" if self.id is None else chr(self.id)


def next_token(digest: str, tokens: Sequence[int]) -> int:
    """A lower-case letter."""
    seen = hashlib.sha256(f"{digest}:{list(tokens)}".encode()).digest()
    return ord("a") + seen[0] % 26


def prompt_ids(body: dict[str, Any]) -> list[int]:
    """Token ids of a completion's or a chat's prompt."""
    if "messages" in body:
        lines = [f"{m['role']}: {m['content']}\n" for m in body["messages"]]
        return [ord(c) for c in "".join(lines) + "assistant:"]
    prompt = body["prompt"]
    return [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)


class TokenGate:
    """Lets tests decide how many tokens the server may produce. Open unless `hold` was called."""

    def __init__(self) -> None:
        self._permits: asyncio.Semaphore | None = None

    def hold(self) -> None:
        self._permits = asyncio.Semaphore(0)

    def grant(self, tokens: int) -> None:
        assert self._permits is not None
        for _ in range(tokens):
            self._permits.release()

    async def pass_one(self) -> None:
        if self._permits is None:
            await asyncio.sleep(0)
        else:
            await self._permits.acquire()


async def generate(
    engine: StubEngine,
    gate: TokenGate,
    prompt: Sequence[int],
    max_tokens: int,
    delay_s: float,
    adapter: str = "",
) -> AsyncIterator[Token]:
    """Tokens of one request under the engine's scheduler: queued, frozen or aborted as it says.
    `adapter` is the digest of its LoRA weights."""
    engine.queued += 1
    try:
        await _until(engine, lambda: not engine.paused)
    finally:
        engine.queued -= 1
    engine.requests += 1
    engine.prompt_tokens += len(prompt)
    aborts = engine.abort_count
    tokens = list(prompt)
    try:
        for count in range(1, max_tokens + 1):
            if not await _may_step(engine, gate, aborts, delay_s):
                yield Token(None, "abort")
                return
            tokens.append(next_token(engine.digest + adapter, tokens))
            engine.generation_tokens += 1
            yield Token(tokens[-1], "length" if count == max_tokens else None)
    finally:
        engine.requests -= 1
        async with engine.changed:
            engine.changed.notify_all()


async def _may_step(engine: StubEngine, gate: TokenGate, aborts: int, delay_s: float) -> bool:
    """Wait for one scheduler step; False when the request was aborted meanwhile."""

    def aborted() -> bool:
        return engine.abort_count != aborts

    await asyncio.sleep(delay_s)
    step = asyncio.create_task(gate.pass_one())
    abort = asyncio.create_task(_until(engine, aborted))
    try:
        await asyncio.wait({step, abort}, return_when=asyncio.FIRST_COMPLETED)
        await _until(engine, lambda: aborted() or engine.scheduler is not Scheduler.PAUSED_ALL)
        return not aborted()
    finally:
        step.cancel()
        abort.cancel()


async def _until(engine: StubEngine, condition: Callable[[], bool]) -> None:
    async with engine.changed:
        await engine.changed.wait_for(condition)


def expected(digest: str, prompt: str, count: int) -> list[int]:
    """The tokens of one undisturbed request to these weights."""
    tokens = prompt_ids({"prompt": prompt})
    for _ in range(count):
        tokens.append(next_token(digest, tokens))
    return tokens[-count:]

"""A streaming completion that a test can look into while it runs."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

from tests.integration.fleet_cli import bearer, greedy_body


class StreamingCompletion:
    """Reads one greedy streaming completion in a thread; `tokens` grows as it arrives."""

    def __init__(self, url: str, model: str, prompt: str, max_tokens: int, *, key: str) -> None:
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self.finish_reason: str | None = None
        self._grew = threading.Condition()
        self._body: dict[str, Any] = {**greedy_body(model, prompt, max_tokens), "stream": True}
        self._url, self._headers = f"{url}/v1/completions", bearer(key)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            timeout = httpx.Timeout(300, connect=10)
            with httpx.stream(
                "POST", self._url, json=self._body, headers=self._headers, timeout=timeout
            ) as answer:
                answer.raise_for_status()
                rest = b""
                for part in answer.iter_bytes():  # lines of httpx end at characters that text has
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            self._take(json.loads(line[len(b"data: ") :])["choices"][0])
        except BaseException as error:
            self.error = error
        finally:
            with self._grew:
                self._grew.notify_all()

    def _take(self, choice: dict[str, Any]) -> None:
        with self._grew:
            self.tokens += choice.get("token_ids") or []
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._grew.notify_all()

    def wait_for_tokens(self, count: int, timeout_s: float = 120) -> None:
        """Block until `count` tokens have come (or the stream ended)."""
        deadline = time.monotonic() + timeout_s
        with self._grew:
            while len(self.tokens) < count and self._thread.is_alive():
                if not self._grew.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"{len(self.tokens)} of {count} tokens in {timeout_s} s")
        assert self.error is None, self.error

    def grows_within(self, seconds: float) -> bool:
        """True when a token arrives within `seconds`."""
        with self._grew:
            before = len(self.tokens)
            return self._grew.wait_for(lambda: len(self.tokens) > before, seconds)

    def result(self, timeout_s: float = 300) -> list[int]:
        """All token ids, once the stream has ended."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still streaming after {timeout_s} s"
        assert self.error is None, self.error
        return self.tokens

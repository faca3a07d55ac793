"""Clients of a fleet's router that ask one request after the other, and count what fails."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import httpx


class Load:
    """As many clients as were last asked for, each with the same request. `answers` by text."""

    def __init__(self, url: str, key: str, body: Mapping[str, Any]) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._body = body
        self._tasks: list[asyncio.Task[None]] = []
        self._over: list[asyncio.Event] = []
        self.answers: list[str] = []
        self.failures: list[str] = []

    async def become(self, clients: int) -> None:
        """So many clients from now on; those that go finish their requests first."""
        while len(self._tasks) < clients:
            self._over.append(asyncio.Event())
            self._tasks.append(asyncio.create_task(self._ask(self._over[-1])))
        ending, self._tasks = self._tasks[clients:], self._tasks[:clients]
        for over in self._over[clients:]:
            over.set()
        del self._over[clients:]
        await asyncio.gather(*ending)

    async def _ask(self, over: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=120, trust_env=False, headers=self._headers) as http:
            while not over.is_set():
                try:
                    answer = await http.post(f"{self._url}/v1/completions", json=self._body)
                    answer.raise_for_status()
                    self.answers.append(answer.json()["choices"][0]["text"])
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))


class ThreadedLoad:
    """Two clients that ask the router again and again."""

    def __init__(self, url: str, key: str, model: str = "model") -> None:
        self.answers, self.failures = 0, list[str]()
        self._url, self._key, self._over = url, key, threading.Event()
        self._body = json.dumps({"model": model, "prompt": "a", "max_tokens": 4}).encode()
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        while not self._over.is_set():
            request = urllib.request.Request(f"{self._url}/v1/completions", self._body, headers)
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    answer.read()
                self.answers += 1
            except OSError as error:
                self.failures.append(repr(error))
            time.sleep(0.1)  # a server that starts beside it needs the processor

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

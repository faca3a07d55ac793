"""Requests that demand a version, through the router, over rolling pushes: none is answered by
another."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.faults.stub_fleet import routed_fleet
from tests.stub.generation import expected
from tests.stub.state import digest_of_checkpoint
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

REQUESTS = int(os.environ.get("SKYCTL_TEST_REQUESTS", "2000"))
"""10,000 of them take a few minutes."""
CLIENTS = 24
TOKENS = 4


class Demands:
    """Clients that demand a version with every request, and compare the tokens of each answer with
    those of the checkpoint that it names."""

    def __init__(self, url: str, model: str, digests: dict[str, str]) -> None:
        self.url, self.model, self.digests = url, model, digests
        self.order = list(digests)
        self.newest = 0
        self.asked = 0
        self.statuses: Counter[int] = Counter()
        self.straddled = 0

    async def client(self, number: int) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            while self.asked < REQUESTS:
                self.asked += 1
                await self._ask(client, f"{number} {self.asked}", self.asked % 3)
                await asyncio.sleep(0)

    async def _ask(self, client: httpx.AsyncClient, prompt: str, kind: int) -> None:
        label = self.order[max(0, self.newest - self.asked % 2)]
        headers = [{"X-Weight-Version-Exact": label}, {"X-Weight-Version-Min": label}, {}][kind]
        body = {"model": self.model, "prompt": prompt, "max_tokens": TOKENS}
        answer = await client.post(f"{self.url}/v1/completions", json=body, headers=headers)
        self.statuses[answer.status_code] += 1
        if answer.status_code != 200:
            assert kind < 2 and answer.status_code == 409, answer.text
            return
        begin = answer.headers["x-weight-version-begin"]
        end = answer.headers["x-weight-version-end"]
        tokens = answer.json()["choices"][0]["token_ids"]
        if kind == 0:
            assert (begin, end) == (label, label)
        elif kind == 1:
            assert self.order.index(begin) >= self.order.index(label)
        if begin == end:
            assert tokens == expected(self.digests[end], prompt, TOKENS), (kind, begin, end)
        else:
            self.straddled += 1


def test_no_answer_is_of_another_version_than_demanded(tmp_path: Path) -> None:
    extra = "auth: none\ncheck_args: false\nargs: {token-delay-s: 0.01}\n"
    fleet = routed_fleet(tmp_path, extra, replicas=3)
    write_checkpoint(tmp_path / "model", tiny_tensors(1))
    digests = {"base": digest_of_checkpoint(str(tmp_path / "model"))}
    for seed in range(2, 6):
        path = write_checkpoint(tmp_path / f"step-{seed}", tiny_tensors(seed))
        digests[f"step-{seed}"] = digest_of_checkpoint(str(path))
    fleet.run("up")
    try:
        urls: dict[str, Any] = fleet.json("urls")["data"]
        demands = Demands(urls["router"], urls["model"], digests)

        async def pushes() -> None:
            for number, label in enumerate(demands.order[1:], 1):
                goal = REQUESTS * number // len(demands.order)
                while demands.asked < goal:  # noqa: ASYNC110 - what is waited for is elsewhere
                    await asyncio.sleep(0.02)
                how = ("--rolling", "1") if number % 2 else ()
                await asyncio.to_thread(
                    fleet.run, "sync-weights", label, "--weight-version", label, *how
                )
                demands.newest = number

        async def work() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pushes())
                for number in range(CLIENTS):
                    tasks.create_task(demands.client(number))

        asyncio.run(work())
        states = fleet.json("weights")["data"]
        assert states["version"] == demands.order[-1]
        assert {row["version"] for row in states["servers"]} == {demands.order[-1]}
        assert demands.statuses[200] > REQUESTS / 2 and demands.statuses[409] > 0
        print(dict(demands.statuses), "straddled", demands.straddled)
    finally:
        fleet.run("down", "--drain-timeout", "0")

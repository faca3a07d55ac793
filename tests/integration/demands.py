"""Requests that demand a weight version, over pushes to a real fleet; each token of an answer is
compared with the checkpoints that its spans name.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from skyctl.generate.prompts import event_lines
from tests.integration.fleet_cli import FleetCli, bearer, greedy_body
from tests.integration.reference import model_of

CLIENTS = 12
TOKENS = 128
TIE = 1e-4
"""Logits that differ by less are equal: vLLM and transformers add in different orders."""
EXACT, MIN = "x-weight-version-exact", "x-weight-version-min"
CHECKPOINTS = ("a", "b")
"""Below `checkpoints/` of the fleet; pushed in turn."""


@dataclass(frozen=True)
class Answer:
    """What a request got."""

    prompt: list[int]
    """Its token ids."""
    demand: dict[str, str]
    """The header that it sent, if any."""
    status: int
    """409 also where a stream ended with that error."""
    tokens: list[int] = field(default_factory=list)
    """Token ids, also of a stream that ended early."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """Labels, and how many tokens each made, where the answer says so."""


class Demands:
    """Clients behind the router, and pushes meanwhile."""

    def __init__(self, fleet: FleetCli, requests: int) -> None:
        self._fleet, self._requests = fleet, requests
        self._urls, self._key = fleet.data("urls"), fleet.key
        self._dice = random.Random(1)
        self._sent, self._pushed = 0, False
        self.labels: list[str] = []
        """In the order of their pushes, whose checkpoints take turns."""
        self.answers: list[Answer] = []

    def run(self, pushes: int) -> None:
        """Send at least as many requests, until the last of these pushes, by `keep` and rolling in
        turn, has ended.
        """
        self._push()
        asyncio.run(self._work(pushes))

    def checkpoint(self, label: str) -> Path:
        name = CHECKPOINTS[self.labels.index(label) % len(CHECKPOINTS)]
        return self._fleet.directory / "checkpoints" / name

    def _push(self) -> None:
        number = len(self.labels)
        label, name = f"v{number}", CHECKPOINTS[number % len(CHECKPOINTS)]
        how = ("--rolling", "1") if number % 2 == 0 and number else ("--mode", "keep")
        self.labels.append(label)
        checkpoint = f"checkpoints/{name}"
        self._fleet.run("sync-weights", checkpoint, "--weight-version", label, *how)

    async def _work(self, pushes: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._client(number))
            for number in range(1, pushes + 1):
                while self._sent < self._requests * number // (pushes + 1):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await asyncio.to_thread(self._push)
            self._pushed = True

    async def _client(self, number: int) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            while self._sent < self._requests or not self._pushed:
                self._sent += 1
                label = self.labels[-1 - self._sent % min(2, len(self.labels))]
                kind = self._sent // 2 % 4
                demand = {MIN: label} if kind == 0 else {EXACT: label} if kind < 3 else {}
                prompt = [self._dice.randrange(10, 250) for _ in range(8)]
                body = greedy_body(self._urls["model"], "", TOKENS) | {"prompt": prompt}
                ask = self._whole if kind == 1 else self._streamed
                headers = {**bearer(self._key), "x-weight-version-fields": "true", **demand}
                self.answers.append(await ask(client, Answer(prompt, demand, 0), body, headers))

    async def _whole(
        self, client: httpx.AsyncClient, answer: Answer, body: dict[str, Any], headers: Any
    ) -> Answer:
        url = f"{self._urls['router']}/v1/completions"
        got = await client.post(url, json=body, headers=headers)
        if got.status_code != 200:
            return Answer(answer.prompt, answer.demand, got.status_code)
        tokens, named = got.json()["choices"][0]["token_ids"], got.json()["weight_versions"]
        assert named["begin"] == got.headers["x-weight-version-begin"]
        spans = [(named["begin"], len(tokens))] if named["begin"] == named["end"] else []
        return Answer(answer.prompt, answer.demand, 200, tokens, spans)

    async def _streamed(
        self, client: httpx.AsyncClient, answer: Answer, body: dict[str, Any], headers: Any
    ) -> Answer:
        url, body = f"{self._urls['router']}/v1/completions", body | {"stream": True}
        tokens: list[int] = []
        spans: list[tuple[str, int]] = []
        announced: list[str] = []
        async with client.stream("POST", url, json=body, headers=headers) as got:
            if (status := got.status_code) != 200:
                return Answer(answer.prompt, answer.demand, status)
            async for line in event_lines(got.aiter_text()):
                if line.startswith(": weight-versions "):
                    named = json.loads(line.removeprefix(": weight-versions "))
                    spans = [(span["version"], span["tokens"]) for span in named["spans"]]
                elif line.startswith(": weight-version "):
                    announced.append(line.removeprefix(": weight-version "))
                elif line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        status = event["error"]["code"]
                        break
                    tokens += event["choices"][0].get("token_ids") or []
        assert status != 200 or announced == [label for label, _ in spans]
        return Answer(answer.prompt, answer.demand, status, tokens, spans)


class Offline:
    """What the checkpoints generate."""

    def __init__(self, checkpoints: Sequence[Path]) -> None:
        self._models = {checkpoint: model_of(checkpoint) for checkpoint in checkpoints}

    def gaps(self, checkpoint: Path, prompt: list[int], tokens: list[int]) -> list[float]:
        """How far each token's logit is below that of the model's greedy choice, after all tokens
        before it.
        """
        import torch

        with torch.inference_mode():
            logits = self._models[checkpoint](torch.tensor([prompt + tokens])).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        return [float(gap) for gap in rows.max(-1).values - chosen]


def judged(demands: Demands, offline: Offline) -> tuple[list[str], Counter[str]]:
    """What is wrong with the answers, and how many of each kind there were."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for answer in demands.answers:
        counts[f"{next(iter(answer.demand), 'no demand')} {answer.status}"] += 1
        if answer.status == 200 and len(answer.spans) > 1:
            counts["straddled"] += 1
        wrong += _problems(demands, offline, answer)
    return wrong, counts


def _problems(demands: Demands, offline: Offline, answer: Answer) -> list[str]:
    if answer.status != 200:
        if answer.status != 409 or not answer.demand:
            return [f"status {answer.status} to {answer.demand}"]
        # of a stream that lost its version before its end
        spans = [(label, len(answer.tokens)) for label in answer.demand.values()]
        if MIN in answer.demand and answer.tokens:
            return [f"a stream that demanded {answer.demand} lost it"]
    else:
        spans = answer.spans
        if not sum(tokens for _, tokens in spans) == len(answer.tokens) == TOKENS:
            return [f"spans {spans} of {len(answer.tokens)} tokens"]
    order = demands.labels.index
    if EXACT in answer.demand and {label for label, _ in spans} - set(answer.demand.values()):
        return [f"{spans}, demanded {answer.demand}"]
    if MIN in answer.demand and any(order(v) < order(answer.demand[MIN]) for v, _ in spans):
        return [f"{spans}, demanded {answer.demand}"]
    problems, begin = [], 0
    for label, count in spans:
        if count:
            tokens = answer.tokens[: begin + count]
            gaps = offline.gaps(demands.checkpoint(label), answer.prompt, tokens)[begin:]
            if max(gaps) > TIE:
                problems.append(f"{spans}: tokens of {label} are not its: {gaps}")
        begin += count
    return problems

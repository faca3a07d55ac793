"""Clients that ask short greedy questions without end, and write down every request."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak.checker import Expected, Outcome, Record
from benchmarks.soak.fleet import SoakFleet
from skyctl.errors import SkyctlError

LONGEST = 8
"""Tokens asked for at most."""
GRACE_S = 5.0
_WORDS = (
    "fleet",
    "river",
    "bread",
    "token",
    "quiet",
    "router",
    "green",
    "kettle",
    "seven",
    "window",
)
_AFTER_A_FAILURE_S = 0.25


class Clients:
    """`count` tasks that generate until told to stop; `records` has what came of each request."""

    def __init__(self, fleet: SoakFleet, prompts: Sequence[str], log: Path, *, seed: int) -> None:
        self.records: list[Record] = []
        self._fleet, self._prompts, self._seed = fleet, prompts, seed
        self._log = log.open("w")
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sent = 0
        headers = {"Authorization": f"Bearer {fleet.api_key}"} if fleet.api_key else {}
        self.http = httpx.AsyncClient(trust_env=False, timeout=None, headers=headers)

    def start(self, count: int) -> None:
        self._tasks = [asyncio.create_task(self._generate(number)) for number in range(count)]

    async def stop(self) -> None:
        """No new requests; those under way come to their end within their bound."""
        self._stop.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.http.aclose()
        self._log.close()

    async def _generate(self, client: int) -> None:
        dice = random.Random(f"{self._seed}/{client}")
        while not self._stop.is_set():
            direct = dice.random() < 0.15
            via = dice.choice(sorted(self._fleet.urls)) if direct else "router"
            rank = dice.choice(self._fleet.ranks(via))
            prompt = dice.randrange(len(self._prompts))
            record = await self._ask(via, rank, prompt, dice.randint(1, LONGEST))
            self.records.append(record)
            self._log.write(json.dumps(record.to_json()) + "\n")
            if record.outcome != "answered":
                await asyncio.sleep(_AFTER_A_FAILURE_S)

    async def _ask(self, via: str, rank: int | None, prompt: int, wanted: int) -> Record:
        self._sent += 1
        number, began = self._sent, time.time()
        url = self._fleet.router_url if via == "router" else self._fleet.urls[via]
        bound_s = self._fleet.bound_s
        # the real router ends a request by itself; a server that is asked directly does not
        own = None if via == "router" and not self._fleet.stub else bound_s
        outcome: Outcome = "failed"
        status, tokens, why = 0, (), ""
        try:
            async with asyncio.timeout(bound_s + GRACE_S):
                answer = await self.http.post(
                    f"{url}/v1/completions",
                    json=_body(self._fleet.model, self._prompts[prompt], wanted),
                    headers=_of_rank(rank),
                    timeout=own,
                )
                status = answer.status_code
                if status == 200:
                    tokens = tuple(answer.json()["choices"][0]["token_ids"])
                    outcome = "answered"
                else:
                    why = answer.text[:200]
        except TimeoutError:
            outcome, why = "hung", f"no answer in {bound_s + GRACE_S:g} s"
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            why = repr(error)[:200]
        return Record(number, via, prompt, wanted, began, time.time(), outcome, status, tokens, why)


def _body(model: str, prompt: str | list[int], wanted: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": wanted,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _of_rank(rank: int | None) -> dict[str, str]:
    return {} if rank is None else {"X-data-parallel-rank": str(rank)}


async def learn(
    fleet: SoakFleet, http: httpx.AsyncClient, *, wanted: int = 10, seed: int = 0
) -> tuple[list[str], Expected, str]:
    """Start the fleet; prompts whose first token tells the weights, what each version answers, and
    the version that is left.

    Every prompt is asked of all servers and ranks, alone and among others; one whose answers differ
    between those is left out. Real servers are started on each version, and must answer the same
    when it is pushed to them. Raises SkyctlError when they do not.
    """
    dice = random.Random(seed)
    candidates = [" ".join(dice.choices(_WORDS, k=3)) for _ in range(wanted * 3)]
    answers: dict[str, dict[str, tuple[int, ...]]] = {}
    ids: dict[str, list[int]] = {}
    if not fleet.stub:
        await fleet.up(model="b", servers=1)
        http.headers["Authorization"] = f"Bearer {fleet.api_key}"
        answers["b"] = await _answers(fleet, http, candidates, ids)
        await fleet.command("down", "--drain-timeout", "0")
    await fleet.up()
    if fleet.api_key:
        http.headers["Authorization"] = f"Bearer {fleet.api_key}"
    answers[fleet.base] = await _answers(fleet, http, candidates, ids)
    for version in ("b", "a"):
        await _push(fleet, version)
        pushed = await _answers(fleet, http, candidates, ids)
        started = answers.setdefault(version, pushed)
        both = started.keys() & pushed.keys()
        if any(started[prompt] != pushed[prompt] for prompt in both):
            raise SkyctlError(f"{version} as pushed answers unlike servers that started on it")
    told = [
        prompt
        for prompt in candidates
        if all(prompt in known for known in answers.values())
        and len({known[prompt][0] for known in answers.values()}) == len(answers)
    ]
    prompts = list(dict.fromkeys(told))[:wanted]
    if not prompts:
        raise SkyctlError("no prompt tells the checkpoints apart")
    expected = Expected(
        {(v, i): known[p] for v, known in answers.items() for i, p in enumerate(prompts)}
    )
    await _learn_frozen(fleet, http, prompts, expected, "b", "a", ids)
    await _push(fleet, "b")
    await _learn_frozen(fleet, http, prompts, expected, "a", "b", ids)
    return prompts, expected, "b"


async def _push(fleet: SoakFleet, version: str) -> None:
    done = await fleet.command(
        "sync-weights", fleet.checkpoint(version), "--weight-version", version
    )
    if done.code != 0:
        raise SkyctlError(f"the first push of {version} ended with {done.code}: {done.said}")


async def _answers(
    fleet: SoakFleet, http: httpx.AsyncClient, prompts: list[str], ids: dict[str, list[int]]
) -> dict[str, tuple[int, ...]]:
    """Answers that are the same on every server, alone and in company."""
    seen: dict[str, set[tuple[int, ...]]] = {prompt: set() for prompt in prompts}
    asking = [(url, rank) for name, url in fleet.urls.items() for rank in fleet.ranks(name)]
    for url, rank in asking:
        for together in (1, 6):
            for start in range(0, len(prompts), together):
                part = prompts[start : start + together]
                asked = [_complete(fleet, http, url, prompt, rank=rank) for prompt in part]
                for prompt, choice in zip(part, await asyncio.gather(*asked), strict=True):
                    seen[prompt].add(tuple(choice["token_ids"]))
                    ids[prompt] = choice["prompt_token_ids"]
    return {prompt: next(iter(found)) for prompt, found in seen.items() if len(found) == 1}


async def _learn_frozen(
    fleet: SoakFleet,
    http: httpx.AsyncClient,
    prompts: list[str],
    expected: Expected,
    old: str,
    new: str,
    ids: dict[str, list[int]],
) -> None:
    """What `new`, which the servers hold, makes of the first tokens of `old`."""
    url = next(iter(fleet.urls.values()))
    for number, prompt in enumerate(prompts):
        known = expected.pure[old, number]
        asked = [
            _complete(fleet, http, url, ids[prompt] + list(known[:k]), LONGEST - k)
            for k in range(1, LONGEST)
        ]
        rest = [tuple(choice["token_ids"]) for choice in await asyncio.gather(*asked)]
        expected.frozen[old, new, number] = [
            known[:k] + tail for k, tail in enumerate(rest, start=1)
        ]


async def _complete(
    fleet: SoakFleet,
    http: httpx.AsyncClient,
    url: str,
    prompt: str | list[int],
    wanted: int = LONGEST,
    rank: int | None = None,
) -> dict[str, Any]:
    body, headers = _body(fleet.model, prompt, wanted), _of_rank(rank)
    answer = await http.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60.0)
    answer.raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice

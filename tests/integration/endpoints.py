"""Where a real fleet answers, and what."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.integration.fleet_cli import FleetCli, ended, greedy
from tests.integration.streaming import StreamingCompletion

PROMPT = "the fleet is up and"
PROMPTS = [[300 + i, 301, 302, 303] for i in range(4)]
LONG = 1000  # tokens: a second at least, in which a pause arrives


class Endpoints:
    """Where the fleet answers."""

    def __init__(self, fleet: FleetCli) -> None:
        urls = fleet.data("urls")
        self.router: str = urls["router"]
        self.servers: dict[str, str] = urls["servers"]
        self.model: str = urls["model"]
        self.key = fleet.key

    def answers(self, max_tokens: int = 24) -> dict[str, list[int]]:
        """Greedy tokens of every server and through the router."""
        urls = {**self.servers, "router": self.router}
        return {
            name: greedy(url, self.model, PROMPT, max_tokens, key=self.key)
            for name, url in urls.items()
        }

    def routed(self, max_tokens: int = 24) -> list[int]:
        """Greedy tokens through the router."""
        return greedy(self.router, self.model, PROMPT, max_tokens, key=self.key)

    def one_answer(self) -> list[int]:
        """The tokens all of them agree on."""
        answers = self.answers()
        assert len({tuple(tokens) for tokens in answers.values()}) == 1, answers
        return answers["router"]


def replicas(fleet: FleetCli) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in fleet.data("status")["replicas"]}


def wait_until(holds: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.2)


def frozen_generation(fleet: FleetCli, endpoints: Endpoints) -> StreamingCompletion:
    """A generation of LONG tokens through the router, frozen in the middle by `pause --mode keep`.

    A busy machine may take longer to pause than the tiny model takes to finish: then once more.
    """
    for _ in range(6):
        with fleet.loaded("pause", "--mode", "keep") as pause:
            stream = StreamingCompletion(
                endpoints.router, endpoints.model, PROMPT, LONG, key=endpoints.key
            )
            stream.wait_for_tokens(1)
            ended(pause())
        while stream.grows_within(0.5):  # tokens already on their way may still arrive
            pass
        if len(stream.tokens) < LONG:
            return stream
        fleet.run("resume")
    raise AssertionError("every generation ended before it could be frozen")


TOKENS = 12


def answers(fleet: FleetCli) -> list[list[int]]:
    """What each server answers, greedily."""
    urls = fleet.data("urls")
    return [
        greedy(url, urls["model"], PROMPT, TOKENS, key=fleet.control_token)
        for url in urls["servers"].values()
    ]

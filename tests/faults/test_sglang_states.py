"""No sequence of verbs ends an SGLang server, and none has it decode KV or weights it must not."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from skyctl.engines.sglang.server import SGLangServer
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from tests.stub.inprocess import StubTransport
from tests.stub.sglang import SGLangEngine, SGLangStub
from tests.stub.sglang_verbs import Verb, Verbs
from tests.tiny import make_tiny_checkpoint

SEQUENCES = 2000
STEPS = 12
WAIT_S = 0.02


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [str(make_tiny_checkpoint(root / name, seed=n)) for n, name in enumerate("ab")]


class Life:
    """One stub server with settings of chance, from its start to the last of `STEPS` verbs."""

    def __init__(self, seed: int, checkpoints: list[str], *, kept: bool) -> None:
        self.chance = random.Random(seed)
        self.engine = SGLangEngine(
            model=checkpoints[0],
            version=self.chance.choice(["0.5.14", "0.5.23"]),
            radix_cache=self.chance.random() < 0.5,
            memory_saver=self.chance.random() < 0.8,
            cpu_backup=self.chance.random() < 0.5,
        )
        self.stub = SGLangStub(self.engine, keeper=kept)
        self.stub.gate.hold()
        client = ControlClient(transport=StubTransport([self.stub]))
        target = ServerTarget("s-0", "http://stub-0", engine="sglang")
        server = SGLangServer(client, target, timeout_s=0.5)
        server.probe_s = WAIT_S
        self.verbs = Verbs(server, client, checkpoints, self.chance, wait_s=WAIT_S, tokens=3)

    async def live(self, *, others: bool) -> None:
        told: list[str] = []
        try:
            for _ in range(STEPS):
                found: dict[str, Verb] = {**self.verbs.ours(), "tokens": self.tokens}
                told.append(await self.verbs.any(found | (self.verbs.others() if others else {})))
                assert not self.engine.dead, f"{self.engine.dead}: {told}"
                assert not self.engine.hung, f"hung: {told}"
                assert not self.engine.zeros, f"answered from empty weights: {told}"
                assert others or not self.engine.stale, f"{self.engine.stale}: {told}"
        finally:
            await self.verbs.leave()

    async def tokens(self) -> None:
        """Some more of what the users wait for."""
        self.stub.gate.grant(2)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_no_sequence_of_verbs_ends_a_server(checkpoints: list[str]) -> None:
    for seed in range(SEQUENCES):
        await Life(seed, checkpoints, kept=True).live(others=False)


async def test_no_sequence_of_verbs_ends_a_server_that_skyctl_did_not_start(
    checkpoints: list[str],
) -> None:
    for seed in range(SEQUENCES // 10):
        await Life(seed, checkpoints, kept=False).live(others=False)


async def test_behind_the_keeper_nobody_ends_a_server(checkpoints: list[str]) -> None:
    for seed in range(SEQUENCES // 4):
        await Life(seed, checkpoints, kept=True).live(others=True)


async def test_without_the_keeper_others_do_end_it(checkpoints: list[str]) -> None:
    ended = 0
    for seed in range(20):
        life = Life(seed, checkpoints, kept=False)
        with contextlib.suppress(AssertionError):
            await life.live(others=True)
        ended += bool(life.engine.dead) or life.engine.hung
    assert ended > 10

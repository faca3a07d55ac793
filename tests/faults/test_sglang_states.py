"""No sequence of verbs ends an SGLang server, and none has it decode KV or weights it must not."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.engines.sglang.inside import keeper
from skyctl.engines.sglang.server import SGLangServer
from skyctl.errors import SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from tests.stub.inprocess import StubTransport
from tests.stub.sglang import SGLangEngine, SGLangStub

SEQUENCES = 2000
STEPS = 12
IMPATIENT_S = 0.02

Verb = Callable[[], Awaitable[object]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [str(make_tiny_checkpoint(root / name, seed=n)) for n, name in enumerate("ab")]


class Life:
    """One server, its users, and what may be done to it."""

    def __init__(self, chance: random.Random, checkpoints: list[str], *, kept: bool) -> None:
        engine = SGLangEngine(
            model=checkpoints[0],
            radix_cache=chance.random() < 0.5,
            memory_saver=chance.random() < 0.8,
            cpu_backup=chance.random() < 0.5,
        )
        self.stub = SGLangStub(engine, keeper=kept)
        self.stub.gate.hold()
        self.client = ControlClient(transport=StubTransport([self.stub]))
        self.target = ServerTarget("s-0", "http://stub-0", engine="sglang")
        self.server = SGLangServer(self.client, self.target, timeout_s=0.5)
        self.server.probe_s = IMPATIENT_S
        self.users: list[asyncio.Task[None]] = []
        self.checkpoints, self.chance = checkpoints, chance

    def verbs(self) -> dict[str, Verb]:
        server, path = self.server, self.chance.choice([*self.checkpoints, "/nowhere"])
        return {
            "user": self.user,
            "tokens": self.tokens,
            "pause abort": lambda: server.pause("abort"),
            "pause keep": lambda: server.pause("keep"),
            "pause wait": lambda: server.pause("wait", timeout_s=IMPATIENT_S),
            "resume": server.resume,
            "sleep 1": lambda: server.sleep(1),
            "sleep 2": lambda: server.sleep(2),
            "wake": server.wake,
            "wake weights": lambda: server.wake(["weights"]),
            "wake kv_cache": lambda: server.wake(["kv_cache"]),
            "push abort": lambda: self.push("abort", path),
            "push keep": lambda: self.push("keep", path),
            "verify": server.weight_checksums,
            "status": lambda: asyncio.gather(server.is_paused(), server.metrics()),
        }

    def foreign(self) -> dict[str, Verb]:
        """What anybody may send; much of it would end a server."""

        def sent(path: str, **body: object) -> Verb:
            return lambda: self.client.call(self.target, "POST", path, json=body, timeout_s=0.1)

        tags = self.chance.sample(keeper.MEMORY, self.chance.randrange(4))
        path, flush = self.chance.choice(self.checkpoints), self.chance.random() < 0.5
        return {
            **{f"{m}!": sent(keeper.PAUSE, mode=m) for m in ("abort", "in_place", "retract")},
            "continue!": sent(keeper.CONTINUE),
            f"release {tags}!": sent(keeper.RELEASE, tags=tags),
            f"resume {tags}!": sent(keeper.RESUME, tags=tags),
            f"update, flush {flush}!": sent(keeper.FROM_DISK, model_path=path, flush_cache=flush),
            "distributed!": sent("/update_weights_from_distributed", names=[]),
            "checksum!": sent("/weights_checker"),
        }

    async def user(self) -> None:
        async def ask() -> None:
            with contextlib.suppress(SkyctlError):
                await self.server.complete({"prompt": "hello", "max_tokens": 3}, timeout_s=60.0)

        self.users.append(asyncio.create_task(ask()))
        await asyncio.sleep(0)

    async def tokens(self) -> None:
        self.stub.gate.grant(2)
        for _ in range(5):
            await asyncio.sleep(0)

    async def push(self, mode: str, path: str) -> None:
        """In the order of `push/transaction.py`."""
        server = self.server
        await server.pause("keep" if mode == "keep" else "abort")
        try:
            await server.prepare_reload()
        except SkyctlError:
            await server.resume()
            raise
        await server.reload_weights(path)
        await server.reset_caches()
        await server.weight_checksums()
        await server.set_weight_version(Path(path).name)
        await server.resume()

    async def live(self, *, foreign: bool) -> None:
        told: list[str] = []
        try:
            for _ in range(STEPS):
                verbs = {**self.verbs(), **(self.foreign() if foreign else {})}
                name = self.chance.choice(list(verbs))
                told.append(name)
                with contextlib.suppress(SkyctlError):
                    await verbs[name]()
                engine = self.stub.engine
                assert not engine.dead, f"{engine.dead}: {told}"
                assert not engine.hung, f"hung: {told}"
                assert not engine.zeros, f"answered from empty weights: {told}"
                assert foreign or not engine.stale, f"{engine.stale}: {told}"
        finally:
            for user in self.users:
                user.cancel()
            await asyncio.gather(*self.users, return_exceptions=True)


async def test_no_sequence_of_verbs_ends_a_server(checkpoints: list[str]) -> None:
    for seed in range(SEQUENCES):
        await Life(random.Random(seed), checkpoints, kept=True).live(foreign=False)


async def test_no_sequence_of_verbs_ends_a_server_that_skyctl_did_not_start(
    checkpoints: list[str],
) -> None:
    for seed in range(SEQUENCES // 10):
        await Life(random.Random(seed), checkpoints, kept=False).live(foreign=False)


async def test_behind_the_keeper_nobody_ends_a_server(checkpoints: list[str]) -> None:
    for seed in range(SEQUENCES // 4):
        await Life(random.Random(seed), checkpoints, kept=True).live(foreign=True)


async def test_without_the_keeper_those_calls_do_end_it(checkpoints: list[str]) -> None:
    ended = 0
    for seed in range(20):
        life = Life(random.Random(seed), checkpoints, kept=False)
        with contextlib.suppress(AssertionError):
            await life.live(foreign=True)
        ended += bool(life.stub.engine.dead) or life.stub.engine.hung
    assert ended > 10

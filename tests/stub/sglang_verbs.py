"""Whatever may be done to an SGLang server, by us and by others: for random sequences of it, on the
stub (`tests/faults/test_sglang_states.py`) and on real servers (`tests/gpu/sglang.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from skyctl.engines.sglang.inside import keeper
from skyctl.engines.sglang.server import SGLangServer
from skyctl.errors import SkyctlError
from skyctl.http.client import ControlClient

Verb = Callable[[], Awaitable[object]]


class Verbs:
    """One server and its users. `wait_s` is how long a draining pause and other people's calls may
    take."""

    def __init__(
        self,
        server: SGLangServer,
        client: ControlClient,
        checkpoints: Sequence[str],
        chance: random.Random,
        *,
        wait_s: float,
        tokens: int,
    ) -> None:
        self.server, self.client = server, client
        self.checkpoints, self.chance = checkpoints, chance
        self.users: list[asyncio.Task[None]] = []
        self._wait_s, self._tokens = wait_s, tokens

    def ours(self) -> dict[str, Verb]:
        """What skyctl's verbs come to."""
        server, path = self.server, self.chance.choice([*self.checkpoints, "/nowhere"])
        return {
            "user": self.user,
            "pause abort": lambda: server.pause("abort"),
            "pause keep": lambda: server.pause("keep"),
            "pause wait": lambda: server.pause("wait", timeout_s=self._wait_s),
            "resume": server.resume,
            "sleep 1": lambda: server.sleep(1),
            "sleep 2": lambda: server.sleep(2),
            "wake": server.wake,
            "wake weights": lambda: server.wake(["weights"]),
            "wake kv_cache": lambda: server.wake(["kv_cache"]),
            f"push {path} abort": lambda: self.push("abort", path),
            f"push {path} keep": lambda: self.push("keep", path),
            "verify": server.weight_checksums,
            "status": lambda: asyncio.gather(server.is_paused(), server.metrics()),
        }

    def others(self) -> dict[str, Verb]:
        """What anybody may send; much of it would end a server."""

        def sent(path: str, **body: object) -> Verb:
            target, wait_s = self.server.target, self._wait_s
            return lambda: self.client.call(target, "POST", path, json=body, timeout_s=wait_s)

        tags = self.chance.choices(keeper.MEMORY, k=self.chance.randrange(4))
        path, flush = self.chance.choice(self.checkpoints), self.chance.random() < 0.5
        return {
            **{f"{m}!": sent(keeper.PAUSE, mode=m) for m in ("abort", "in_place", "retract")},
            "continue!": sent(keeper.CONTINUE),
            f"release {tags}!": sent(keeper.RELEASE, tags=tags),
            f"resume {tags}!": sent(keeper.RESUME, tags=tags),
            f"update, flush {flush}!": sent(keeper.FROM_DISK, model_path=path, flush_cache=flush),
            "distributed!": sent(keeper.FROM_GROUP, names=[], dtypes=[], shapes=[]),
            "join nobody!": sent(
                keeper.INIT_GROUP,
                master_address="127.0.0.1",
                master_port=1,
                rank_offset=1,
                world_size=2,
            ),
            "leave nobody!": sent(keeper.DESTROY_GROUP),
            "checksum!": sent("/weights_checker", action="checksum"),
        }

    async def any(self, found: dict[str, Verb]) -> str:
        """Carry out one of them, whatever it answers; its name."""
        name = self.chance.choice(list(found))
        with contextlib.suppress(SkyctlError):
            await found[name]()
        return name

    async def user(self) -> None:
        """Somebody asks for tokens, and waits for them in the background."""

        async def ask() -> None:
            body = {"prompt": "hello", "max_tokens": self._tokens, "ignore_eos": True}
            model = (await self.server.models())[0]
            with contextlib.suppress(SkyctlError):
                await self.server.complete({**body, "model": model}, timeout_s=60.0)

        self.users.append(asyncio.create_task(ask()))
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

    async def leave(self) -> None:
        """The users go away."""
        for user in self.users:
            user.cancel()
        await asyncio.gather(*self.users, return_exceptions=True)

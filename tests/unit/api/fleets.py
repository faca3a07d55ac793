"""Fleets of stubs behind the Python API, and their trainers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl import Fleet
from skyctl.api.trainer import Trainer, open_trainer
from skyctl.errors import SkyctlError
from skyctl.live.options import TrainerOptions
from skyctl.live.ranks import Hub, Link, Ranks
from tests.stub.app import StubServer
from tests.stub.running import running
from tests.stub.state import StubEngine
from tests.unit.push.checkpoints import tiny_tensors
from tests.unit.push.fleets import content


def stubs(base: Path, count: int = 2, **options: Any) -> list[StubServer]:
    """Stubs that run the checkpoint `base` and tell by their digest what was pushed."""
    servers = [
        StubServer(StubEngine(model=str(base), weigh=content), **options) for _ in range(count)
    ]
    for server in servers:
        server.engine.digest = "base"
    return servers


@asynccontextmanager
async def attached(
    tmp_path: Path, servers: list[StubServer], more: str = ""
) -> AsyncIterator[Fleet]:
    """A fleet of these stubs, the first of which plays the router as well; `more` are further lines
    of its file."""
    async with running(servers) as targets:
        urls = [target.url for target in targets]
        file = tmp_path / "fleet.yaml"
        text = f"name: demo\nservers: {urls}\nrouter: {urls[0]}\ncontrol_timeout_s: 5\n{more}\n"
        file.write_text(text)
        yield Fleet.load(file)


def in_memory(home: Path) -> list[str]:
    """What fleets of this state directory have staged in memory."""
    origins = Path(f"/dev/shm/skyctl-{os.getuid()}").glob("*.origin")
    return [origin.stem for origin in origins if home in Path(os.path.realpath(origin)).parents]


def state_dict(seed: int) -> dict[str, Any]:
    """Tensors of the model in `base`, as a trainer has them."""
    torch = pytest.importorskip("torch")
    return {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
        for name, (_, shape, data) in tiny_tensors(seed).items()
    }


async def met(count: int, machines: Sequence[str] = ()) -> list[Ranks]:
    hub = Hub(machines or [""] * count)
    await hub.listen("127.0.0.1")
    links = [await Link.connect(hub.address, rank, hub.machines) for rank in range(1, count)]
    return [hub, *links]


@asynccontextmanager
async def trainers(
    fleet: Fleet, weights: list[Any], machines: Sequence[str] = (), **options: Any
) -> AsyncIterator[list[Trainer]]:
    """A trainer per rank, each with these weights, on one machine or these."""
    ranks = await met(len(weights), machines)
    opened = await asyncio.gather(
        *(
            open_trainer(fleet, rank, TrainerOptions(given, **options))
            for rank, given in zip(ranks, weights, strict=True)
        )
    )
    try:
        yield opened
    finally:
        for trainer in reversed(opened):
            await trainer.close()


async def everywhere(calls: list[Any]) -> list[SkyctlError]:
    """The errors of all ranks, which must all have failed."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, SkyctlError) for result in results), results
    return results

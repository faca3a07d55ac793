"""`python -m tests.stub.trainer FLEET_FILE VERSION SEED`: a trainer with an engine of its own.

With `--dies-after N` it kills itself once N servers have their weights, and an open update.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

import httpx

from skyctl import Fleet
from skyctl.api import Update
from skyctl.push.trainer import SendTarget
from tests.stub.rows import trainers_update

_ROUTES = ("init_weight_transfer_engine", "start_weight_update", "update_weights")


async def send(update: Update, seed: int, *, only: int | None = None, finish: bool = True) -> None:
    """What a trainer's engine does with each server; `only` with that many of them."""
    for server in update.servers[:only]:
        await send_to(server, update.headers, seed, finish=finish)


async def send_to(
    server: SendTarget, headers: Mapping[str, str], seed: int, *, finish: bool = True
) -> None:
    """What it does with one server."""
    bodies: list[Any] = [
        {"init_info": server.init_info or {}},
        None,
        {"update_info": trainers_update(seed)},
    ]
    async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
        for route, body in zip(_ROUTES, bodies, strict=True):
            (await client.post(f"{server.url}/{route}", json=body)).raise_for_status()
        if finish:
            await client.post(f"{server.url}/finish_weight_update")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("version")
    parser.add_argument("seed", type=int)
    parser.add_argument("--dies-after", type=int)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    async with (
        Fleet.load(asked.file) as fleet,
        fleet.update(asked.version, keep=asked.keep) as update,
    ):
        dies = asked.dies_after is not None
        await send(update, asked.seed, only=asked.dies_after, finish=not dies)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main())

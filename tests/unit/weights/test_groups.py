"""What a collective transport asks of workers around its group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.control.dialects import dialect_for
from skyctl.control.target import ServerTarget
from skyctl.weights.delivery import ChunkDelivery
from skyctl.weights.request import PushServer
from skyctl.weights.sites import Site
from skyctl.weights.transports.nccl import TRANSPORT


class Server:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def extension_rpc(self, method: str, **_: Any) -> None:
        self.asked.append(method)

    async def finish_weight_update(self, *_: Any, **__: Any) -> None:
        self.asked.append("finish")


@pytest.mark.parametrize(
    ("version", "asked"),
    [("0.26.0", ["finish", "skyctl_free_cached"]), ("0.32.0", ["finish"])],
)
async def test_buffers_that_vllm_would_not_use_again_are_given_back(
    version: str, asked: list[str]
) -> None:
    server = Server()
    target = ServerTarget("demo-0", "http://127.0.0.1:1")
    site = Site(
        server=PushServer(target=target),
        vllm=server,  # type: ignore[arg-type]
        dialect=dialect_for(version),
        world_size=1,
        was_paused=False,
        old_version=None,
    )
    delivery = ChunkDelivery(
        TRANSPORT,
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(update_timeout_s=5.0),  # type: ignore[arg-type]
        senders=SimpleNamespace(),  # type: ignore[arg-type]
    )
    await delivery.finish([site], lambda: "v1")
    assert server.asked == asked

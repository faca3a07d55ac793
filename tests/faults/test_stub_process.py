"""The stub as a process in place of a vLLM server."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ServerUnreachable
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget


@asynccontextmanager
async def stub_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.stub.server", "--port", str(port), *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process, port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_it_takes_vllms_flags_answers_and_stops_on_term() -> None:
    flags = (
        *("--model", "some/model", "--served-model-name", "tiny", "--enforce-eager"),
        *("--weight-transfer-config", '{"backend": "skyctl"}', "--max-model-len", "2048"),
        *("--worker-extension-cls", "skyctl.engines.vllm.inside.worker.SkyctlWorkerExtension"),
        *("--faults", json.dumps({"/pause": {"kind": "reset", "calls": [1]}})),
    )
    async with stub_process(*flags) as (process, port), ControlClient() as client:
        server = VLLMServer(client, ServerTarget("stub", f"http://127.0.0.1:{port}"))
        async with asyncio.timeout(30):
            while not await answers(server):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)
        assert await server.models() == ["tiny"]
        await server.start_weight_update()
        assert await raises_unreachable(server)
        await server.pause("keep")
        assert await server.is_paused()
        process.terminate()
        async with asyncio.timeout(10):
            await process.wait()


async def test_it_exits_at_start_when_told_to() -> None:
    async with (
        stub_process("--model", "x", "--faults", '{"exit_at_start": 7}') as (process, _),
        asyncio.timeout(30),
    ):
        assert await process.wait() == 7


async def answers(server: VLLMServer) -> bool:
    try:
        await server.health()
    except ServerUnreachable:
        return False
    return True


async def raises_unreachable(server: VLLMServer) -> bool:
    try:
        await server.pause("keep")
    except ServerUnreachable:
        return True
    return False

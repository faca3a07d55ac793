"""One client of benchmarks/fanout.py, in a process of its own. Run by file, by any interpreter.

Reads {"urls": […]} and then, for each line, calls every server once and prints what it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import select
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

Round = Callable[[], Awaitable[None]]  # calls every server once
TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def skyctl_client(urls: list[str], *, verb: bool) -> AsyncIterator[Round]:
    from skyctl.core import actions as verbs
    from skyctl.engines.vllm.server import VLLMServer
    from skyctl.http.client import ControlClient
    from skyctl.http.fanout import fan_out
    from skyctl.http.target import ServerTarget

    targets = [ServerTarget(f"stub-{index}", url) for index, url in enumerate(urls)]
    async with ControlClient() as client:

        async def plain() -> None:
            outcomes = await fan_out(
                targets,
                lambda target: VLLMServer(client, target, timeout_s=TIMEOUT_S).pause("keep"),
                timeout_s=TIMEOUT_S,
            )
            assert all(outcome.ok for outcome in outcomes), outcomes[0]

        async def pause() -> None:
            outcomes = await verbs.pause(client, targets, mode="keep", timeout_s=TIMEOUT_S)
            assert all(outcome.ok for outcome in outcomes), outcomes[0]

        yield pause if verb else plain


@contextlib.asynccontextmanager
async def bare_httpx(urls: list[str]) -> AsyncIterator[Round]:
    import httpx

    # without the expiry: a round takes longer, and httpcore then closes connections it handed out
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=None
    )
    async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as client:

        async def one(url: str) -> None:
            answer = await client.post(f"{url}/pause", params={"mode": "keep"})
            answer.raise_for_status()
            answer.json()

        async def gather() -> None:
            await asyncio.gather(*(one(url) for url in urls))

        yield gather


@contextlib.asynccontextmanager
async def bare_sockets(urls: list[str]) -> AsyncIterator[Round]:
    """The least there is: one epoll loop, fixed bytes out, whatever arrives is the answer."""
    request = b"POST /pause?mode=keep HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n"
    addresses = [("127.0.0.1", int(url.rpartition(":")[2])) for url in urls]
    epoll, opened = select.epoll(), dict[int, socket.socket]()

    async def every() -> None:
        if opened:
            for one in opened.values():
                one.send(request)
        for address in () if opened else addresses:
            fresh = socket.socket()
            fresh.setblocking(False)
            fresh.connect_ex(address)
            opened[fresh.fileno()] = fresh
            epoll.register(fresh.fileno(), select.EPOLLOUT)
        left = len(opened)
        while left:
            for number, event in epoll.poll(TIMEOUT_S):
                if event & select.EPOLLOUT:
                    epoll.modify(number, select.EPOLLIN)
                    opened[number].send(request)
                else:
                    assert opened[number].recv(65536).startswith(b"HTTP/1.1 200")
                    left -= 1

    yield every


@contextlib.asynccontextmanager
async def skyrl(urls: list[str]) -> AsyncIterator[Round]:
    import typing

    import typing_extensions

    # its modules are written for Python 3.12; on 3.11 Pydantic wants this one
    typing.TypedDict = typing_extensions.TypedDict
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )

    client = RemoteInferenceClient(proxy_url=urls[0], server_urls=urls, data_parallel_size=1)

    async def pause() -> None:
        answers: dict[str, Any] = await client.pause("keep")
        assert all(answer["status"] == 200 for answer in answers.values())

    yield pause
    await client.aclose()


async def main(name: str) -> None:
    urls: list[str] = json.loads(sys.stdin.readline())["urls"]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    clients = {
        "skyctl fan_out": lambda: skyctl_client(urls, verb=False),
        "skyctl pause": lambda: skyctl_client(urls, verb=True),
        "bare httpx": lambda: bare_httpx(urls),
        "bare sockets": lambda: bare_sockets(urls),
        "skyrl": lambda: skyrl(urls),
    }
    async with clients[name]() as once:
        before_bytes = peak_bytes()
        while sys.stdin.readline():
            began, cpu = time.perf_counter(), time.process_time()
            await once()
            answer = {
                "total_s": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu,
                "peak_bytes": peak_bytes(),
                "before_bytes": before_bytes,
            }
            print(json.dumps(answer), flush=True)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

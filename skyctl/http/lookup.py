"""Name lookups in threads that do not delay the end of the process."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

_Key = tuple[asyncio.AbstractEventLoop, str, int]

_running: dict[_Key, asyncio.Future[Sequence[str]]] = {}
"""One for each name: while a resolver does not answer, each probe asks again."""


async def addresses(host: str, port: int) -> Sequence[str]:
    """Every address of a host name, in order. Raises OSError, or ValueError for an invalid name.

    The lookup has a thread that may be left behind: asyncio's are waited for at the end of a
    command, so that a resolver without an answer held up Ctrl-C, and every deadline.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return [host]
    key = asyncio.get_running_loop(), host, port
    if key not in _running:
        _running[key] = key[0].create_future()
        named = f"lookup of {host}"
        threading.Thread(target=_resolve, args=(key,), name=named, daemon=True).start()
    return await asyncio.shield(_running[key])


def _resolve(key: _Key) -> None:
    loop, host, port = key
    addresses: list[str] = []
    failed: Exception | None = None
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in answers))
    except (OSError, ValueError, OverflowError) as error:
        failed = error
    try:
        loop.call_soon_threadsafe(_complete, key, addresses, failed)
    except RuntimeError:  # it is closed
        _running.pop(key, None)


def _complete(key: _Key, addresses: Sequence[str], failed: Exception | None) -> None:
    answer = _running.pop(key)
    if failed is not None:
        answer.set_exception(failed)
        answer.exception()  # seen, even if no task waits any more
    else:
        answer.set_result(addresses)

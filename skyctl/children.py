"""The environment of the processes that skyctl starts: its own, and no proxy within the fleet;
scripts in other interpreters; and work that a cancellation does not cut short, as is their start.

A program that reads HTTP_PROXY asks servers on loopback through the proxy, too, unless no_proxy
names them. skyctl's own requests never go through a proxy.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import subprocess
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from skyctl.startup import inherited_environment

T = TypeVar("T")
Work = Coroutine[Any, Any, T]
LOOPBACK = ("localhost", "127.0.0.1", "::1")
EVERY_ADDRESS = ("0.0.0.0/0", "::/0")
"""For vllm-router, which knows no `*` for addresses. httpx (Python) fails on the second."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LIST = "no_proxy"


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment as this process was given it, with `extra`, for a process that it starts.

    Where there is a proxy, no_proxy and NO_PROXY have loopback and the entries of both.
    """
    given = inherited_environment()
    environment = {**given, **extra}
    if not (proxies := proxies_of(environment)):
        return environment
    entries = [*entries_of(given), *entries_of(extra)]
    if "*" in entries:  # only alone does it mean what it says, and vllm-router ignores it
        return environment | dict.fromkeys(proxies, "")
    listed = ",".join(dict.fromkeys([*entries, *LOOPBACK]))
    return environment | {_LIST: listed, _LIST.upper(): listed}


async def started(starting: Work[Process], *, session: bool = False) -> Process:
    """What `asyncio.create_subprocess_exec` or `…_shell` starts; with `session`, it leads one.

    A cancellation ends it once it has started. asyncio itself would wait for ever for one whose
    pipes it has not connected yet, and leave what a shell has started.
    """

    async def end(process: Process) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if session else process.kill()

    return await to_its_end(starting, undo=end)


async def to_its_end(
    work: Work[T],
    stop: Callable[[], object] = lambda: None,
    undo: Callable[[T], Work[object]] | None = None,
) -> T:
    """The result of `work`. A cancellation, of which there may be several, calls `stop`, and is
    raised once the work has ended and its result is undone.
    """
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            stop()
    if cancelled is None or task.cancelled():
        return task.result()
    if undo is not None and task.exception() is None:
        await to_its_end(undo(task.result()))
    raise cancelled from task.exception()


def output_of(
    python: str,
    script: str,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> str:
    """What a script prints in another interpreter, with `variables` added to its environment.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be run, or it failed.
    """
    return subprocess.run(
        # -P: modules in the current directory are not installed there
        [python, "-P", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
        env={**os.environ, **(variables or {})},
    ).stdout


def bypassing(environment: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """`environment` with `hosts` in its no_proxy."""
    return {**environment, _LIST: ",".join([*entries_of(environment), *hosts])}


def proxies_of(environment: Mapping[str, str]) -> list[str]:
    """The variables that name a proxy."""
    return [name for name, value in environment.items() if value and name.lower() in _PROXIES]


def entries_of(environment: Mapping[str, str]) -> list[str]:
    """What no_proxy has, in either spelling."""
    lists = [value for name, value in environment.items() if name.lower() == _LIST]
    return [stripped for entry in ",".join(lists).split(",") if (stripped := entry.strip())]


def is_bypassed(host: str, environment: Mapping[str, str]) -> bool:
    """Whether no_proxy excepts `host`: its name or domain, its address or a network."""
    return any(_excepts(entry.lower(), host) for entry in entries_of(environment))


def _excepts(entry: str, host: str) -> bool:
    if entry == "*" or f".{host}".endswith(f".{entry.lstrip('.')}"):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # one of them is a name
        return False

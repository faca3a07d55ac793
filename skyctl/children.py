"""The environment of the processes that skyctl starts: its own, and no proxy within the fleet; and
scripts in other interpreters.

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
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from skyctl.startup import inherited_environment

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


async def started(starting: Coroutine[Any, Any, Process], *, session: bool = False) -> Process:
    """What `asyncio.create_subprocess_exec` or `…_shell` starts; with `session`, it leads one.

    A cancellation ends it once it has started. asyncio itself would wait for ever for one whose
    pipes it has not connected yet, and leave what a shell has started.
    """
    task = asyncio.ensure_future(starting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            with suppress(ProcessLookupError):
                os.killpg(task.result().pid, signal.SIGKILL) if session else task.result().kill()
        raise


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

"""Where the servers of an attached fleet are: listed in the fleet file, or discovered."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from skyctl.children import started
from skyctl.core.registry import FleetRef
from skyctl.errors import NotFoundError, SkyctlError
from skyctl.fleetfile.values import refuse_password, refuse_route
from skyctl.http.connections import addresses
from skyctl.store.server_names import Located, normalized

_LINE = re.compile(r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})\s+)?(?P<url>https?://[^\s/]+\S*)")
_MOST, _MOST_BYTES = 4096, 2**20


async def locate(ref: FleetRef) -> tuple[Located, ...]:
    """The servers of an attached fleet. Discovered ones have their given name, else one made of
    host and port; those listed in its file have none (`server_names.name_servers`).

    Raises:
        NotFoundError: nothing was found.
        SkyctlError: the name lookup or the command failed, took too long, or returned something
            else.
    """
    servers = ref.config.servers
    if servers is None or isinstance(servers, list):
        return tuple(("", url.rstrip("/")) for url in servers or ())
    if servers.dns is not None:
        source, request = f"the address of {servers.dns}", _addresses(servers.dns)
    else:
        assert servers.command is not None  # the schema requires one of the two
        source, request = f"`{servers.command}`", _printed(servers.command, ref.base_dir)
    try:
        located = await asyncio.wait_for(request, ref.config.control_timeout_s)
    except TimeoutError:
        limit = f"{ref.config.control_timeout_s:g} s (control_timeout_s)"
        raise _failed(ref, f"{source} gave no answer in {limit}") from None
    except (OSError, ValueError) as error:
        raise _failed(ref, f"{source}: {error}") from None
    if not located:
        raise NotFoundError(
            f"fleet {ref.name} has no server: {source} named none",
            hint="skyctl asks this for the servers: see `servers:` in the fleet file",
        )
    names, urls = ([name for name, _ in located], [normalized(url) for _, url in located])
    for kind, values in (("named", names), ("at", urls)):
        often = [value for value, count in Counter(values).items() if count > 1]
        if often:
            raise _failed(ref, f"{source} has more than one server {kind} {often[0]}")
    return tuple(located)


def _failed(ref: FleetRef, problem: str) -> SkyctlError:
    return SkyctlError(
        f"cannot find the servers of fleet {ref.name}: {problem}",
        hint="nothing was touched; put it right, or list URLs under `servers:`",
    )


async def _addresses(dns: str) -> Sequence[Located]:
    """Every address of a host name, in order. Raises OSError for an unknown name."""
    host, _, port = dns.rpartition(":")
    resolved = sorted(await addresses(host, int(port)))
    hosts = [f"[{address}]" if ":" in address else address for address in resolved]
    return [(_name(f"http://{host}:{port}"), f"http://{host}:{port}") for host in hosts]


async def _printed(command: str, directory: Path) -> Sequence[Located]:
    """The servers that a command prints. Raises ValueError if it prints anything else, or fails."""
    process = await started(
        asyncio.create_subprocess_shell(
            command,
            cwd=directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        ),
        session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        out, errors = await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
        await process.wait()
    except BaseException:  # timeout or Ctrl-C: end it with all that it started
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):  # pipes that are read to their end leave nothing open
            async with asyncio.timeout(1):
                await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
        await process.wait()
        raise
    if process.returncode:
        printed = errors.decode(errors="replace").strip().splitlines()
        raise ValueError(f"exit code {process.returncode}{f', {printed[-1]}' if printed else ''}")
    if len(out) > _MOST_BYTES:
        raise ValueError(f"it prints more than {_MOST_BYTES} bytes")
    lines = [line for line in out.decode(errors="replace").splitlines() if line.strip()]
    if len(lines) > _MOST:
        raise ValueError(f"{len(lines)} lines (at most {_MOST} servers)")
    return [_read(line.strip()) for line in lines]


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, and keep as much as is useful."""
    kept = b""
    while part := await stream.read(2**16):
        kept += part[: _MOST_BYTES + 1 - len(kept)]
    return kept


def _read(line: str) -> Located:
    parts = _LINE.fullmatch(line)
    if parts is None:
        raise ValueError(f"{line[:80]!r} is not a line of the form `URL` or `NAME URL`")
    url = parts["url"].rstrip("/")
    by_address = _name(url)
    return parts["name"] or by_address, url


def _name(url: str) -> str:
    """`http://10.0.0.3:8000` becomes `10-0-0-3-8000`. Raises ValueError for anything but a URL."""
    refuse_password(url)
    refuse_route(url)
    parts = urlsplit(url)
    port = f"-{parts.port}" if parts.port else ""
    name = re.sub(r"[^A-Za-z0-9]+", "-", parts.hostname or "").strip("-")
    if not name:
        raise ValueError(f"{url[:80]!r} has no host")
    return f"{name}{port}"

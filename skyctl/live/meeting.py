"""Where the ranks of a job meet its rank 0: at a socket that has no name in the file system and
lets in processes of its user only; from other machines, at an address where both sides prove that
they know a secret (`wire/proofs.py`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from skyctl.store.identity import boot_id
from skyctl.store.owned import own
from skyctl.wire.addresses import address_towards
from skyctl.wire.proofs import HANDSHAKE_TIMEOUT_S, SECRET_BYTES, Door, prove

Serve = Callable[[StreamReader, StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Address:
    """Where rank 0 lets others in."""

    name: str
    """Of its socket, for ranks of its machine."""
    host: str = ""
    """Its machine's address, for ranks of others."""
    port: int = 0
    """There."""
    secret: bytes = field(default=b"", repr=False)
    """What they prove that they know."""

    async def connect(self, *, local: bool) -> tuple[StreamReader, StreamWriter]:
        """A connection to rank 0. Raises OSError or EOFError."""
        if local:
            return await asyncio.open_unix_connection(f"\0{self.name}")
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            streams = await asyncio.open_connection(self.host, self.port)
        try:
            await prove(*streams, self.secret)
        except BaseException:
            streams[1].close()
            raise
        return streams


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    machine: str
    """Tells whether ranks reach each other's local sockets and know each other's pids: a boot, and
    its namespaces.
    """
    address: str
    """Its own, on the way to MASTER_ADDR; "" if there is none."""

    @classmethod
    def own(cls) -> Place:
        """This process's."""
        names, address = [boot_id()], ""
        with suppress(OSError):
            names += [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "pid")]
        with suppress(OSError, ValueError):
            address = address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname())
        return cls(" ".join(names), address)


async def listen_locally(serve: Serve) -> tuple[Address, asyncio.Server]:
    """Let in ranks of this machine."""
    listener, name = socket.socket(socket.AF_UNIX), f"skyctl-live-{secrets.token_hex(16)}"
    own(listener)
    listener.bind(f"\0{name}")
    return Address(name), await asyncio.start_unix_server(serve, sock=listener)


async def listen_everywhere(
    name: str, serve: Serve, *, expected: int, towards: str
) -> tuple[Address, asyncio.Server]:
    """Let in ranks of other machines, at the address on the way to that of one. Raises OSError."""
    host = address_towards(towards)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    own(listener)
    secret = secrets.token_bytes(SECRET_BYTES)
    door = Door(secret, expected=expected, timeout_s=HANDSHAKE_TIMEOUT_S)

    async def admit(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            if await door.admits(reader, writer):
                await serve(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # no rank of this job, or the job ends meanwhile
        finally:
            writer.close()

    server = await asyncio.start_server(admit, sock=listener)
    return Address(name, host, listener.getsockname()[1], secret), server

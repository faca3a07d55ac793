"""Messages between the API process and its worker: a JSON header and one block of bytes."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from typing import IO, Any

_LENGTHS = struct.Struct("!IQ")


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One message in its wire form."""
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


def read(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None if the other side is gone."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header, body = _LENGTHS.unpack(lengths)
    content = stream.read(header + body)
    if len(content) < header + body:
        return None
    return json.loads(content[:header]), content[header:]


async def read_async(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """The next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other side is gone.
    """
    header, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    content = await reader.readexactly(header + body)
    return json.loads(content[:header]), content[header:]


def cut(body: bytes, units: list[list[int]]) -> list[list[bytes]]:
    """A body's parts by their lengths."""
    stream = io.BytesIO(body)
    return [[stream.read(length) for length in unit] for unit in units]

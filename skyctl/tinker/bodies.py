"""Bodies and parameters of the SDK's requests, and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from skyctl.tinker import wire

B = TypeVar("B", bound=BaseModel)
Answer = Response | dict[str, Any] | None
"""A dictionary is sent as JSON, None as 204."""
Handler = Callable[[Request], Awaitable[Answer]]


@dataclass(frozen=True)
class Bodies:
    """Reads bodies of at most `max_bytes` as received, and four times that once unpacked."""

    max_bytes: int

    async def parsed(self, request: Request, kind: type[B]) -> B:
        """The body as a message of this kind. Raises ValidationError."""
        return kind.model_validate_json(await self.raw(request) or b"{}")

    async def raw(self, request: Request) -> bytes:
        """The body, unpacked; bounded before and after."""
        if (unpacked := request.scope.get("skyctl.body")) is not None:
            return bytes(unpacked)
        limit, parts, size = self.max_bytes, [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise HTTPException(413, f"the body is larger than {limit} bytes")
            parts.append(part)
        body = b"".join(parts)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return body
        if encoding != "zstd":
            raise HTTPException(415, f"content-encoding {encoding} is not offered: zstd is")
        try:
            return await asyncio.to_thread(wire.unpack_zstd, body, 4 * limit)
        except wire.TooLarge as error:
            raise HTTPException(413, str(error)) from error


def refusal(text: str, status: int = 400) -> Handler:
    """A route that is not offered; the text is for the client."""

    async def refuse(request: Request) -> Answer:
        if status == 400:
            raise ValueError(text)
        raise HTTPException(status, text)

    return refuse


def readable(error: Exception) -> str:
    """An error as the client sees it."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        for problem in error.errors()[:3]
    )


def page_of(request: Request) -> tuple[int, int]:
    """Offset and limit of a list; the SDK's default limit is 20 or 100."""
    offset = int(request.query_params.get("offset", 0))
    limit = int(request.query_params.get("limit", 100))
    if offset < 0 or not 1 <= limit <= 10_000:
        raise ValueError("offset must be 0 or more, limit from 1 to 10000")
    return offset, limit


def checkpoint_path(request: Request) -> str:
    """The tinker:// path that a route names."""
    return f"tinker://{request.path_params['model']}/{request.path_params['checkpoint']}"

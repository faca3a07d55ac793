"""The HTTP that control calls need: one request, one whole response, and the ways it fails.

TransportError
├── CannotConnect      nothing was sent
├── ConnectionBroke    the request may have been carried out: closed, reset, or not HTTP
├── NoAnswer           no response in time; the request may have been carried out
└── Unusable           the request cannot be written, or the response exceeds a limit
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Request(NamedTuple):
    """`url` is the server's, without a trailing slash; `path` begins with one, and includes the
    query.

    `headers` are additional: host, length and encodings are the transport's to write. A `body` of
    None sends no body.
    """

    method: str
    url: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None = None


class Answer(NamedTuple):
    """A whole answer. Names of `headers` are in lower case; of a repeated one the last counts."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The body as UTF-8; invalid bytes are shown as such."""
        return self.body.decode(errors="replace")


class Transport(Protocol):
    """Takes requests to servers."""

    async def send(self, request: Request, *, timeout_s: float) -> Answer:
        """The whole answer to `request`, which is sent once, within `timeout_s` seconds.

        Raises TransportError.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class TransportError(Exception):
    """There is no usable response. The message says why, without server or token."""


class CannotConnect(TransportError):
    """The connection failed: nothing was sent."""


class ConnectionBroke(TransportError):
    """The connection broke before a whole response, or the peer does not speak HTTP."""


class NoAnswer(TransportError):
    """The deadline passed before the whole response arrived."""


class Unusable(TransportError):
    """The request cannot be written as HTTP, or the response exceeds the limits."""

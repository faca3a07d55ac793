"""How much of a checkpoint to read before servers are frozen, so that they never wait for it."""

from __future__ import annotations

_MARGIN = 0.75
"""Share of the sending time in which the rest of the reading must fit: both slow each other."""


def enough_is_read(
    *, done_bytes: int, total_bytes: int, read_s: float, send_bytes_per_s: float
) -> bool:
    """True when the rest will be read sooner than it is sent, at the rates seen so far.

    `read_s` is how long reading `done_bytes` took; `send_bytes_per_s` is the rate of the last push
    to these servers, 0 when there was none: then everything is read first.
    """
    if done_bytes >= total_bytes:
        return True
    if not (done_bytes and send_bytes_per_s):
        return False
    left_s = (total_bytes - done_bytes) * read_s / done_bytes
    return left_s <= _MARGIN * total_bytes / send_bytes_per_s

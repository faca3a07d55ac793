"""How much of a checkpoint to read before servers are frozen, so that they never wait for it."""

from __future__ import annotations


def enough_is_read(*, done_bytes: int, total_bytes: int, read_s: float, lead_s: float) -> bool:
    """True when the rest will have been read by the time that servers are ready for it.

    `read_s` is how long reading `done_bytes` took. `lead_s` is how long it takes from here until
    servers want the last chunk, as seen in the last push; 0 when there was none. Where the sender
    streams into one update, from a GPU of its own, that is up to the end of that update. Where
    servers read from the GPU that is being filled, it is up to the first update: reading on into
    the updates was tried there and lost more than it won, because the readers keep the servers'
    processors and memory busy, and what is saved before the freeze comes back within it.
    """
    if done_bytes >= total_bytes:
        return True
    return bool(done_bytes) and (total_bytes - done_bytes) * read_s / done_bytes <= lead_s

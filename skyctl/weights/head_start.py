"""How much of a checkpoint to read before servers are frozen, so that they never wait for it."""

from __future__ import annotations


def enough_is_read(*, done_bytes: int, total_bytes: int, read_s: float, lead_s: float) -> bool:
    """True when the rest will have been read by the time that servers are ready for it.

    `read_s` is how long reading `done_bytes` took. `lead_s` is how long it takes from here to the
    first update (pausing, opening the session), as seen in the last push; 0 when there was none.
    Reading on into the updates themselves was tried and lost more than it won: the readers keep
    the servers' processors busy, and what is saved before the freeze comes back within it.
    """
    if done_bytes >= total_bytes:
        return True
    return bool(done_bytes) and (total_bytes - done_bytes) * read_s / done_bytes <= lead_s

"""When a push may freeze the servers."""

from __future__ import annotations

import pytest

from skyctl.transfer.sender_pool import Lease, enough_is_read

GB = 10**9


@pytest.mark.parametrize(
    ("done", "read_s", "lead_s", "enough"),
    [
        (16 * GB, 1.0, 0.0, True),  # all there
        (15 * GB, 1.0, 0.0, False),  # nothing known of pausing: all first
        (0, 0.0, 0.04, False),  # nothing known of reading
        (12 * GB, 0.24, 0.04, False),  # 4 GB left at 50 GB/s: 0.08 s
        (15 * GB, 0.30, 0.04, True),  # 1 GB left: 0.02 s
        (15 * GB, 7.5, 0.04, False),  # the same on a cold disk
    ],
)
def test_servers_are_frozen_when_reading_ends_before_they_are_ready(
    done: int, read_s: float, lead_s: float, enough: bool
) -> None:
    enough = enough_is_read(done_bytes=done, total_bytes=16 * GB, read_s=read_s, lead_s=lead_s)
    assert enough is enough


def test_an_update_that_waited_for_the_reader_does_not_make_later_ones_wait_longer() -> None:
    lease = Lease(sender=None, key="", session="")  # type: ignore[arg-type]
    lease.loaded(16 * GB, 0.16)
    lease.loaded(16 * GB, 0.48)
    assert lease.load_s_per_byte * GB == pytest.approx(0.0075)
    lease.loaded(16 * GB, 0.08)
    assert lease.load_s_per_byte * GB == pytest.approx(0.00375)

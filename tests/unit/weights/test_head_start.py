"""When a push may freeze the servers."""

from __future__ import annotations

import pytest

from skyctl.weights.head_start import enough_is_read

GB = 10**9


@pytest.mark.parametrize(
    ("done", "read_s", "send_rate", "enough"),
    [
        (16 * GB, 1.0, 0.0, True),  # all there
        (15 * GB, 1.0, 0.0, False),  # nothing known of sending: all first
        (0, 0.0, 80.0 * GB, False),  # nothing known of reading
        (4 * GB, 0.08, 80.0 * GB, False),  # 12 GB left at 50 GB/s: 0.24 s; sending takes 0.2 s
        (9 * GB, 0.18, 80.0 * GB, True),  # 7 GB left: 0.14 s, within the margin of 0.2 s
        (12 * GB, 6.0, 80.0 * GB, False),  # a cold disk: nearly everything first
    ],
)
def test_servers_are_frozen_when_reading_will_stay_ahead_of_sending(
    done: int, read_s: float, send_rate: float, enough: bool
) -> None:
    found = enough_is_read(
        done_bytes=done, total_bytes=16 * GB, read_s=read_s, send_bytes_per_s=send_rate
    )
    assert found is enough

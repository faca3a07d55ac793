"""Until when a decode server takes a KV cache to be there."""

from __future__ import annotations

import pytest

from skyctl.engines.vllm.inside.leases import MARGIN_S, Leases

EXTENSION_S = 4.0
GRANTED = 6.0
SOON = MARGIN_S / 2


@pytest.mark.parametrize(
    ("renewals", "ends"),
    [
        ((), GRANTED),
        ((1.0,), GRANTED),  # to 5: before the first lease ends anyway
        ((5.0,), 9.0),
        ((1.0, 4.5, 8.0), 12.0),
        ((1.0, 9.0), GRANTED),  # it paused in between: the second one came too late
        ((1.0, 9.0, 10.0), GRANTED),  # and what is gone stays gone
        ((7.0,), GRANTED),
    ],
)
def test_a_cache_is_fetched_as_long_as_renewals_came_in_time(
    renewals: tuple[float, ...], ends: float
) -> None:
    leases = Leases(EXTENSION_S)
    for at in renewals:
        leases.renew("prefill", {"cache", "other"}, at)
    assert leases.lasts("prefill", "cache", GRANTED, ends - MARGIN_S - SOON)
    assert not leases.lasts("prefill", "cache", GRANTED, ends - SOON)


def test_renewals_are_forgotten_with_what_they_were_for() -> None:
    leases = Leases(EXTENSION_S)
    leases.renew("prefill", {"done", "waits"}, 1.0)
    leases.renew("prefill", {"waits"}, 4.0)
    assert leases.lasts("prefill", "waits", GRANTED, 7.0)
    assert not leases.lasts("prefill", "done", GRANTED, 7.0)
    assert not leases.lasts("another", "waits", GRANTED, 7.0)

"""Versions as a contract on real servers: over pushes by `keep` and rolling, through the real
router, no request is answered by another version than it demands, and spans are right to the token.
"""

from __future__ import annotations

import pytest

from tests.integration.demands import CHECKPOINTS, TIE, Demands, Offline, judged
from tests.integration.fleet_cli import FleetCli

pytestmark = pytest.mark.real
REQUESTS = 120
"""`benchmarks/versions.py` sends more."""
PUSHES = 5


def test_spans_name_the_checkpoint_that_made_each_token(real_fleet: FleetCli) -> None:
    demands = Demands(real_fleet, REQUESTS)
    demands.run(PUSHES)
    offline = Offline([real_fleet.directory / "checkpoints" / name for name in CHECKPOINTS])
    wrong, counts = judged(demands, offline)
    assert wrong == []
    print(dict(counts))
    assert counts["straddled"], counts
    assert counts["x-weight-version-exact 200"] and counts["x-weight-version-exact 409"], counts
    assert counts["x-weight-version-min 200"] and counts["no demand 200"] >= REQUESTS // 8, counts
    first = next(answer for answer in demands.answers if len(answer.spans) == 1)
    other = next(
        n for n in demands.labels if demands.checkpoint(n) != demands.checkpoint(first.spans[0][0])
    )
    gaps = offline.gaps(demands.checkpoint(other), first.prompt, first.tokens)
    assert max(gaps) > 100 * TIE, "the checkpoints answer alike: the comparison shows nothing"

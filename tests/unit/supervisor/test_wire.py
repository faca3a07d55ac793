"""What crosses the supervisor's wire is versioned."""

from __future__ import annotations

import hashlib
from dataclasses import fields

import pytest

from skyctl.core.following import JobChanges
from skyctl.core.plan import FleetPlan, FrontSpec, RouterSpec, ServerSpec
from skyctl.core.results import Processes
from skyctl.core.service import JobQuery
from skyctl.core.status import FleetStatus
from skyctl.errors import UsageError
from skyctl.http.fanout import Outcome
from skyctl.supervisor import wire
from skyctl.supervisor.api import _arguments, requests
from skyctl.supervisor.interface import SupervisorService

# What the two sides exchanged when PROTOCOL was counted up last. It differs? Count PROTOCOL up, and
# put the new pair here: an older supervisor then says what to do, and not what is unknown.
KNOWN = (4, "dd0bc933684a06cd")


def test_a_change_of_what_is_exchanged_counts_the_protocol_up() -> None:
    asked = requests(SupervisorService)
    plans = (FleetPlan, ServerSpec, FrontSpec, RouterSpec)
    answered = (*plans, FleetStatus, JobChanges, Outcome, Processes)
    parts = [
        sorted(asked),
        *(
            [kind.__name__, *((field.name, field.type) for field in fields(kind))]
            for kind in (*filter(None, asked.values()), *answered)
        ),
    ]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    assert (wire.PROTOCOL, digest) == KNOWN


@pytest.mark.parametrize("wait_s", ["NaN", "Infinity", '"NaN"', "1e999", str(2**63)])
def test_a_number_without_bounds_is_refused(wait_s: str) -> None:
    assert _arguments("job_changes", JobQuery, b'{"job": "push-1", "wait_s": 5}') == (
        JobQuery("push-1", wait_s=5),
    )
    with pytest.raises(UsageError, match="a number without bounds"):
        _arguments("job_changes", JobQuery, f'{{"job": "push-1", "wait_s": {wait_s}}}'.encode())

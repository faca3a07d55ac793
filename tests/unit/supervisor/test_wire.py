"""What crosses the supervisor's wire is versioned."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from types import NoneType
from unittest.mock import Mock

import pytest

from skyctl.core.following import JobChanges
from skyctl.core.plan import FleetPlan, FrontSpec, RouterSpec, ServerSpec
from skyctl.core.requests import JobQuery
from skyctl.core.results import Processes
from skyctl.core.status import FleetStatus
from skyctl.core.verb_table import JOB_CHANGES
from skyctl.errors import UsageError
from skyctl.http.fanout import Outcome
from skyctl.supervisor import wire
from skyctl.supervisor.api import decoded
from skyctl.supervisor.interface import own_handlers

# What the two sides exchanged when PROTOCOL was counted up last. It differs? Count PROTOCOL up, and
# put the new pair here: an older supervisor then says what to do, and not what is unknown.
KNOWN = (19, "798b29e63e6ffada")


def test_a_change_of_what_is_exchanged_counts_the_protocol_up() -> None:
    verbs = sorted(own_handlers(Mock()), key=lambda verb: verb.name)
    asked = {verb.name: verb.request for verb in verbs}
    plans = (FleetPlan, ServerSpec, FrontSpec, RouterSpec)
    answered = (*plans, FleetStatus, JobChanges, Outcome, Processes)
    parts = [
        sorted(asked),
        *(
            [kind.__name__, *((field.name, field.type) for field in fields(kind))]
            for kind in (*(kind for kind in asked.values() if kind is not NoneType), *answered)
        ),
    ]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    assert (wire.PROTOCOL, digest) == KNOWN


@pytest.mark.parametrize("wait_s", ["NaN", "Infinity", '"NaN"', "1e999", str(2**63)])
def test_a_number_without_bounds_is_refused(wait_s: str) -> None:
    bounded = b'{"job": "push-1", "wait_s": 5}'
    assert decoded(JOB_CHANGES, bounded) == JobQuery("push-1", wait_s=5)
    with pytest.raises(UsageError, match="a number without bounds"):
        decoded(JOB_CHANGES, f'{{"job": "push-1", "wait_s": {wait_s}}}'.encode())

"""What crosses the supervisor's wire is versioned."""

from __future__ import annotations

import hashlib
from dataclasses import fields

from skyctl.core.following import JobChanges
from skyctl.core.plan import FleetPlan, FrontSpec, RouterSpec, ServerSpec
from skyctl.core.service import Processes
from skyctl.core.status import FleetStatus
from skyctl.http.fanout import Outcome
from skyctl.supervisor import wire
from skyctl.supervisor.api import requests
from skyctl.supervisor.interface import SupervisorService

# What the two sides exchanged when PROTOCOL was counted up last. It differs? Count PROTOCOL up, and
# put the new pair here: an older supervisor then says what to do, and not what is unknown.
KNOWN = (11, "408306c178e32801")


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

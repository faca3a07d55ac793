"""What crosses the supervisor's socket is versioned."""

from __future__ import annotations

import hashlib
from dataclasses import fields

from skyctl.core.plan import RouterSpec, ServerSpec
from skyctl.core.status import FleetStatus
from skyctl.push.request import PushRequest
from skyctl.store.journal import Job, JobEvent
from skyctl.supervisor import api, wire

# What the two sides exchanged when PROTOCOL was counted up last. It differs? Count PROTOCOL up,
# and put the new pair here: an older supervisor then says what to do, and not what is unknown.
KNOWN = (8, "28d1ab7ef179fbfe")


def test_a_change_of_what_is_exchanged_counts_the_protocol_up() -> None:
    parts = [sorted(wire._Plan.model_fields)]
    for name, body in sorted(vars(api).items()):
        if isinstance(body, type) and issubclass(body, api._Body):
            parts.append([name, *sorted(body.model_fields)])
    for exchanged in (PushRequest, ServerSpec, RouterSpec, FleetStatus, Job, JobEvent):
        parts.append([exchanged.__name__, *sorted(field.name for field in fields(exchanged))])
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    assert (wire.PROTOCOL, digest) == KNOWN

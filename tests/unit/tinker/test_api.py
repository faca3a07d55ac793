"""The routes of the API process, without one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
from starlette.requests import Request

from skyctl.tinker.api import Api
from skyctl.tinker.bodies import Bodies
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.requests import Outcome, failed_with
from skyctl.tinker.sampling_routes import SamplingRoutes

NOTHING: Any = None


def test_the_key_shows_in_no_repr() -> None:
    api = Api(NOTHING, "tml-s3cret", NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, context=64)
    assert "s3cret" not in repr(api) + repr(api.app)


@pytest.mark.parametrize(
    ("outcome", "answer"),
    [
        (Outcome(b"out", "application/x-protobuf"), b"out"),
        (failed_with("no", "user"), {"error": "no", "category": "user"}),
    ],
)
async def test_a_poll_gets_an_expected_outcome_without_the_ledger(
    outcome: Outcome, answer: Any
) -> None:
    bell = Doorbell()
    retrieve = SamplingRoutes(NOTHING, NOTHING, NOTHING, bell, Bodies(1000)).handlers()[
        "POST retrieve_future"
    ]

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"request_id": "m:1"}).encode()}

    bell.expect("m:1")
    scope = {"type": "http", "headers": []}
    poll: Any = asyncio.ensure_future(retrieve(Request(scope, receive)))
    for _ in range(5):
        await asyncio.sleep(0)
    bell.ring("m:1", outcome=outcome)
    answered = await poll
    assert getattr(answered, "body", answered) == answer and not bell.expects("m:1")

"""The routes of the API process, without one."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
from starlette.requests import Request

from skyctl.tinker import records
from skyctl.tinker.api import Api
from skyctl.tinker.bodies import Bodies, Handler
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.requests import Outcome, failed_with
from skyctl.tinker.sampling_routes import SamplingRoutes

NOTHING: Any = None


async def ask(handler: Handler, body: dict[str, Any]) -> Any:
    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    return await handler(Request({"type": "http", "headers": []}, receive))


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
    bell.expect("m:1")
    poll: Any = asyncio.ensure_future(ask(retrieve, {"request_id": "m:1"}))
    for _ in range(5):
        await asyncio.sleep(0)
    bell.ring("m:1", outcome=outcome)
    answered = await poll
    assert getattr(answered, "body", answered) == answer and not bell.expects("m:1")


@pytest.mark.parametrize(("target", "state"), [("m", "done"), ("s", "gone")])
async def test_results_are_forgotten_only_for_a_sampler(
    tmp_path: Path, target: str, state: str
) -> None:
    """A model has results, too, and is no target."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    await ledger.run(lambda c: records.add_model(c, "m", "x", {}, None))
    await ledger.write("INSERT INTO samplers VALUES ('s', 'x', NULL, NULL, 0, 0)")
    await ledger.run(lambda c: records.add_request(c, target, 1, "any"))
    await ledger.write("UPDATE requests SET state = 'done', result = 'out'")
    routes = SamplingRoutes(NOTHING, ledger, NOTHING, Doorbell(), Bodies(1000)).handlers()
    body = {
        "target": {"type": "sampling_session", "sampling_session_id": target},
        "retrieved_request_ids": [f"{target}:1"],
        "timeout": 0,
    }
    with pytest.raises(records.Missing) if target == "m" else nullcontext():
        await ask(routes["POST retrieve_futures"], body)
    row = await ledger.row("SELECT state FROM requests")
    assert row is not None and row["state"] == state
    ledger.close()

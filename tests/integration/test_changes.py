"""Changes of real servers that serve: a wrong one, and one that is cancelled. tests/faults has the
others, on stubs.
"""

from __future__ import annotations

import pytest

from tests.faults.stub_fleet import until_said
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, ended
from tests.integration.streaming import StreamingCompletion
from tests.load import ThreadedLoad

pytestmark = pytest.mark.real
REQUESTS = 12


def test_a_wrong_argument_of_vllm_touches_one_server_and_fails_no_request(
    real_fleet: FleetCli,
) -> None:
    """vLLM finds it only as it starts: it is longer than the model's context."""
    file = real_fleet.directory / "fleet.yaml"
    right = file.read_text()
    before = {row["name"]: row for row in real_fleet.data("status")["replicas"]}
    urls = real_fleet.data("urls")
    load = ThreadedLoad(urls["router"], real_fleet.key, urls["model"])
    try:
        file.write_text(right.replace("max-model-len: 2048", "max-model-len: 2000000"))
        assert file.read_text() != right
        failed = real_fleet.run("up", "--yes", expect=1, timeout_s=UP_TIMEOUT_S)
    finally:
        file.write_text(right)
        load.end()
    status = real_fleet.data("status")
    after = {row["name"]: row for row in status["replicas"]}
    assert status["health"] == "healthy"
    touched = [name for name in before if before[name]["pid"] != after[name]["pid"]]
    assert touched == ["tiny-0"]
    assert after["tiny-0"]["weight_version"] == before["tiny-0"]["weight_version"]
    assert "tiny-0 did not come back" in failed.stderr
    assert "with their old settings again: tiny-0; not touched: tiny-1" in failed.stderr
    assert "max_model_len" in failed.stderr  # the line of vLLM's log that says why
    assert "nothing to do" in real_fleet.run("up", "--dry-run").stdout
    assert load.failures == [] and load.answers > 0


def test_a_push_that_waits_for_requests_is_cancelled_while_they_run(real_fleet: FleetCli) -> None:
    """vLLM keeps waiting for requests after its client has gone; a resume ends that."""
    urls = real_fleet.data("urls")
    before = real_fleet.data("status")["weight_version"]
    server = urls["servers"]["tiny-0"]
    pushes = [job["id"] for job in real_fleet.data("jobs")["jobs"] if job["kind"] == "push"]
    job = f"push-{1 + max((int(name.partition('-')[2]) for name in pushes), default=0)}"
    waiting = ("sync-weights", "checkpoints/b", "--mode", "wait")
    with real_fleet.loaded("jobs", "cancel", job) as cancel, real_fleet.loaded(*waiting) as push:
        streams = [  # several: they take longer than two commands on a busy machine
            StreamingCompletion(server, urls["model"], "on and", 1900, key=real_fleet.key)
            for _ in range(REQUESTS)
        ]
        for stream in streams:
            stream.wait_for_tokens(1)
        until_said(pushing := push(), "pause: waits for ")
        ended(cancel())
        reached = [len(stream.tokens) for stream in streams]
        assert max(reached) < 1900 and not any(stream.error for stream in streams)  # they still run
        ended(pushing, code=1)
    for stream, at in zip(streams, reached, strict=True):
        stream.wait_for_tokens(at + 1)
    status = real_fleet.data("status")
    assert (status["health"], status["weight_version"]) == ("healthy", before)
    for checkpoint in ("checkpoints/b", "checkpoints/a"):  # a: which other tests begin with
        real_fleet.run("sync-weights", checkpoint, "--mode", "abort")

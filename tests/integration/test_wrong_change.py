"""A wrong value in the file of real servers that serve; tests/faults/test_wrong_changes.py has the
others, on stubs.
"""

from __future__ import annotations

import pytest

from tests.faults.test_wrong_changes import Load
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli

pytestmark = pytest.mark.real


def test_a_wrong_argument_of_vllm_touches_one_server_and_fails_no_request(
    real_fleet: FleetCli,
) -> None:
    """vLLM finds it only as it starts: it is longer than the model's context."""
    file = real_fleet.directory / "fleet.yaml"
    right = file.read_text()
    before = {row["name"]: row for row in real_fleet.data("status")["replicas"]}
    urls = real_fleet.data("urls")
    load = Load(urls["router"], real_fleet.key, urls["model"])
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

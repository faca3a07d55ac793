"""A server that drafts tokens with a model of its own: a push brings both, or is refused. The
draft model is a copy of the model, so that every token it drafts is accepted while they match."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.integration.unlike import answers, write_fleet
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.real, pytest.mark.beside]


def row(fleet: FleetCli) -> dict[str, Any]:
    (replica,) = fleet.data("status")["replicas"]
    return dict(replica)


def accepted(fleet: FleetCli) -> tuple[list[int], float]:
    """What the server answers, and the share of the tokens drafted for it that were accepted."""
    before = row(fleet)
    tokens = answers(fleet)["drafts-0"]
    after = row(fleet)
    drafted, taken = (after[key] - before[key] for key in ("draft_tokens", "accepted_tokens"))
    assert drafted > 0
    return tokens, taken / drafted


def test_a_draft_model_is_pushed_with_the_model(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    a, b = (make_tiny_checkpoint(tmp_path / name, seed=n) for n, name in ((1, "a"), (2, "b")))
    experts = make_tiny_checkpoint(tmp_path / "other", seed=3, experts=4)
    config = {"method": "draft_model", "model": str(a), "num_speculative_tokens": 3}
    fleet = FleetCli(tmp_path / "fleet", tmp_path / "home")
    fleet.directory.mkdir()
    write_fleet(fleet, a, {"name": "drafts", "args": {"speculative-config": config}})
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        on_a, share = accepted(fleet)
        assert share == 1.0
        alone = fleet.json("sync-weights", str(b), expect=1)["error"]
        assert "speculative decoding by draft_model" in alone["message"]
        assert "--draft DIR" in alone["hint"]
        other = fleet.json("sync-weights", str(b), "--draft", str(experts), expect=1)["error"]
        assert "does not fit the running model" in other["message"]
        assert accepted(fleet) == (on_a, 1.0)

        on_b = {}
        for transport in ("shm", "disk"):
            both = ("sync-weights", str(b), "--draft", str(b), "--transport", transport)
            assert fleet.data(*both)["job"]["result"]["draft"] == str(b)
            on_b[transport], share = accepted(fleet)
            assert share == 1.0 and on_b[transport] != on_a
            fleet.run("sync-weights", str(b), "--draft", str(a), "--transport", transport)
            assert accepted(fleet)[0] == on_b[transport]
            assert accepted(fleet)[1] < 0.5
            fleet.run("sync-weights", "--rollback", "--draft", str(a))
        assert on_b["shm"] == on_b["disk"]
        fleet.run("sync-weights", str(b), "--draft", str(b))

        pid = row(fleet)["pid"]
        psutil.Process(pid).kill()
        deadline = time.monotonic() + UP_TIMEOUT_S
        while (now := row(fleet))["state"] != "ready" or now["pid"] == pid:
            assert time.monotonic() < deadline, now
            time.sleep(0.5)
        assert accepted(fleet) == (on_b["shm"], 1.0)
        assert "100%" in fleet.run("status").stdout
    finally:
        fleet.run("down", expect=None)

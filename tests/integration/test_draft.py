"""A server that drafts tokens by weights of its own: a push brings both, or is refused. The draft
model is a copy of the model, so that every token it drafts is accepted while they match."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.drafting import accepted, row, write_head, write_predicting
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.integration.unlike import answers, write_fleet
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.real, pytest.mark.beside]
MODEL = "unlike"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetCli]:
    pytest.importorskip("vllm")
    fleet = FleetCli(tmp_path / "fleet", tmp_path / "home")
    fleet.directory.mkdir()
    try:
        yield fleet
    finally:
        fleet.run("down", expect=None)


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [make_tiny_checkpoint(tmp_path / name, seed=n) for n, name in enumerate("ab", 1)]


def up(fleet: FleetCli, model: Path, method: str, draft: Path | None, tokens: int = 3) -> None:
    config: dict[str, object] = {"method": method, "num_speculative_tokens": tokens}
    if draft is not None:
        config["model"] = str(draft)
    write_fleet(fleet, model, {"name": "drafts", "args": {"speculative-config": config}})
    fleet.run("up", timeout_s=UP_TIMEOUT_S)


def test_a_draft_model_is_pushed_with_the_model(
    fleet: FleetCli, models: list[Path], tmp_path: Path
) -> None:
    a, b = models
    experts = make_tiny_checkpoint(tmp_path / "other", seed=3, experts=4)
    up(fleet, a, "draft_model", a)
    on_a, share = accepted(fleet, MODEL)
    assert share == 1.0
    alone = fleet.json("sync-weights", str(b), expect=1)["error"]
    assert "speculative decoding by draft_model" in alone["message"]
    assert "--draft DIR" in alone["hint"]
    other = fleet.json("sync-weights", str(b), "--draft", str(experts), expect=1)["error"]
    assert "does not fit the running model" in other["message"]
    assert accepted(fleet, MODEL) == (on_a, 1.0)

    on_b = {}
    for transport in ("shm", "disk"):
        both = ("sync-weights", str(b), "--draft", str(b), "--transport", transport)
        assert fleet.data(*both)["job"]["result"]["draft"] == str(b)
        on_b[transport], share = accepted(fleet, MODEL)
        assert share == 1.0
        assert on_b[transport] != on_a
        fleet.run("sync-weights", str(b), "--draft", str(a), "--transport", transport)
        tokens, share = accepted(fleet, MODEL)
        assert tokens == on_b[transport]
        assert share < 0.5
        fleet.run("sync-weights", str(a), "--draft", str(a), "--transport", transport)
        assert accepted(fleet, MODEL) == (on_a, 1.0)
    assert on_b["shm"] == on_b["disk"]
    fleet.run("sync-weights", str(b), "--draft", str(b))

    pid = row(fleet)["pid"]
    psutil.Process(pid).kill()
    deadline = time.monotonic() + UP_TIMEOUT_S
    while (now := row(fleet))["state"] != "ready" or now["pid"] == pid:
        assert time.monotonic() < deadline, now
        time.sleep(0.5)
    assert accepted(fleet, MODEL) == (on_b["shm"], 1.0)
    assert "100%" in fleet.run("status").stdout


def test_a_head_is_pushed_and_the_layers_that_it_shares_with_the_model_stay_the_models(
    fleet: FleetCli, models: list[Path], tmp_path: Path
) -> None:
    a, b = models
    heads = [
        write_head(model, tmp_path / f"head{n}", n, embeddings=True)
        for n, model in enumerate(models)
    ]
    up(fleet, a, "eagle3", heads[0])
    on_a = answers(fleet)
    fleet.run("sync-weights", str(b), "--draft", str(heads[1]))
    assert answers(fleet) != on_a
    fleet.run("sync-weights", str(a), "--draft", str(heads[0]), "--transport", "disk")
    assert answers(fleet) == on_a
    wrong = fleet.json("sync-weights", str(a), "--draft", str(heads[1]), expect=1)["error"]
    assert "shares layers with the model" in str(wrong)
    assert "drafts-0 quarantined" in wrong["message"]
    fleet.run("sync-weights", str(a), "--draft", str(heads[0]))
    assert answers(fleet) == on_a


def test_a_head_that_is_part_of_the_checkpoint_is_pushed_with_it(
    fleet: FleetCli, tmp_path: Path
) -> None:
    a, b = (write_predicting(tmp_path / name, n) for n, name in enumerate("ab", 1))
    bare = write_predicting(tmp_path / "bare", 2, head=False)
    up(fleet, a, "mtp", None, tokens=1)
    on_a, _ = accepted(fleet, MODEL)
    refused = fleet.json("sync-weights", str(bare), expect=1)["error"]
    assert "model.mtp_layers.0" in refused["message"]
    assert accepted(fleet, MODEL)[0] == on_a
    for transport in ("shm", "disk"):
        for path in (b, a):
            fleet.run("sync-weights", str(path), "--transport", transport)
            assert (accepted(fleet, MODEL)[0] == on_a) == (path == a)

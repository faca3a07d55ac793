"""Servers that draft tokens by weights of their own get these with the model's, or are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.errors import PreflightError, PushError, TrialFailed, WeightsGone
from skyctl.push.rows import choose_rows
from skyctl.store.fleet_weights import FleetWeights
from tests.stub.faults import Fault
from tests.stub.state import StubEngine
from tests.unit.push.checkpoints import filled, tiny_tensors, write_checkpoint
from tests.unit.push.fleets import BEFORE_FREEZE, Rotation, Stubs, pushed

LAST = "model.layers.1."


@pytest.fixture
def drafts(tmp_path: Path) -> list[Path]:
    """What servers draft with, and what comes after it."""
    return [write_checkpoint(tmp_path / f"draft{n}", tiny_tensors(n)) for n in (70, 90)]


@pytest.fixture
def drafting(stubs: Stubs, drafts: list[Path]) -> Stubs:
    """Stubs that draft with a model of their own."""
    for engine in stubs.engines:
        drafts_by(engine, "eagle3", drafts[0])
    return stubs


def drafts_by(engine: StubEngine, method: str, model: Path) -> None:
    engine.settings = {"speculative_config": {"method": method, "model": str(model)}}
    engine.load_draft(str(model))
    engine.log.clear()


async def test_the_draft_model_is_loaded_while_servers_are_paused_and_compared(
    drafting: Stubs, drafts: list[Path]
) -> None:
    result = await pushed(drafting, draft=str(drafts[1]))
    assert result.draft == str(drafts[1])
    for engine in drafting.engines:
        loaded = engine.log.index(f"draft {drafts[1]}")
        assert engine.log.index("finish") < loaded < engine.log.index("resume")
        assert engine.draft_digest != engine.digest != "base"


async def test_a_head_that_predicts_more_tokens_comes_from_the_checkpoint_itself(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in stubs.engines:
        engine.draft_takes = LAST
        drafts_by(engine, "mtp", stubs.base)
    compared = []

    def choose(checkpoint: Any) -> Any:
        compared.append([tensor.name for tensor in checkpoint.tensors])
        return choose_rows(checkpoint)

    monkeypatch.setattr("skyctl.push.rows.choose_rows", choose)
    result = await pushed(stubs)
    assert not result.draft
    assert all(name.startswith(LAST) for name in min(compared, key=len))
    assert all(f"draft {stubs.new}" in engine.log for engine in stubs.engines)


async def test_what_has_no_draft_weights_or_other_ones_is_refused_untouched(
    drafting: Stubs, drafts: list[Path], tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", {**tiny_tensors(), "fc.weight": filled([4], 1)})
    with pytest.raises(PreflightError, match=r"demo-0: it drafts .* by eagle3") as caught:
        await pushed(drafting)
    assert "--draft DIR" in caught.value.hint
    with pytest.raises(PreflightError, match=r"fc.weight .* is not in the model"):
        await pushed(drafting, draft=str(other))
    drafting.engines[1].draft_takes = "head."
    with pytest.raises(PreflightError, match="holds nothing that demo-1 drafts tokens with"):
        await pushed(drafting, draft=str(drafts[1]))
    drafting.engines[1].draft_takes = ""
    fault = Fault("status", text="this vLLM has no draft model", calls=(BEFORE_FREEZE,))
    drafting.servers[0].asgi.calls.clear()
    drafting.servers[0].asgi.faults["/collective_rpc"] = fault
    with pytest.raises(PreflightError, match=r"its draft weights cannot be pushed: .*no draft"):
        await pushed(drafting, draft=str(drafts[1]))
    assert all(engine.log == [] for engine in drafting.engines)


async def test_a_draft_that_was_overwritten_since_it_was_pushed_is_not_pushed_again(
    drafting: Stubs, drafts: list[Path]
) -> None:
    result = await pushed(drafting, draft=str(drafts[1]))
    again = {"draft": str(drafts[1]), "expected_draft": result.draft_digest}
    assert (await pushed(drafting, **again)).draft_digest == result.draft_digest
    logs = [list(engine.log) for engine in drafting.engines]
    write_checkpoint(drafts[1], tiny_tensors(110))
    with pytest.raises(WeightsGone, match=r"the draft model .* was overwritten"):
        await pushed(drafting, **again)
    assert [engine.log for engine in drafting.engines] == logs


async def test_a_draft_for_servers_that_draft_nothing_is_refused(stubs: Stubs) -> None:
    with pytest.raises(PreflightError, match="no server drafts tokens"):
        await pushed(stubs, draft=str(stubs.new))
    assert all(engine.log == [] for engine in stubs.engines)


async def test_a_server_with_other_draft_weights_than_were_sent_is_not_resumed(
    drafting: Stubs, drafts: list[Path]
) -> None:
    drafting.engines[1].load_draft = lambda path: None  # type: ignore[method-assign]
    with pytest.raises(PushError, match="demo-1 does not hold what was sent") as caught:
        await pushed(drafting, draft=str(drafts[1]))
    assert [row["state"] for row in caught.value.details["servers"]] == ["ready", "quarantined"]

    def fail(path: str) -> None:
        raise OSError(f"{path} is not here")

    drafting.engines[0].load_draft = fail  # type: ignore[method-assign]
    with pytest.raises(PushError, match="draft model: ") as caught:
        await pushed(drafting, draft=str(drafts[0]))
    assert [engine.paused for engine in drafting.engines] == [True, True]


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
async def test_the_model_that_servers_were_started_with_goes_back_with_their_own_draft(
    stubs: Stubs, drafts: list[Path], method: str
) -> None:
    """After the trial of a first push, which failed; and by name."""
    own, beside = (drafts[0], str(drafts[0])) if method == "eagle3" else (stubs.base, "")
    for engine in stubs.engines:
        drafts_by(engine, method, own)
    base = str(stubs.base)
    stubs.fleet = replace(stubs.fleet, committed=FleetWeights(checkpoint=base))
    expect = [{"prompt": "ab", "max_tokens": 1, "expect": {"contains": "Z"}}]
    with pytest.raises(TrialFailed, match="the checkpoint before was pushed back"):
        trial = {"trial": {"prompts": expect}, "pause_mode": "wait"}
        await pushed(stubs, rotation=Rotation(stubs), draft=str(drafts[1]), **trial)
    for engine in stubs.engines:
        assert [line for line in engine.log if "draft" in line] == [
            f"draft {drafts[1]}",
            f"draft {own}",
        ]
        assert not engine.paused
    assert (await pushed(stubs, checkpoint=base)).draft == beside
    drafts_by(stubs.engines[1], "eagle3", drafts[1])
    if method == "eagle3":  # which of the two is not known
        with pytest.raises(PreflightError, match="demo-0: it drafts"):
            await pushed(stubs, checkpoint=base)
